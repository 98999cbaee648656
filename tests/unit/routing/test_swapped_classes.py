"""A wrapper that swaps the class of a module changes nothing about its parameters."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed.fsdp.src.megatron_fsdp import experimental
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.contrib import megatron_fsdp_v2 as _v2  # noqa: F401  registers itself
from megatron_eopt.megatron_fsdp import build_optimizer
from megatron_eopt.routing.places import places_in
from tests.harness import run_ranks
from tests.harness.log import listening
from tests.unit.fsdp2.model import config, cut, eager
from tests.unit.routing.test_wrapping import parametrized


class Norm(nn.Module):
    """A norm of several heads, which has no function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8))


class Block(nn.Module):
    """A layer that counts itself, from 0 on."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number
        self.proj = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x)  # type: ignore[no-any-return]


class Network(nn.Module):
    def __init__(self, rows: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(10, 8)
        self.layers = nn.ModuleList([Block(0), Block(1)])
        self.column = nn.Linear(1, 8, bias=False)
        self.norm = Norm()
        self.value = nn.Linear(8, rows)


class Mark:
    """What a wrapper adds to a module."""


class Adapter(nn.Module):
    """What PEFT puts in a layer's place."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = layer


PATHS = ("words", "layers.0.proj", "layers.1.proj", "column", "norm", "value")


def leaves(model: nn.Module) -> list[tuple[str, nn.Module]]:
    found = [(path, model.get_submodule(path)) for path in PATHS]
    return [(path, getattr(module, "base_layer", module)) for path, module in found]


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*(m for _, m in leaves(model)), *model.get_submodule("layers").children()):
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def replicated(model: nn.Module) -> nn.Module:
    for _, module in leaves(model):
        replicate(module)
    return model


def swapped(model: nn.Module) -> nn.Module:
    for _, module in leaves(model):
        name, cls = f"NormalizedExperts{type(module).__name__}", type(module)
        module.__class__ = type(name, (Mark, cls), {"__module__": "megatron.core"})
    return model


def adapted(model: nn.Module) -> nn.Module:
    for path, module in leaves(model):
        if isinstance(module, nn.Linear):
            model.set_submodule(path, Adapter(module))
    return model


def in_units(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    flat = [experimental.Flat()]
    blocks = [*model.get_submodule("layers").children()]
    for module in (*(m for _, m in leaves(model)), *blocks, model):
        experimental.fully_shard(module, mesh, experimental.Placements(["dp"], flat, flat, flat))
    return model


def float8(model: nn.Module) -> nn.Module:
    from torchao.float8 import convert_to_float8_training

    return convert_to_float8_training(model)  # type: ignore[no-any-return]


def quantization_aware(model: nn.Module) -> nn.Module:
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    fake = IntxFakeQuantizeConfig(torch.int4, group_size=1)
    quantize_(model, QATConfig(weight_config=fake, step="prepare"))
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fully_shard": sharded,
    "replicate": replicated,
    "Megatron-FSDP": lambda model: cut(model, "optim_grads_params", "value"),
    "Megatron-FSDP, version 2": in_units,
    "parametrized": parametrized,
    "parametrized, fully_shard": lambda model: sharded(parametrized(model)),
    "PEFT": adapted,
    "PEFT, Megatron-FSDP, version 2": lambda model: in_units(adapted(model)),
    "another wrapper": swapped,
}
OF_TORCHAO: dict[str, Callable[[nn.Module], nn.Module]] = {
    "float8": float8,
    "float8, Megatron-FSDP, version 2": lambda model: in_units(float8(model)),
    "quantization-aware": quantization_aware,
}


def plain(name: str) -> str:
    name = re.sub(r"parametrizations\.(\w+)\.original", r"\1", name)
    return name.replace(".base_layer", "").removeprefix("module.")


def routing(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return what the table says about each parameter, and its name in the whole model."""
    with listening() as lines:
        build_optimizer(model, config(print_optimizer_routing=True))
    (table,) = (line for line in lines if line.startswith("optimizer routing"))
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[3:-2]]
    names = {f"name of {plain(p.name)}": (plain(p.global_name),) for p in places_in([model])}
    return names | {plain(name): tuple(its) for name, *its in rows}


@eager
def differences(wrappers: list[str]) -> list[Any]:
    expected = routing(Network())
    assert expected["value.weight"][1:] == ("adam", "-", "0.02", "0", "one row or column")
    assert expected["column.weight"][1:] == ("adam", "-", "0.02", "0", "one row or column")
    assert expected["norm.weight"][1:] == ("adam", "-", "0.02", "0", "weight of a norm")
    assert expected["layers.*.proj.weight (2)"][1:] == ("muon", "-", "0.02", "0.1", "matrix")
    assert expected["name of layers.0.proj.weight"] == ("layers.0.proj.weight",)
    found = [(name, routing((WRAPPERS | OF_TORCHAO)[name](Network()))) for name in wrappers]
    return [(name, its.items() ^ expected.items()) for name, its in found if its != expected]


def test_every_wrapper_leaves_the_routing():
    assert run_ranks(1, differences, [*WRAPPERS]) == [[]]


def test_quantized_layers_of_torchao_are_routed_as_before():
    pytest.importorskip("torchao")
    assert run_ranks(1, differences, [*OF_TORCHAO]) == [[]]


@eager
def errors_of_empty_weights() -> list[str]:
    found = []
    for name, wrap in {"plain": lambda model: model, **WRAPPERS}.items():
        model = wrap(Network(rows=0))
        with pytest.raises(ConfigurationError, match=r"value\.\S*weight\S*=\(0, 8\): has no elem"):
            build_optimizer(model, config())
        # nothing of it is trained, whoever does not train it
        build_optimizer(model, config("adam"))
        found.append(name)
    return found


def test_an_empty_weight_is_named():
    assert run_ranks(1, errors_of_empty_weights) == [["plain", *WRAPPERS]]
