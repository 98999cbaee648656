"""Scale the main and model weights of queries and keys by the attention logits recorded."""

import itertools
import math
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, Replicate

from megatron_eopt.base.address import address_of
from megatron_eopt.megatron_core.process_groups import process_groups
from megatron_eopt.qk_clip.attention import attentions, projections
from megatron_eopt.storage.local_tensors import local_of

_CHAINS: WeakKeyDictionary[nn.Module, WeakSet[Any]] = WeakKeyDictionary()


def remember(model_chunks: Sequence[Any], chain: Any) -> None:
    """Register the optimizer chain that stores a model's main weights."""
    for chunk in model_chunks:
        if isinstance(chunk, nn.Module):
            _CHAINS.setdefault(chunk, WeakSet()).add(chain)


def clip_qk(model: Sequence[Any], log_max_only: bool = False) -> float:
    """Clip attention logits by scaling query and key weights; collective over the world.

    The logits of a head with largest logit S shrink by ``r = min(1, qk_clip_threshold / S)``: its
    query rows are scaled by ``r ** qk_clip_alpha`` and its key rows by
    ``r ** (1 - qk_clip_alpha)``. In multi-latent attention, all heads share the rotary key, so
    rotary query rows are scaled by ``r``. A query group uses the largest logit of its heads. Main
    and model weights are scaled, but not biases or frozen weights; a distributed optimizer then
    gathers 16-bit weights again.

    Args:
        model: The wrapped model chunks, after the optimizer's step.
        log_max_only: Only reduce and reset the recorded logits.

    Returns:
        The largest logit of all layers of the whole model, 0 if none was recorded.
    """
    modules = [attention for chunk in model for attention in attentions(chunk)]
    maxima = _over_all_tokens(model, modules, [_take_logits(attention) for attention in modules])
    if not log_max_only and (factors := _factors(modules, maxima)):
        chains = {chain for chunk in model for chain in _CHAINS.get(chunk, ())}
        with torch.no_grad():
            # if several chains hold a weight, the one that was built last owns it
            _scale(sorted(chains, key=lambda chain: chain.number), factors)
    return _largest(model, maxima)


def _factors(modules: Sequence[Any], maxima: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """Return the factors of the rows of each weight to clip."""
    if not modules:
        return {}
    # a logit of nan or inf does not change weights
    clipped = [
        torch.isfinite(logits) & (logits > attention.config.qk_clip_threshold)
        for attention, logits in zip(modules, maxima, strict=True)
    ]
    # the host synchronizes once, not once per layer
    is_clipped = torch.stack([heads.any() for heads in clipped]).tolist()
    factors: dict[Tensor, Tensor] = {}
    layers = zip(modules, maxima, clipped, strict=True)
    for attention, logits, heads in itertools.compress(layers, is_clipped):
        eta = torch.where(heads, attention.config.qk_clip_threshold / logits, 1.0)
        for item in projections(attention):
            if item.weight.requires_grad:
                factors[item.weight] = item.factors(eta, attention.pg_collection.tp.rank())
    return factors


def _take_logits(attention: Any) -> Tensor:
    """Return and reset the largest logits of the local heads; -inf if none was recorded."""
    core = attention.core_attention
    recorded = getattr(core, "current_max_attn_logits", None)
    heads = attention.num_attention_heads_per_partition
    if recorded is None:
        device = next(attention.parameters()).device
        return torch.full((heads,), -math.inf, device=device)
    core.current_max_attn_logits = None
    return recorded.detach().float()  # type: ignore[no-any-return]


def _over_all_tokens(
    model: Sequence[Any], modules: Sequence[Any], recorded: Sequence[Tensor]
) -> list[Tensor]:
    """Return the largest logits of all heads over all tokens of a step."""
    if not modules:
        return []
    flat = torch.cat(list(recorded))
    # first the same heads over all tokens, then the heads of all tensor-parallel ranks
    distributed.all_reduce(flat, distributed.ReduceOp.MAX, group=_group(model, "dp_cp"))
    tensor = modules[0].pg_collection.tp
    # a query group may have heads on several ranks, so each rank needs all factors
    rows = [torch.empty_like(flat) for _ in range(tensor.size())]
    distributed.all_gather(rows, flat, group=tensor)
    sizes = [len(item) for item in recorded]
    split = [torch.split(row, sizes) for row in rows]
    return [torch.cat(parts) for parts in zip(*split, strict=True)]


def _group(model: Sequence[Any], name: str) -> Any:
    chunk = model[0]
    while chunk is not None:
        collection = getattr(chunk, "pg_collection", None)
        if getattr(collection, name, None) is not None:
            return getattr(collection, name)
        chunk = getattr(chunk, "module", None)
    return getattr(process_groups(None), name)


def _largest(model: Sequence[Any], maxima: Sequence[Tensor]) -> float:
    device = next((p.device for chunk in model for p in chunk.parameters()), "cpu")
    value = torch.full((), -math.inf, device=device)
    for heads in maxima:
        value = torch.maximum(value, heads.max())
    distributed.all_reduce(value, distributed.ReduceOp.MAX, group=_group(model, "mp"))
    return 0.0 if (largest := float(value)) == -math.inf else largest


def _scale(chains: Sequence[Any], factors: dict[Tensor, Tensor]) -> None:
    """Multiply the rows of weights, and their main weights, by their factors."""
    stored = {
        item.param: item
        for chain in chains
        for storage in chain.chained_optimizers
        for item in storage.shards
    }
    for weight, rows in factors.items():
        _scale_one(weight, rows, stored.get(weight))
    # each rank has written its own fragment only
    if any(weight.dtype != torch.float32 for weight in factors):
        for chain in chains:
            if chain.is_sharded:
                chain.gather_params(now=True)


def _scale_one(weight: Tensor, rows: Tensor, item: Any) -> None:
    column = rows.view(-1, *[1] * (weight.dim() - 1))
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        column = DTensor.from_local(column, mesh, [Replicate()] * mesh.ndim, run_check=False)
    if item is None or item.main is item.param:
        # other ranks' float32 fragments get the values that these compute; 16-bit ones are gathered
        weight.detach().mul_(column)
        return
    if isinstance(weight, DTensor) or item.stop - item.start == weight.numel():
        main = item.main.detach()
        # the main weight is scaled and then rounded, since scaling the rounded weight would differ
        main.view(weight.shape).mul_(column.to(local_of(main).device))
        weight.detach().copy_(main.view(weight.shape))
        return
    fragment = weight.detach().view(-1)[item.start : item.stop]
    if address_of(item.main) == address_of(fragment):
        weight.detach().mul_(column)
        return
    flat = rows.repeat_interleave(weight[0].numel())[item.start : item.stop]
    # a fragment may begin and end inside a row, so each element gets its row's factor
    fragment.copy_(item.main.detach().view(-1).mul_(flat.to(item.main.device)))
