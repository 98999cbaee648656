"""Routers of mixtures of experts are found in models that are not Megatron's."""

import ast
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from megatron_eopt.fsdp2 import build_optimizer
from megatron_eopt.routing.places import places_in
from tests.harness.log import listening
from tests.unit.fsdp2.models import config, groups_of
from tests.unit.routing.test_known_transformers import Tiny, classes_of, make

EXPERTS = 5
WITHOUT = {"VitPoseBackboneMoeMLP"}
"""Classes with experts that the data set chooses."""

MIXED = {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}
WHOLE: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"rope_theta": 1e4}},
    "deepseek_v4": {},
    "diffusion_gemma": {"text_config": MIXED},
    "dots3_note": {},
    "gemma4": {"text_config": {**MIXED, "enable_moe_block": True}},
    "inkling2": {},
    "inkling2_loop": {},
    "nllb_moe": {},
    "step3p7": {},
    "switch_transformers": {},
}
"""Models whose parts cannot be built alone, or by any configuration, and what they need."""


class Mixture(Tiny):
    """A configuration of any model, with a number of experts that no other size has."""

    def __getattr__(self, name: str) -> object:
        is_count = "experts" in name and "per_tok" not in name and "shared" not in name
        if is_count and "intermediate" not in name and not name.startswith("__"):
            return EXPERTS
        return super().__getattr__(name)


def blocks() -> Iterator[tuple[str, str]]:
    """Yield the classes of transformers that have experts among their children, and modules."""
    for home, tree, _ in classes_of():
        made = {ast.unparse(n.targets[0]) for n in ast.walk(tree) if isinstance(n, ast.Assign)}
        if "self.experts" in made:
            yield home, tree.name


def named_routers(model: nn.Module) -> set[str]:
    """Return the modules with matrices in what transformers calls a gate or a router."""
    return {
        name.rpartition(".")[0]
        for name, param in model.named_parameters(remove_duplicate=False)
        if param.dim() == 2 and not {"gate", "router"}.isdisjoint(name.split("."))
    }


def whole_model(family: str) -> nn.Module:
    """Return a model of a family, of its usual size, without values."""
    transformers = pytest.importorskip("transformers")
    names = {"nllb_moe": "nllb-moe"}
    settings = transformers.AutoConfig.for_model(names.get(family, family), **WHOLE[family])
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModel.from_config(settings)
    return model


@pytest.mark.long
def test_routers_of_all_mixtures_of_transformers_are_found():
    found = [item for item in dict.fromkeys(blocks()) if item[1] not in WITHOUT]
    assert len(found) > 60
    for home, name in found:
        family = home.split(".")[2]
        block = whole_model(family) if family in WHOLE else make(home, name, Mixture)
        matrices = (place for place in places_in([block]) if place.dims == 2)
        routers = {place.path for place in matrices if place.of_router}
        assert routers == named_routers(block) != set(), name


class TokenChoice(nn.Module):
    """Routes as torchtitan's router does, under another name."""

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, experts, bias=False)


def grouped(dim: int, hidden: int, experts: int) -> nn.Module:
    """Return experts whose weights are 3-D parameters."""
    shapes = {"w1": (experts, hidden, dim), "w2": (experts, dim, hidden)}
    return nn.ParameterDict({name: torch.randn(shape) for name, shape in shapes.items()})


def as_list(dim: int, hidden: int, experts: int) -> nn.Module:
    every = [(nn.Linear(dim, hidden), nn.Linear(hidden, dim)) for _ in range(experts)]
    return nn.ModuleList(nn.Sequential(*layers) for layers in every)


class Layer(nn.Module):
    """A layer with attention and a mixture of experts, as a user may write it."""

    def __init__(self, choose: nn.Module, experts: nn.Module, name: str = "choose") -> None:
        super().__init__()
        self.mix = nn.Module()
        self.mix.add_module(name, choose)
        self.mix.experts = experts
        self.mix.shared_expert = nn.Linear(8, EXPERTS)
        self.mix.shared_expert_gate = nn.Linear(8, 1)
        self.attention = nn.Linear(8, 8)


CHOICES = {
    "a linear layer": lambda: nn.Linear(8, EXPERTS),
    "with weight norm": lambda: weight_norm(nn.Linear(8, EXPERTS)),
    "in a module": lambda: TokenChoice(8, EXPERTS),
    "compiled": lambda: torch.compile(TokenChoice(8, EXPERTS)),
}
KINDS = {"grouped": lambda: grouped(8, 16, EXPERTS), "a list": lambda: as_list(8, 16, EXPERTS)}
OFF = config(muon_orthogonalize_router=False)


@pytest.mark.parametrize("choose", CHOICES)
@pytest.mark.parametrize("experts", KINDS)
def test_a_weight_with_a_row_for_each_expert_beside_them_is_a_router(choose, experts):
    model = Layer(CHOICES[choose](), KINDS[experts]())
    with listening() as lines:
        optimizer = build_optimizer(model, OFF)
    names = {name: group["optimizer"] for name, group in groups_of(optimizer).items()}
    assert {kind for name, kind in names.items() if "mix.choose" in name} == {"adam"}
    assert names["attention.weight"] == names["mix.shared_expert.weight"] == "muon"
    assert not any("found no trainable router" in line for line in lines)


def test_a_model_without_a_router_says_so():
    none = Layer(nn.Linear(8, EXPERTS + 1), as_list(8, 16, EXPERTS))
    of_one = Layer(nn.Linear(8, 1), as_list(8, 16, 1))
    for model in (none, of_one, nn.Linear(8, 8)):
        with listening() as lines:
            build_optimizer(model, OFF)
        (line,) = (line for line in lines if "router" in line)
        assert "muon_orthogonalize_router=False: found no trainable router" in line
    for settings in (config(), config(optimizer="adam", muon_orthogonalize_router=False)):
        with listening() as lines:
            build_optimizer(nn.Sequential(nn.Linear(8, 8)), settings)
        assert not any("router" in line for line in lines)
