import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.matrices import gated
from megatron_eopt.routing.model import route_model
from megatron_eopt.routing.splits import find_splits, tensor_parallel_cut
from megatron_eopt.settings.settings import resolve
from tests.harness import run_ranks
from tests.unit.routing import modules

ALL: Any = ("qkv", "gated", "mla", "linear_attention")


def table(model: nn.Module, which: Any = ALL) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Name every split and describe it."""
    splits = find_splits([model], which=which)
    return {
        name: (splits[param].kind, splits[param].shape, splits[param].describe())
        for name, param in model.named_parameters()
        if param in splits
    }


def gpt_rank(tp_size: int, which: Any) -> Any:
    modules.set_up(tp_size)
    settings = modules.config(
        tp_size,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        num_moe_experts=2,
        moe_ffn_hidden_size=8,
        moe_shared_expert_intermediate_size=12,
    )
    return table(modules.gpt(settings, num_experts=2), which)


LAYER = "decoder.layers.0."
QKV = {LAYER + "self_attention.linear_qkv.weight": ("qkv", (48, 24), "(q 12 | k 6 | v 6) x 2")}
GATED = {
    LAYER + "mlp.experts.local_experts.0.linear_fc1.weight": ("gated", (16, 24), "gate 8 | up 8"),
    LAYER + "mlp.experts.local_experts.1.linear_fc1.weight": ("gated", (16, 24), "gate 8 | up 8"),
    LAYER + "mlp.shared_experts.linear_fc1.weight": ("gated", (24, 24), "gate 12 | up 12"),
}


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_gated_mixture_of_experts_is_the_same_on_all_ranks(tp_size: int) -> None:
    for found in run_ranks(tp_size, gpt_rank, tp_size, ALL):
        assert found == QKV | GATED


def test_only_the_kinds_that_are_on() -> None:
    assert run_ranks(1, gpt_rank, 1, ("qkv",)) == [QKV]
    assert run_ranks(1, gpt_rank, 1, ("gated",)) == [GATED]
    assert run_ranks(1, gpt_rank, 1, ()) == [{}]


def grouped_rank(changes: dict[str, Any], which: Any) -> Any:
    modules.set_up(1)
    return table(modules.grouped_experts(**changes), which)


def test_grouped_experts() -> None:
    # one weight per expert
    assert run_ranks(1, grouped_rank, {}, ALL) == [
        {f"linear_fc1.weight{i}": ("gated", (16, 24), "gate 8 | up 8") for i in range(3)}
    ]
    # gate and up in alternating blocks
    interleaved = ("gated", (16, 24), "(gate 4 | up 4) x 2")
    assert run_ranks(1, grouped_rank, {"moe_mlp_glu_interleave_size": 4}, ALL) == [
        {f"linear_fc1.weight{i}": interleaved for i in range(3)}
    ]


def test_one_weight_for_all_experts_is_never_one_matrix() -> None:
    single = {"moe_single_grouped_weight": True}
    second = {"linear_fc2.weight": ("experts", (3, 24, 8), "weight 24")}
    first = {"linear_fc1.weight": ("gated", (3, 16, 24), "gate 8 | up 8")}
    assert run_ranks(1, grouped_rank, single, ALL) == [first | second]
    first = {"linear_fc1.weight": ("experts", (3, 16, 24), "weight 16")}
    assert run_ranks(1, grouped_rank, single, ()) == [first | second]


class Kept(logging.Handler):
    """Keeps messages."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def routed_stacks(declared: bool) -> tuple[dict[str, str], list[str]]:
    """Return where a model's weights go, and what is warned of."""
    modules.set_up(1)
    model = nn.Module()
    model.experts = modules.grouped_experts(moe_single_grouped_weight=True)
    model.proj = nn.Linear(4, 4, bias=False)
    model.config = model.experts.config  # type: ignore[assignment]
    if declared:
        for name, param in model.experts.named_parameters():
            split = gated(tuple(param.shape)) if "fc1" in name else "whole"
            param.eopt_split = split  # type: ignore[attr-defined]
    log = logging.getLogger("megatron_eopt")
    log.addHandler(kept := Kept())
    try:
        config = EmergingOptimizerConfig(optimizer="muon", lr=0.1)
        routing = route_model(resolve(config), [model], {})
    finally:
        log.removeHandler(kept)
    routes = {route.parameter.name: route.optimizer for route in routing.routes}
    return routes, kept.messages


def test_one_weight_for_all_experts_is_a_stack_if_a_user_says_so() -> None:
    (routes, (warning,)) = run_ranks(1, routed_stacks, False)[0]
    stacks = ["experts.linear_fc1.weight", "experts.linear_fc2.weight"]
    assert routes == dict.fromkeys(stacks, "adam") | {"proj.weight": "muon"}
    assert ", ".join(stacks) in warning
    routes, warnings = run_ranks(1, routed_stacks, True)[0]
    assert set(routes.values()) == {"muon"}
    assert not warnings


def built_rank(build: Any, which: Any) -> Any:
    modules.set_up(1)
    model = build()
    return {name: describe for name, (_, _, describe) in table(model, which).items()}


def test_latent_attention() -> None:
    build = partial(modules.mla, modules.mla_config())
    expected = {
        "linear_q_up_proj.weight": "(q_nope 6 | q_pos 2) x 4",
        "linear_kv_down_proj.weight": "kv 6 | k_pos 2",
        "linear_kv_up_proj.weight": "(k_nope 6 | v 4) x 4",
    }
    assert run_ranks(1, built_rank, build, ALL) == [expected]


def test_linear_attention() -> None:
    found = run_ranks(1, built_rank, modules.gated_delta_net, ALL)
    assert found == [
        {"in_proj.weight": "query 6 | key 6 | value 20 | z 20 | beta 4 | alpha 4"}
    ]  # fmt: skip
    found = run_ranks(1, built_rank, modules.mamba, ALL)
    assert found == [{"in_proj.weight": "z 48 | x 48 | B 6 | C 6 | dt 8"}]


class Adapter(nn.Module):
    """What stands in a linear module's place, and adds to it."""

    def __init__(self, linear: nn.Module, name: str) -> None:
        super().__init__()
        self.linear_in = nn.Linear(4, 2, bias=False)
        self.add_module(name, linear)


def adapted_rank(build: Any, name: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the splits of a model's weights, and of the same with adapters around its modules."""
    modules.set_up(1)
    model = build()
    plain = {path: describe for path, (_, _, describe) in table(model).items()}
    for path in plain:
        model.set_submodule(
            module := path.removesuffix(".weight"), Adapter(model.get_submodule(module), name)
        )
    adapted = {path: describe for path, (_, _, describe) in table(model).items()}
    return plain, {path.replace(f".{name}.", "."): split for path, split in adapted.items()}


@pytest.mark.parametrize("name", ["to_wrap", "base_layer"])
@pytest.mark.parametrize(
    "build", [partial(modules.mla, modules.mla_config()), modules.mamba, modules.gated_delta_net]
)
def test_weights_inside_of_adapters(build: Any, name: str) -> None:
    ((plain, adapted),) = run_ranks(1, adapted_rank, build, name)
    assert adapted == plain != {}


def heads_rank(build: Any) -> dict[str, tuple[int, tuple[int, int]]]:
    modules.set_up(1)
    splits = find_splits([build()], which=[*ALL, "per_head"])
    return {
        part.name: (part.count, part.shape) for split in splits.values() for part in split.parts
    }


def test_heads() -> None:
    (found,) = run_ranks(1, heads_rank, partial(modules.attention, modules.config()))
    assert found == {"q": (4, (6, 24)), "k": (2, (6, 24)), "v": (2, (6, 24))}
    (found,) = run_ranks(1, heads_rank, partial(modules.mla, modules.mla_config()))
    assert found["q_nope"] == (4, (6, 8))
    assert found["v"] == (4, (4, 6))
    assert found["kv"] == (1, (6, 24))
    (found,) = run_ranks(1, heads_rank, modules.gated_delta_net)
    assert found["query"] == (2, (3, 24))
    assert found["value"] == (4, (5, 24))
    assert found["beta"] == (1, (4, 24))


class Ported(nn.Module):
    """A model from elsewhere: one fused weight under a common name, one plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(4, 12, bias=False)
        self.o_proj = nn.Linear(4, 4, bias=False)
        self.conv1d = nn.Conv1d(4, 4, 2)


def test_what_looks_fused_and_is_unknown_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"a": Ported(), "b": Ported(), "c": nn.MultiheadAttention(4, 2)})
    with caplog.at_level(logging.WARNING):
        assert find_splits([model], which=ALL) == {}
    (record,) = caplog.records
    message = record.getMessage()
    for name in ("a.qkv_proj.weight", "b.qkv_proj.weight", "c.in_proj_weight", "eopt_split"):
        assert name in message
    assert "o_proj" not in message.replace("c.in_proj", "")
    assert "conv1d" not in message


def test_a_weight_with_partition_sizes_is_fused(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = Ported()
    del model.qkv_proj
    model.o_proj.weight.partition_sizes = [1, 3]
    with caplog.at_level(logging.WARNING):
        find_splits([model], which=ALL)
    assert "o_proj.weight" in caplog.text


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


def test_a_weight_of_the_chunk_itself_and_a_stack_declared_whole() -> None:
    model: Any = nn.Module()
    model.fused = nn.Parameter(torch.zeros(6, 2))
    model.fused.eopt_split = gated((6, 2))
    model.stack = nn.Parameter(torch.zeros(5, 6, 2))
    model.stack.eopt_split = "whole"
    found = find_splits([model], which=())
    assert found[model.fused] == gated((6, 2))
    assert [part.count for part in found[model.stack].parts] == [5]


def test_frozen_weights_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    model = Ported().requires_grad_(False)
    with caplog.at_level(logging.WARNING):
        assert find_splits([model], which=ALL) == {}
    assert not caplog.records


def declare(value: object) -> Ported:
    model = Ported()
    setattr(model.qkv_proj.weight, "eopt_split", value)  # noqa: B010
    return model


def tagged(**attributes: object) -> Ported:
    model = Ported()
    for name, value in attributes.items():
        setattr(model.qkv_proj.weight, name, value)
    return model


@pytest.mark.parametrize(
    ("model", "which", "words"),
    [
        (declare(gated((14, 4))), ALL, ["qkv_proj.weight=(12, 4)", "(14, 4)", "14 rows in all"]),
        (declare("halves"), ALL, ["qkv_proj.weight.eopt_split='halves'", "'whole'"]),
        (
            tagged(is_qkv=True, qkv_split_shapes=[4, 1]),
            ALL,
            ["qkv_proj.weight", "qkv_split_shapes=(4, 1)"],
        ),
        (
            tagged(is_qkv=True, qkv_split_shapes=[5, 1, 1]),
            ALL,
            ["qkv_proj.weight=(12, 4)", "the 7 that", "q 5 | k 1"],
        ),
        (
            tagged(is_qkv=True, qkv_split_shapes=[4, 1, 1], is_gtp_weight_remat=True),
            ALL,
            ["qkv_proj.weight", "rematerialization"],
        ),
        (
            tagged(is_qkv=True, qkv_split_shapes=[4, 1, 1], tensor_model_parallel=True,
                   partition_dim=0),
            ALL,
            ["partition_dim=0", "tensor-parallel group"],
        ),
        (Ported(), ("qvk",), ["which='qvk'", "qkv"]),
        (Ported(), ("per_head",), ["per_head", "Add 'qkv'"]),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_an_error(model: Ported, which: Any, words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as error:
        find_splits([model], which=which)
    for word in words:
        assert word in str(error.value)


def resized_rank() -> str:
    modules.set_up(1)
    module = modules.attention(modules.config())
    module.linear_qkv.weight = nn.Parameter(torch.zeros(50, 24))
    with pytest.raises(ConfigurationError) as error:
        find_splits([module], which=ALL)
    return str(error.value)


def test_a_known_module_with_a_weight_of_another_size_is_an_error() -> None:
    (message,) = run_ranks(1, resized_rank)
    for word in ("linear_qkv.weight=(50, 24)", "(48, 24)", "(q 12 | k 6 | v 6) x 2", "48 rows"):
        assert word in message


def test_a_duplicated_weight_is_not_cut_whatever_its_partition_dim() -> None:
    param: Any = nn.Parameter(torch.zeros(2, 2))
    assert tensor_parallel_cut(param) == (1, -1)
    param.partition_dim, param.tensor_model_parallel = 0, False
    assert tensor_parallel_cut(param) == (1, -1)
