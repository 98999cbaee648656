"""A small model with matrices that divide evenly, unevenly and hardly at all, and its shardings."""

import functools
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core.distributed.fsdp.src.megatron_fsdp import (
    MegatronFSDP,
    experimental,
    fully_shard_model,
)
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
    uneven_dtensor_to_full_tensor,
)
from torch import nn
from torch.distributed.checkpoint import state_dict as dicts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Shard

from megatron_eopt.contrib import megatron_fsdp_v2 as _v2  # noqa: F401  registers itself
from megatron_eopt.matrices import gated
from megatron_eopt.megatron_fsdp import build_optimizer
from megatron_eopt.wrappers.config import EmergingOptimizerConfig

STEPS = 5
MANAGED = ("optim", "optim_grads", "optim_grads_params", "no_shard")
"""Layouts that are strategies of Megatron-FSDP, here by ``fully_shard_model``."""

UNITS = ("one unit", "units")
"""Layouts by the second version of Megatron-FSDP: the root alone, or each layer, is a unit."""

MATRICES = ("up.weight", "down.weight", "tiny.weight", "wide.weight", "experts.weight")


def eager[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Compile nothing while a function runs; emerging-optimizers' would take minutes here.

    As a decorator torch's own context sets the stance when modules are imported, too.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.compiler.set_stance("force_eager"):
            return function(*args, **kwargs)

    return call


class Experts(nn.Module):
    """Five matrices in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 6, 4))


class Model(nn.Module):
    """Nothing that can be run: gradients are injected."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 12)
        self.up = nn.Linear(12, 16)
        self.down = nn.Linear(16, 7, bias=False)
        self.tiny = nn.Linear(5, 3, bias=False)
        self.wide = nn.Linear(8, 4, bias=False)
        self.experts = Experts()
        self.norm = nn.LayerNorm(5)
        self.lm_head = nn.Linear(12, 11, bias=False)


def make_model(layout="plain", dtype=torch.float32):
    """Return the model, cut as ``layout`` says; ``up`` holds two matrices."""
    model = Model().to(dtype)
    split = model.up.weight.eopt_split = gated((16, 12))
    model = cut(model, layout, "up")
    if not is_in_units(layout):
        named(model)["up.weight"].eopt_split = split
    return model


def is_in_units(layout):
    """Whether the second version of Megatron-FSDP cuts; ``units x 2`` is HSDP of two replicas."""
    return layout.partition(" x ")[0] in UNITS


def is_managed(layout):
    """Whether Megatron-FSDP cuts, and not torch; ``optim x 2`` is HSDP of two replicas."""
    return layout.partition(" ")[0] in MANAGED


def named(model):
    """Return the parameters that are stepped, by name."""
    if isinstance(model, MegatronFSDP):
        model._replace_param_with_distributed_if_needed()
        model = model.module
    return dict(model.named_parameters())


def manage(model, layout, **options):
    """Cut as ``layout`` says by Megatron-FSDP."""
    strategy, _, replicas = layout.partition(" x ")
    outer = int(replicas or 1)
    shape, names = (outer, dist.get_world_size() // outer, 1), ("outer", "fsdp", "tp")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if outer > 1:
        both = mesh["outer", "fsdp"]._flatten("both")
        options |= {"dp_outer_dim": "outer", "hybrid_fsdp_group": both.get_group()}
    axes = {"dp_shard_dim": "fsdp", "tp_dim": "tp", "zero_dp_strategy": strategy}
    return fully_shard_model(
        model, device_mesh=mesh, fsdp_unit_modules=[nn.Linear], **axes, **options
    )


def put_in_units(model, layout, **options):
    """Cut as ``layout`` says by the second version of Megatron-FSDP."""
    kind, _, replicas = layout.partition(" x ")
    shape, names = (dist.get_world_size(),), ["dp"]
    parameter = gradient = [experimental.Flat()]
    if replicas:
        shape, names = (int(replicas), shape[0] // int(replicas)), ["outer", "dp"]
        gradient = [experimental.Partial(dist.ReduceOp.AVG), *gradient]
        parameter = [experimental.Replicate(), *parameter]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple(names))
    placements = experimental.Placements(
        dp_axes=names, parameter=parameter, gradient=gradient, optimizer=parameter
    )
    layers = [m for m in model.modules() if kind == "units" and isinstance(m, nn.Linear)]
    for module in (*layers, model):
        experimental.fully_shard(module, mesh, placements, **options)
    return model


def cut(model, layout, unit, **options):
    """Return the model, cut as ``layout`` says; its module ``unit`` is cut by itself."""
    if layout == "plain":
        return model
    if is_managed(layout):
        return manage(model, layout, **options)
    if is_in_units(layout):
        return put_in_units(model, layout, **options)
    world = dist.get_world_size()
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    else:
        full = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "wide": RowwiseParallel()}
        parallelize_module(model, full["tp"], plan)
        mesh = full["dp"]

    def placement(param):
        return Shard(1) if layout == "fsdp" and param.shape == (4, 8) else Shard(0)

    fully_shard(model.get_submodule(unit), mesh=mesh, **options)
    fully_shard(model, mesh=mesh, shard_placement_fn=placement, **options)
    return model


def shard(full, param):
    """Cut a whole tensor like ``param``, by torch.chunk alone: tensor parallelism, then FSDP."""
    if not isinstance(param, DTensor):
        return full.clone()
    mesh, local = param.device_mesh, full
    managed = hasattr(param, "megatron_fsdp_dist_index")
    if managed:
        held = getattr(param, "megatron_fsdp_slice", slice(None))
        local = full.reshape(-1)[held].view(param.to_local().shape)
    unit = getattr(param, "_mfsdp_parameter_group", None)
    if unit is not None:
        number = [one is param for one in unit.sharded_parameters].index(True)
        held = unit.main_weight._get_owned_range(number)
        start, numel = (held.tensor_relative_offset, held.numel) if held else (0, 0)
        local = full.reshape(-1)[start : start + numel].view(-1, *full.shape[1:])
    for axis in () if managed or unit else reversed(range(mesh.ndim)):
        placement = param.placements[axis]
        if not placement.is_replicate():
            chunks = local.chunk(mesh.size(axis), placement.dim)
            place = mesh.get_coordinate()[axis]
            empty = local.narrow(placement.dim, 0, 0)
            local = chunks[place] if place < len(chunks) else empty
    layout = {"shape": param.shape, "stride": param.stride(), "run_check": False}
    return DTensor.from_local(local.contiguous(), mesh, param.placements, **layout)


def gradient(name, shape, step):
    """Return the gradient of a parameter in a step, the same in every layout."""
    seed = sum(map(ord, name)) * 1000 + step
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def set_gradients(model, step):
    for name, param in named(model).items():
        dtype = getattr(param, "grad_dtype", None) or param.dtype
        full = gradient(name, param.shape, step)
        if param.is_complex():
            full = torch.complex(full, gradient(name + "'", param.shape, step))
        grad = shard(full.to(dtype), param)
        # Megatron-FSDP leaves empty shards without one
        is_empty = hasattr(param, "megatron_fsdp_dist_index") and not grad.to_local().numel()
        param.grad = None if is_empty else grad


def whole(tensor):
    """Return a copy of a whole tensor, whatever its layout; collective."""
    local = getattr(tensor, "_local_tensor", None)
    # what Megatron-FSDP cuts, and what is saved of it
    marks = ("megatron_fsdp_dist_index", "_mfsdp_parameter_group")
    if any(hasattr(tensor, m) for m in marks) or hasattr(local, "__create_chunk_list__"):
        with torch.no_grad():
            return uneven_dtensor_to_full_tensor(tensor).clone()
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def weights(model):
    return {name: whole(param) for name, param in named(model).items()}


def state(model, optimizer):
    """Return the whole state by parameter and key; collective."""
    return {
        f"{name}.{key}": whole(value) if isinstance(value, torch.Tensor) else value
        for name, param in model.named_parameters()
        for key, value in optimizer.state[param].items()
    }


def groups_of(optimizer):
    """Return the group of each parameter, by name."""
    names = optimizer.names
    return {names[param]: group for group in optimizer.param_groups for param in group["params"]}


def by_optimizer(_model, optimizer):
    return optimizer.state_dict()


def by_torch(model, optimizer):
    return dicts.get_optimizer_state_dict(model, optimizer)


def flattened(model, optimizer):
    return dicts.get_optimizer_state_dict(model, optimizer, options=FLAT)


FORMS = (by_optimizer, by_torch, flattened)
"""Ways to save the state of an optimizer."""

FLAT = dicts.StateDictOptions(flatten_optimizer_state_dict=True)


def load(form, model, optimizer, saved):
    """Load what one of :data:`FORMS` has returned."""
    if form is by_optimizer:
        optimizer.load_state_dict(saved)
    else:
        options = FLAT if form is flattened else None
        dicts.set_optimizer_state_dict(model, optimizer, saved, options=options)


METHODS = ("normuon", "adamuon", "namo")
"""Second moments of adaptive Muon, each an optimizer of its own in tests."""


def config(optimizer="muon", **fields):
    if optimizer in METHODS:
        fields["adaptive_muon_moment2_method"] = optimizer
        optimizer = "adaptive_muon"
    fields = {"lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.0, **fields}
    fields.setdefault("muon_fp32_matmul_prec", "highest")
    return EmergingOptimizerConfig(optimizer=optimizer, **fields)


def stepped(model, optimizer, *numbers):
    """Step with the gradients of these numbers; return the weights."""
    for number in numbers:
        set_gradients(model, number)
        optimizer.step()
    return weights(model)


@eager
def train(layout, settings, steps=STEPS, dtype=torch.float32):
    """Return the model and its optimizer after some steps with injected gradients."""
    model = make_model(layout, dtype)
    optimizer = build_optimizer(model, settings)
    stepped(model, optimizer, *range(steps))
    return model, optimizer


def trained(layout, settings, steps=STEPS, dtype=torch.float32):
    """Return the weights after some steps."""
    return weights(train(layout, settings, steps, dtype)[0])


def far(ours, theirs):
    """Return the largest relative distance of two sets of tensors, and whose it is."""
    assert ours.keys() == theirs.keys()
    found = {
        name: float((ours[name] - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-30))
        for name in ours
    }
    # no comparison is true of nan
    return max(
        (math.inf if math.isnan(distance) else distance, name) for name, distance in found.items()
    )
