"""How a module is wrapped, or its class swapped, does not change what its parameters are."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed.fsdp.src.megatron_fsdp import experimental
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.config.settings import resolve
from megatron_eopt.megatron_fsdp import build_optimizer
from megatron_eopt.routing.outputs import OUTPUT_LAYERS, output_layers
from megatron_eopt.routing.parameters import trainable_parameters
from megatron_eopt.routing.places import ModelWalk, places_in
from megatron_eopt.routing.routes import route_all
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.harness.log import listening
from tests.unit.fsdp2.models import config, cut, eager

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    name: arguments
    for names, arguments in (
        ("AdaptiveLogSoftmaxWithLoss", (8, 12, [4])),
        ("BatchNorm1d BatchNorm2d BatchNorm3d PReLU", (8,)),
        ("Bilinear", (8, 6, 4)),
        ("Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d", (8, 6, 3)),
        ("Embedding EmbeddingBag", (12, 8)),
        ("GroupNorm", (2, 8)),
        ("InstanceNorm1d InstanceNorm2d InstanceNorm3d", (8, 1e-5, 0.1, True)),
        ("LayerNorm RMSNorm", ((4, 8),)),
        ("Linear NonDynamicallyQuantizableLinear", (8, 6)),
        ("GRU GRUCell LSTM LSTMCell RNN RNNCell", (8, 6)),
        ("MultiheadAttention", (8, 2, 0.0, True, True, False, 6, 6)),
        ("RNNBase", ("LSTM", 8, 6)),
        ("RNNCellBase", (8, 6, True, 4)),
        ("Transformer", (8, 2, 1, 1, 8)),
        ("TransformerDecoderLayer TransformerEncoderLayer", (8, 2, 8)),
    )
    for name in names.split()
}
"""Arguments of every class of torch.nn that makes parameters."""

NO_PARAMETERS = "Container CrossMapLRN2d Module ModuleDict ModuleList ParameterDict ParameterList"
NO_PARAMETERS += " Sequential TransformerDecoder TransformerEncoder DataParallel SyncBatchNorm"


class Model(nn.Module):
    """A language model around a module, with a bare ``output``."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.part = part
        self.experts = nn.ModuleList([nn.Conv1d(4, 4, 2), nn.Linear(4, 4)])
        self.decay = nn.Parameter(torch.ones(4, 8))
        self.output = nn.Linear(8, 10)


class Holder(nn.Module):
    def __init__(self, model: nn.Module, *, more: bool = False) -> None:
        super().__init__()
        self.policy = model
        if more:
            self.value = nn.Linear(8, 8)


class Same(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight


def parametrized(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        for name in list(module._parameters):
            if module._parameters[name] is not None and not isinstance(module, nn.RNNBase):
                parametrize.register_parametrization(module, name, Same())
    return model


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def with_compiled_part(model: Any) -> nn.Module:
    model.part = torch.compile(model.part)
    model.output = torch.compile(model.output)
    return model  # type: ignore[no-any-return]


def checkpointed(model: Any) -> nn.Module:
    model.part, model.output = checkpoint_wrapper(model.part), checkpoint_wrapper(model.output)
    return model  # type: ignore[no-any-return]


WRAPPINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "in a module": Holder,
    "in a module beside another": lambda model: Holder(model, more=True),
    "compiled": torch.compile,  # type: ignore[dict-item]
    "compiled parts": with_compiled_part,
    "checkpointed": checkpointed,
    "DDP": DistributedDataParallel,
    "DDP in a module": lambda model: Holder(DistributedDataParallel(model)),
    "fully_shard": sharded,
    "parametrized": parametrized,
    "parametrized, fully_shard": lambda model: sharded(parametrized(model)),
}


def routes(model: nn.Module, **fields: Any) -> dict[str, tuple[str, str]]:
    """Return optimizer and reason of every tensor, by its name without wrappers."""
    settings = resolve(EmergingOptimizerConfig(optimizer="muon", lr=0.1, **fields))
    found = output_layers(ModelWalk(model), OUTPUT_LAYERS).values()
    outputs = [param for module in found for param in module.parameters()]
    parameters = trainable_parameters(places_in([model]), outputs, stacks=True)
    routed = route_all(parameters, {}, settings)
    by_param = {id(route.parameter.param): (route.optimizer, route.why) for route in routed}
    named = {f"{p.path}.{p.leaf}".strip("."): by_param[id(p.param)] for p in places_in([model])}
    kept = [name for name in named if "value" not in name]
    return {name.removeprefix("policy."): named[name] for name in kept}


def classes() -> dict[str, type[nn.Module]]:
    """Return the classes of torch.nn that make parameters."""
    found = {n: c for n, c in vars(nn).items() if inspect.isclass(c) and issubclass(c, nn.Module)}
    found["NonDynamicallyQuantizableLinear"] = nn.modules.linear.NonDynamicallyQuantizableLinear
    skipped = NO_PARAMETERS.split()
    makes = {n: c for n, c in found.items() if n in ARGUMENTS or _needs_arguments(c)}
    return {n: c for n, c in makes.items() if not n.startswith("Lazy") and n not in skipped}


def _needs_arguments(cls: type[nn.Module]) -> bool:
    """Whether a class cannot be made without arguments, or has parameters without them."""
    try:
        return any(True for _ in cls().parameters())
    except (TypeError, NotImplementedError, ImportError):
        return "Parameter(" in inspect.getsource(cls.__init__)


@on_ranks(1, cpu=False)
def test_every_class_of_torch_has_one_route_however_it_is_wrapped() -> None:
    assert not classes().keys() ^ ARGUMENTS.keys()
    for name, cls in classes().items():
        for fields in ({}, {"muon_convolutions": True}):
            expected = routes(Model(cls(*ARGUMENTS[name])), **fields)
            for wrapping, wrap in WRAPPINGS.items():
                found = routes(wrap(Model(cls(*ARGUMENTS[name]))), **fields)
                # torch cannot parametrize what recurrent layers keep in flat lists
                assert found == expected, (name, wrapping, found.items() ^ expected.items())


def test_what_the_modules_say():
    found = routes(Model(nn.MultiheadAttention(8, 2)))
    vector = ("adam", "1-D")
    table = ("adam", "embedding or output layer")
    assert found == {
        "decay": ("adam", "not the weight of a layer"),
        "words.weight": table,
        "part.in_proj_weight": ("muon", "matrix"),
        "part.in_proj_bias": vector,
        "part.out_proj.weight": ("muon", "matrix"),
        "part.out_proj.bias": vector,
        "experts.0.weight": ("adam", "3-D"),
        "experts.0.bias": vector,
        "experts.1.weight": ("muon", "matrix"),
        "experts.1.bias": vector,
        "output.weight": table,
        "output.bias": table,
    }
    assert routes(Model(nn.EmbeddingBag(12, 8)))["part.weight"] == table


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


def sharded_by_layer(model: nn.Module) -> nn.Module:
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
    "fully_shard": sharded_by_layer,
    "replicate": replicated,
    "Megatron-FSDP": lambda model: cut(model, "optim_grads_params", "value"),
    "Megatron-FSDP, version 2": in_units,
    "parametrized": parametrized,
    "parametrized, fully_shard": lambda model: sharded_by_layer(parametrized(model)),
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


@on_ranks(1)
@eager
def test_an_empty_weight_is_named() -> None:
    for wrap in (lambda model: model, *WRAPPERS.values()):
        model = wrap(Network(rows=0))
        with pytest.raises(ConfigurationError, match=r"value\.\S*weight\S*=\(0, 8\): has no elem"):
            build_optimizer(model, config())
        # nothing of it is trained, whoever does not train it
        build_optimizer(model, config("adam"))
