"""Scales query and key weights, the main ones and the model's, by what attention has recorded."""

import math
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, Replicate

from megatron_eopt.base.address import address_of
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.qk_clip.attention import attentions, projections
from megatron_eopt.stores.buffers import process_groups

_CHAINS: WeakKeyDictionary[nn.Module, WeakSet[Any]] = WeakKeyDictionary()


def remember(model_chunks: Sequence[Any], chain: Any) -> None:
    """Note whose members store the main weights of a model."""
    for chunk in model_chunks:
        if isinstance(chunk, nn.Module):
            _CHAINS.setdefault(chunk, WeakSet()).add(chain)


def clip_qk(model: Sequence[Any], log_max_only: bool = False) -> float:
    """Clip attention logits by way of the weights that make them; collective over the world.

    Of a head whose largest logit is S the logits shrink by ``min(1, qk_clip_threshold / S)``, to
    which the queries' rows contribute the power ``qk_clip_alpha`` and the keys' the rest; the
    queries' rotary rows of multi-latent attention, whose keys all heads share, contribute all. Of
    a query group the largest logit of any head counts. Layers without logits, or with none above
    zero, stay as they are, as do frozen weights and biases. Main weights and the model's are
    scaled, and gathered again where the scaled main weights have other 16-bit roundings.

    Args:
        model: The wrapped chunks, after the optimizer's step.
        log_max_only: Only to reduce and forget what was recorded.

    Returns:
        The largest logit of all layers of the whole model, 0 if none was recorded.

    Raises:
        ConfigurationError: If the model's main weights are another optimizer's.
    """
    with torch.no_grad():
        return _clip(model, log_max_only=log_max_only)


def _clip(model: Sequence[Any], *, log_max_only: bool) -> float:
    found = [attention for chunk in model for attention in attentions(chunk)]
    # before any exchange, so that nobody waits for a rank that refuses
    chains = [] if log_max_only else _chains_of(model, found)
    recorded = [_take(attention) for attention in found]
    maxima = _over_all_tokens(model, found, recorded)
    if not log_max_only:
        _scale(chains, _factors(found, maxima))
    return _largest(model, maxima)


def _factors(found: Sequence[Any], maxima: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """Return what each row of each weight to clip is multiplied by."""
    if not found:
        return {}
    thresholds = [attention.config.qk_clip_threshold for attention in found]
    # nan and inf are no reason to change a weight
    clipped = [
        torch.isfinite(logits) & (logits > threshold)
        for logits, threshold in zip(maxima, thresholds, strict=True)
    ]
    factors: dict[Tensor, Tensor] = {}
    # the host waits once, not once for each layer
    is_clipped = torch.stack([heads.any() for heads in clipped]).tolist()
    for place in (place for place, is_one in enumerate(is_clipped) if is_one):
        eta = torch.where(clipped[place], thresholds[place] / maxima[place], 1.0)
        rank = found[place].pg_collection.tp.rank()
        for item in projections(found[place]):
            if item.weight.requires_grad:
                mine = item.factors(eta, rank)
                # modules may share a weight
                factors[item.weight] = torch.minimum(mine, factors.get(item.weight, mine))
    return factors


def _chains_of(model: Sequence[Any], found: Sequence[Any]) -> list[Any]:
    """Return what stores the main weights of the model."""
    chains = {chain for chunk in model for chain in _CHAINS.get(chunk, ())}
    if chains:
        # the one that was built last owns what several have
        return sorted(chains, key=lambda chain: chain.number)
    weights = [item.weight for attention in found for item in projections(attention)]
    if odd := [weight for weight in weights if hasattr(weight, "main_param")]:
        rule = "has main weights that only the optimizer knows which made them"
        way_out = "Build it with megatron_eopt.get_megatron_optimizer"
        raise ConfigurationError("model", tuple(odd[0].shape), rule, way_out)
    return []


def _take(attention: Any) -> Tensor:
    """Return and forget the largest logits of the local heads; -inf where none was recorded."""
    core = attention.core_attention
    recorded = getattr(core, "current_max_attn_logits", None)
    heads = attention.num_attention_heads_per_partition
    if recorded is None:
        device = next(attention.parameters()).device
        return torch.full((heads,), -math.inf, device=device)
    core.current_max_attn_logits = None
    if recorded.shape != (heads,):
        rule = f"must have one number for each of the {heads} heads of this rank"
        way_out = "Record the largest logit of each local head"
        raise ConfigurationError("current_max_attn_logits", recorded.shape, rule, way_out)
    return recorded.detach().float()  # type: ignore[no-any-return]


def _over_all_tokens(
    model: Sequence[Any], found: Sequence[Any], recorded: Sequence[Tensor]
) -> list[Tensor]:
    """Return the largest logits of every head, of all tokens of a step."""
    if not found:
        return []
    flat = torch.cat(list(recorded))
    distributed.all_reduce(flat, distributed.ReduceOp.MAX, group=_group(model, "dp_cp"))
    tensor = found[0].pg_collection.tp
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
    largest = torch.stack([item.max() for item in maxima]).max() if maxima else None
    value = torch.full((), -math.inf, device=device) if largest is None else largest.clone()
    distributed.all_reduce(value, distributed.ReduceOp.MAX, group=_group(model, "mp"))
    found = float(value)
    return 0.0 if found == -math.inf else found


def _scale(chains: Sequence[Any], factors: dict[Tensor, Tensor]) -> None:
    """Multiply the rows of weights, and their main weights, by their factors."""
    if not factors:
        return
    stored = {
        item.param: item
        for chain in chains
        for member in chain.members
        for item in member.storage.stored()
    }
    for chain in chains:
        chain.finish_gathering()
    for weight, rows in factors.items():
        _scale_one(weight, rows, stored.get(weight))
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
        # of a fragment elsewhere this is what its rank computes, or what a gather overwrites
        weight.detach().mul_(column)
        return
    if isinstance(weight, DTensor) or item.stop - item.start == weight.numel():
        main = item.main.detach()
        main.view(weight.shape).mul_(column.to(main.device))
        weight.detach().copy_(main.view(weight.shape))
        return
    own = weight.detach().view(-1)[item.start : item.stop]
    if address_of(item.main) == address_of(own):
        weight.detach().mul_(column)
        return
    flat = rows.repeat_interleave(weight[0].numel())[item.start : item.stop]
    own.copy_(item.main.detach().view(-1).mul_(flat.to(item.main.device)))
