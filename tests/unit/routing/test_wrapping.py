"""How a module is wrapped does not change what its parameters are."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.config.settings import resolve
from megatron_eopt.optimizers import built_in as _built_in  # noqa: F401  registers optimizers
from megatron_eopt.routing.outputs import OUTPUT_LAYERS, output_layers
from megatron_eopt.routing.parameters import trainable_parameters
from megatron_eopt.routing.places import ModelWalk, places_in
from megatron_eopt.routing.routes import route_all
from tests.harness import run_ranks

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
    config = EmergingOptimizerConfig(optimizer="muon", lr=0.1, **fields)
    found = output_layers(ModelWalk(model), OUTPUT_LAYERS).values()
    outputs = [param for module in found for param in module.parameters()]
    parameters = trainable_parameters(places_in([model]), outputs, stacks=True)
    by_param = {
        id(route.parameter.param): (route.optimizer, route.why)
        for route in route_all(parameters, {}, resolve(config))
    }
    named = {f"{p.path}.{p.leaf}".strip("."): by_param[id(p.param)] for p in places_in([model])}
    return {
        name.removeprefix("policy."): route for name, route in named.items() if "value" not in name
    }


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


def every_wrapping() -> list[tuple[str, str, Any]]:
    different = []
    for name, cls in classes().items():
        for fields in ({}, {"muon_convolutions": True}):
            expected = routes(Model(cls(*ARGUMENTS[name])), **fields)
            for wrapping, wrap in WRAPPINGS.items():
                found = routes(wrap(Model(cls(*ARGUMENTS[name]))), **fields)
                # torch cannot parametrize what recurrent layers keep in flat lists
                if found != expected:
                    different.append((name, wrapping, set(found.items()) ^ set(expected.items())))
    return different


def test_every_class_of_torch_has_one_route_however_it_is_wrapped():
    assert not classes().keys() ^ ARGUMENTS.keys()
    assert run_ranks(1, every_wrapping, cpu=False) == [[]]


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
