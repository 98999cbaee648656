"""Which weights are fused, and how: known modules, and what users declare."""

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.config.settings import resolve
from megatron_eopt.matrices import gated
from megatron_eopt.routing.model import route_model
from megatron_eopt.routing.places import places_in
from megatron_eopt.routing.splits import find_splits, tensor_parallel_cut
from tests.harness.each_rank import on_ranks
from tests.unit.routing import modules

ALL: Any = ("qkv", "gated", "mla", "linear_attention")
SINGLE = {"moe_single_grouped_weight": True}


def table(model: nn.Module, which: Any = ALL) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Name every split and describe it."""
    splits = find_splits(places_in([model]), which=which)
    return {
        name: (splits[param].kind, splits[param].shape, splits[param].describe())
        for name, param in model.named_parameters()
        if param in splits
    }


def gpt() -> nn.Module:
    sizes = {"moe_ffn_hidden_size": 8, "moe_shared_expert_intermediate_size": 12}
    settings = modules.config(**modules.GATED, num_moe_experts=2, **sizes)
    return modules.gpt(settings, num_experts=2)


LAYER = "decoder.layers.0."
QKV = {LAYER + "self_attention.linear_qkv.weight": ("qkv", (48, 24), "(q 12 | k 6 | v 6) x 2")}
GATED = {
    LAYER + "mlp.experts.local_experts.0.linear_fc1.weight": ("gated", (16, 24), "gate 8 | up 8"),
    LAYER + "mlp.experts.local_experts.1.linear_fc1.weight": ("gated", (16, 24), "gate 8 | up 8"),
    LAYER + "mlp.shared_experts.linear_fc1.weight": ("gated", (24, 24), "gate 12 | up 12"),
}
LINEAR = (16, 24)
SECOND = {"linear_fc2.weight": ("experts", (3, 24, 8), "weight 24")}
latent = partial(modules.mla, modules.mla_config())
cross = partial(modules.cross_attention, modules.config(num_query_groups=4))

KNOWN: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    # how it is built, which splits are on, and what they are
    "a gated mixture of experts": (gpt, ALL, QKV | GATED),
    "projections alone": (gpt, ("qkv",), QKV),
    "gates alone": (gpt, ("gated",), GATED),
    "nothing": (gpt, (), {}),
    "cross attention": (cross, ALL, {"linear_kv.weight": ("qkv", (48, 24), "(k 6 | v 6) x 4")}),
    "one weight per expert": (
        modules.grouped_experts,
        ALL,
        {f"linear_fc1.weight{i}": ("gated", LINEAR, "gate 8 | up 8") for i in range(3)},
    ),
    "gate and up in alternating blocks": (
        partial(modules.grouped_experts, moe_mlp_glu_interleave_size=4),
        ALL,
        {f"linear_fc1.weight{i}": ("gated", LINEAR, "(gate 4 | up 4) x 2") for i in range(3)},
    ),
    "one weight for all experts": (
        partial(modules.grouped_experts, **SINGLE),
        ALL,
        {"linear_fc1.weight": ("gated", (3, 16, 24), "gate 8 | up 8"), **SECOND},
    ),
    "one weight for all experts, nothing split": (
        partial(modules.grouped_experts, **SINGLE),
        (),
        {"linear_fc1.weight": ("experts", (3, 16, 24), "weight 16"), **SECOND},
    ),
}


class Adapter(nn.Module):
    """What stands in a linear module's place, and adds to it."""

    def __init__(self, linear: nn.Module, name: str) -> None:
        super().__init__()
        self.linear_in = nn.Linear(4, 2, bias=False)
        self.add_module(name, linear)


@on_ranks(1)
def test_splits_of_known_modules_and_inside_of_adapters() -> None:
    modules.set_up(1)
    for name, (build, which, expected) in KNOWN.items():
        assert table(build(), which) == expected, name
    for build in (latent, modules.mamba, modules.gated_delta_net):
        for name in ("to_wrap", "base_layer"):
            model = build()
            plain = table(model)
            assert plain
            for path in plain:
                module = path.removesuffix(".weight")
                model.set_submodule(module, Adapter(model.get_submodule(module), name))
            adapted = table(model).items()
            assert {path.replace(f".{name}.", "."): split for path, split in adapted} == plain


HEADS = [
    (
        partial(modules.attention, modules.config()),
        {"q": (4, (6, 24)), "k": (2, (6, 24)), "v": (2, (6, 24))},
    ),
    (cross, {"k": (4, (6, 24)), "v": (4, (6, 24))}),
    (latent, {"q_nope": (4, (6, 8)), "v": (4, (4, 6)), "kv": (1, (6, 24))}),
    (modules.gated_delta_net, {"query": (2, (3, 24)), "value": (4, (5, 24)), "beta": (1, (4, 24))}),
]


@on_ranks(1)
def test_each_head_is_a_matrix_if_asked() -> None:
    modules.set_up(1)
    for build, expected in HEADS:
        splits = find_splits(places_in([build()]), which=[*ALL, "per_head"]).values()
        found = {part.name: (part.count, part.shape) for split in splits for part in split.parts}
        assert expected.items() <= found.items()


@on_ranks(1)
def test_one_weight_for_all_experts_is_a_stack_if_a_user_says_so() -> None:
    modules.set_up(1)
    config = EmergingOptimizerConfig(optimizer="muon", lr=0.1)
    for optimizer in ("adam", "muon"):
        model = nn.Module()
        model.experts = modules.grouped_experts(**SINGLE)
        model.proj = nn.Linear(4, 4, bias=False)
        model.config = model.experts.config  # type: ignore[assignment]
        for name, param in model.experts.named_parameters() if optimizer == "muon" else ():
            split = gated(tuple(param.shape)) if "fc1" in name else "whole"
            param.eopt_split = split  # type: ignore[attr-defined]
        routes = route_model(resolve(config), [model], {}).routes
        found = {route.parameter.name: route.optimizer for route in routes}
        stacks = [f"experts.linear_fc{number}.weight" for number in (1, 2)]
        assert found == {"proj.weight": "muon"} | dict.fromkeys(stacks, optimizer)


def test_a_split_that_is_none_is_refused() -> None:
    model = nn.Linear(4, 4)
    model.weight.eopt_split = "rows"  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match=r"^weight\.eopt_split='rows': must be a .*Split"):
        table(model)


class Ported(nn.Module):
    """A model from elsewhere: one fused weight under a common name, one plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(4, 12, bias=False)
        self.o_proj = nn.Linear(4, 4, bias=False)
        self.conv1d = nn.Conv1d(4, 4, 2)


def test_what_looks_fused_and_is_unknown_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"a": Ported(), "b": Ported(), "c": nn.Linear(4, 4)})
    # a recurrent layer without a weight of its state
    model["d"] = nn.ParameterDict({"weight_ih_l0": torch.zeros(12, 4)})
    model["c"].weight.partition_sizes = [2, 2]  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING):
        assert find_splits(places_in([model]), which=ALL) == {}
    (record,) = caplog.records
    message = record.getMessage()
    for name in ("a.qkv_proj.weight", "b.qkv_proj.weight", "c.weight", "eopt_split"):
        assert name in message
    assert "o_proj" not in message
    assert "weight_ih" not in message
    assert "conv1d" not in message


def test_declared_on_the_parameter(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = nn.ModuleList([Ported(), Ported(), Ported()])
    model[0].qkv_proj.weight.eopt_split = gated((12, 4))
    model[1].qkv_proj.weight.eopt_split = "whole"
    model[2].qkv_proj.weight.is_qkv = True
    model[2].qkv_proj.weight.qkv_split_shapes = [4, 1, 1]
    with caplog.at_level(logging.WARNING):
        found = table(model)
    assert not caplog.records
    assert found == {
        "0.qkv_proj.weight": ("gated", (12, 4), "gate 6 | up 6"),
        "2.qkv_proj.weight": ("qkv", (12, 4), "(q 4 | k 1 | v 1) x 2"),
    }
    assert table(model, which=()) == {"0.qkv_proj.weight": found["0.qkv_proj.weight"]}


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"eopt_split": gated((14, 4))}, r"\(12, 4\).*gate 7 \| up 7"),
        ({"is_qkv": True, "qkv_split_shapes": [5, 1, 1]}, "has 7"),
    ],
)
def test_a_split_that_does_not_fit_is_an_error(attributes: dict[str, Any], words: str) -> None:
    model = Ported()
    for name, value in attributes.items():
        setattr(model.qkv_proj.weight, name, value)
    with pytest.raises(ConfigurationError, match=words):
        find_splits(places_in([model]), which=ALL)


def test_what_packed_tensor_parallelism_cuts_is_not_split() -> None:
    model: Any = nn.ModuleDict({"gate_up_proj": nn.Linear(4, 12), "down_proj": nn.Linear(6, 4)})
    model.is_concatenated = True
    weight, packed = model.gate_up_proj.weight, _StridedShard(0, split_factor=2)
    weight.placements = (packed, Shard(0))  # FSDP2 over tensor parallelism
    assert table(model) == {"gate_up_proj.weight": ("gated", (12, 4), "gate 6 | up 6")}
    weight.placements = (packed,)
    assert table(model) == {}
    weight.eopt_split = gated((12, 4))
    with pytest.raises(ConfigurationError, match="packed tensor parallelism"):
        table(model)


def test_a_cut_weight_without_a_known_group_is_named() -> None:
    weight: Any = nn.Parameter(torch.zeros(4, 4))
    weight.tensor_model_parallel, weight.partition_dim = True, 0
    with pytest.raises(ConfigurationError, match="its tensor-parallel group is unknown"):
        tensor_parallel_cut(weight)
