"""HybridModel on a CPU: with the weights of a GPTModel it is that model, whatever trains it."""

import argparse
import re
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.module import Float16Module

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.cpu import check_supported
from megatron_eopt.qk_clip import clip_qk
from tests.harness.each_rank import on_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import assert_same, synthetic_batch, tiny_gpt, train_step, wrap_ddp
from tests.unit.storage.full_state import Case, optimizer_over

CLIP = {"qk_clip": True, "qk_clip_threshold": 0.01}
ROPE = {"gated": True, "query_groups": 2, "position_embedding": "rope"}
EXPERTS = {"experts": 4, "gated": True}
CASES = {
    "gated, groups, QK-clip, TP 2": Case("muon", ROPE | CLIP, {"tp": 2}),
    "experts, EP 2, bf16": Case("muon", EXPERTS | {"dtype": torch.bfloat16}, {"ep": 2}),
    "latent attention, DP 2": Case("soap", {"latent": True}),
    "tied, PP 2": Case("muon", ROPE | {"untied": False, "layers": 4}, {"pp": 2}),
}


def in_blocks(name: str) -> str:
    """Return how a GPTModel calls what a HybridModel calls ``name``: two layers are a block."""
    name = name.replace("decoder.final_norm.", "decoder.final_layernorm.")
    return re.sub(r"(?<=layers\.)\d+", lambda found: str(int(found[0]) // 2), name)


def _trained(case: Case, weights: dict[str, torch.Tensor] | None = None) -> Any:
    """Return losses and weights by their names in a GPTModel; with its weights a HybridModel's."""
    initialize_megatron(**case.parallel)
    model = tiny_gpt(hybrid=weights is not None, **case.model)
    bare = model.module if isinstance(model, Float16Module) else model
    hybrid = weights is not None
    named = {in_blocks(name) if hybrid else name: param for name, param in bare.named_parameters()}
    start = weights or {name: param.detach().clone() for name, param in named.items()}
    assert set(named) == set(start)
    for name, param in named.items():
        param.data.copy_(start[name])
    wrapped = wrap_ddp(model, use_distributed_optimizer=True)
    optimizer = optimizer_over(case, [wrapped])
    losses = []
    for step in range(3):
        rank = parallel_state.get_data_parallel_rank()
        losses.append(train_step([wrapped], optimizer, [synthetic_batch(2 * step + rank)]))
        if case.model.get("qk_clip"):
            clip_qk([wrapped])
    return start, losses, {name: param.detach().clone() for name, param in named.items()}


@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_it_trains_as_the_gpt_model_does(name):
    case = CASES[name]
    start, losses, weights = _trained(case)
    parallel_state.destroy_model_parallel()
    _, same_losses, same_weights = _trained(case, start)
    assert losses == same_losses
    assert_same(same_weights, weights)
    for name, weight in weights.items():
        assert not torch.equal(weight, start[name]) or name.endswith("bias"), name


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("M*-", "Mamba layers.*mamba-ssm"), ("G-", "gated delta net layers.*flash-linear-attention")],
)
@on_ranks(1)
def test_layers_of_gpu_kernels_name_their_package(pattern, message):
    initialize_megatron()
    config = tiny_gpt(hybrid=True).config
    config.num_layers = len(pattern)
    with pytest.raises(ValueError, match=message):
        HybridModel(config, hybrid_stack_spec, 32, 16, hybrid_layer_pattern=pattern)
    with pytest.raises(ConfigurationError, match=message):
        check_supported(argparse.Namespace(hybrid_layer_pattern=pattern))
