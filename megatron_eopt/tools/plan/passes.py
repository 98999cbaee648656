"""Estimate an iteration's forward and backward passes: seconds, and bytes of activations.

Nothing is run or measured. The slowest pipeline stage, perhaps that of the output layer, decides:

* Compute takes the model's FLOPs at a share of the GPU's peak, its ``utilization``. Layers that are
  recomputed take a third more, and send half as much again.
* Stages follow megatron-core's 1F1B schedule without interleaving, which starts and ends idle.
* Sequence-parallel and expert-parallel traffic is not hidden. Gradients, and what stages send to
  each other, are assumed to travel meanwhile.
* Activations are those of https://arxiv.org/abs/2205.05198, table 2, with sequence parallelism and
  without attention scores, which fused attention does not keep. Sizes of heads, gated MLPs and
  experts, which that table does not have, are the model's; tokens are even among experts.
"""

import math
from dataclasses import dataclass

from megatron.core.transformer import TransformerConfig

from megatron_eopt.tools.dry_run import Collective
from megatron_eopt.tools.plan.architectures import Architecture
from megatron_eopt.tools.plan.cost import collective_seconds
from megatron_eopt.tools.plan.machine import Machine
from megatron_eopt.tools.plan.model import (
    ParallelLayout,
    stages,
    train_flops,
    transformer_config,
)


@dataclass(frozen=True)
class Passes:
    """Estimate of an iteration's forward and backward passes on one rank."""

    compute: float  # seconds
    traffic: float  # seconds of tensor- and expert-parallel communication
    bubble: float  # seconds in which the pipeline's start and end leave a stage idle
    kept: float  # bytes of activations
    recomputed: float  # the same if each layer keeps its input only and recomputes the rest
    recomputes: bool  # whether seconds are those of recomputation, since others do not fit

    @property
    def seconds(self) -> float:
        """Seconds of both passes."""
        return self.compute + self.traffic + self.bubble

    @property
    def activations(self) -> float:
        """Bytes of activations."""
        return self.recomputed if self.recomputes else self.kept


def passes(
    architecture: Architecture,
    layout: ParallelLayout,
    machine: Machine,
    *,
    tokens: int,
    micro_batch: int,
    room: float,
) -> Passes:
    """Estimate the passes at a layout; to be called in a dry world.

    Args:
        architecture: The model.
        layout: The parallel sizes.
        machine: The GPU and its links.
        tokens: Tokens per global batch.
        micro_batch: Sequences that a rank computes at a time.
        room: Bytes for activations, which are recomputed if they need more.
    """
    config, split = transformer_config(architecture, ParallelLayout()), stages(architecture, layout)
    micro_tokens = micro_batch * architecture.seq_length
    count = max(tokens / (micro_tokens * layout.data), 1.0)
    # sequences are split, too
    mine = micro_tokens / layout.tensor
    # of layers without and with experts
    layer_bytes = [mine * _bytes_per_token(config, experts=experts) for experts in (False, True)]
    layer_seconds = [
        _traffic(config, layout, machine, mine, experts=experts) for experts in (False, True)
    ]
    output = 6.0 * micro_tokens * config.hidden_size * architecture.vocab_size
    of_layer = (train_flops(architecture, micro_tokens) - output) / config.num_layers
    kept = recomputed = traffic = flops = 0.0
    for stage, layers in enumerate(split):
        kinds = [architecture.moe_layers[layer] for layer in layers]
        sizes = [layer_bytes[kind] for kind in kinds]
        flying = min(layout.pipeline - stage, math.ceil(count))
        is_last = stage == layout.pipeline - 1
        # logits are float32
        end = is_last * 4 * mine * (architecture.vocab_size + config.hidden_size)
        kept = max(kept, flying * math.fsum(sizes) + end)
        inputs = flying * len(sizes) * 2 * mine * config.hidden_size
        recomputed = max(recomputed, inputs + max(sizes) + end)
        traffic = max(traffic, math.fsum(layer_seconds[kind] for kind in kinds))
        flops = max(flops, len(kinds) * of_layer + is_last * output)
    compute = flops / (layout.tensor * machine.flops * machine.utilization)
    if recomputes := kept > room:
        compute, traffic = compute * 4 / 3, traffic * 3 / 2
    bubble = (layout.pipeline - 1) * (compute + traffic)
    return Passes(count * compute, count * traffic, bubble, kept, recomputed, recomputes)


def _bytes_per_token(config: TransformerConfig, *, experts: bool) -> float:
    """Return the bytes of activations that a layer keeps of a token."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    query = value = config.kv_channels or 0
    groups = config.num_query_groups or heads
    if config.multi_latent_attention:
        query = config.qk_head_dim + config.qk_pos_emb_head_dim  # type: ignore[attr-defined]
        value, groups = config.v_head_dim, heads  # type: ignore[attr-defined]
    attention = 2 * (heads + groups) * (query + value)
    inner, copies = config.ffn_hidden_size or 0, 0
    if experts:
        chosen = config.moe_router_topk
        inner = chosen * (config.moe_ffn_hidden_size or 0)
        inner += config.moe_shared_expert_intermediate_size or 0
        # what experts get and what they return
        copies = 4 * chosen * hidden
    mlp = (6 if config.gated_linear_unit else 4) * inner + copies
    # inputs of two norms, of attention and of the MLP; a byte for each of two dropout masks
    return float(attention + mlp + 10 * hidden)


def _traffic(
    config: TransformerConfig,
    layout: ParallelLayout,
    machine: Machine,
    tokens: float,
    *,
    experts: bool,
) -> float:
    """Return the seconds in which a layer's ranks send a microbatch's hidden states."""
    tensor, expert, inside = layout.tensor, layout.expert, layout.expert_tensor or 1
    sent = 2 * config.hidden_size * tokens
    # before and after attention and the MLP, in both passes
    gathers = [(tensor, sent, 4 if experts else 8)]
    seconds = 0.0
    if experts:
        chosen = sent * config.moe_router_topk
        gathers.append((inside, chosen, 4))
        if expert > 1:
            near = min(expert, max(1, machine.gpus // inside))
            inner = chosen * (near - 1) / expert / machine.link
            outer = chosen * (expert - near) / expert / machine.network
            # to the experts and back, in both passes
            seconds += 4 * (machine.latency + max(inner, outer))
    for ranks, size, often in gathers:
        if ranks > 1:
            call = Collective("allgather", ranks, int(size), 0, ranks - 1)
            seconds += often * collective_seconds(call, machine)
    return seconds
