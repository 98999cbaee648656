"""What one number draws: a model, its optimizer, two layouts, and what happens in each step."""

import math
import random
import zlib
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_eopt.matrices import Split, gated, qkv, whole

DRAWS = 24
"""Draws of one run of the tests. The number of a draw, which is the rest of its seed, says how
weights are stored, so that every run has each storage."""

STEPS = (3, 2)
"""Before the state is saved, and after it is loaded."""

STORAGES = ("zero1", "copies", "fsdp2", "zero1", "fsdp2", "plain")
"""``zero1``: fragments of the distributed optimizer; ``copies``: DDP of megatron-core without it;
``fsdp2``: DTensors in an own loop; ``plain``: torch's DDP in an own loop."""

TRAINERS = ({"zero1", "copies"}, {"fsdp2", "plain"})
"""Storages whose checkpoints load into each other."""

OPTIMIZERS = ("muon", "muon", "adaptive_muon", "adaptive_muon", "soap", "lion", "adam")


@dataclass(frozen=True)
class Layout:
    """How ranks store the weights."""

    storage: str
    ranks: int
    tp: int = 1
    ep: int = 1
    etp: int = 1  # tensor parallelism of experts
    replicas: int = 1  # of FSDP2's shards, as in HSDP, or instances of the distributed optimizer
    buckets: str = "whole"  # or "small", "padded", or "copied": all-reduced, as without ZeRO-1


@dataclass(frozen=True)
class Parameter:
    """A parameter of the whole model."""

    name: str
    shape: tuple[int, ...]
    split: Split | None = None  # matrices of a parameter that matrix optimizers step; None: Adam's
    cut: int = -1  # the dimension that tensor parallelism cuts
    halves: int = 1  # of the rows, each of which is cut by itself
    expert: int | None = None


@dataclass(frozen=True)
class Draw:
    """A training that follows from its seed."""

    seed: int
    optimizer: str
    config: tuple[tuple[str, Any], ...]  # fields of the configuration
    dtype: str
    layouts: tuple[Layout, Layout]  # before and after the checkpoint
    frozen: tuple[str, ...]
    without_gradient: tuple[tuple[str, ...], ...]  # for each step

    @property
    def command(self) -> str:
        """Return what repeats this draw."""
        return f"LAYOUT_SEED={self.seed} python -m pytest tests/functional/test_random_layouts.py"


def draw_of(seed: int) -> Draw:
    """Return the draw of a seed."""
    rng = random.Random(seed)
    storage = STORAGES[seed % DRAWS % len(STORAGES)]
    drawn = _layout(rng, storage, rng.choice([2, 2, 4])), _other_layout(rng, storage)
    optimizer = rng.choice(OPTIMIZERS)
    layouts = _supported(drawn[0], optimizer), _supported(drawn[1], optimizer)
    params = parameters_of(seed, layouts)
    names = [param.name for param in params]
    frozen = rng.sample(names, rng.randint(0, 2))
    if rng.random() < 0.1:
        # all experts of a rank, where experts are on several ranks
        frozen = [param.name for param in params if param.expert in (0, 1)]
    if optimizer == "soap":
        # it wants gradients of all matrices in each step
        names = [param.name for param in params if param.split is None]
    # bfloat16 gradients blur what _well_separated has made of them
    is_float32 = optimizer == "soap" and storage in TRAINERS[1]
    return Draw(
        seed,
        optimizer,
        tuple(_config(rng, optimizer).items()),
        "float32" if is_float32 else rng.choice(["bfloat16", "float32"]),
        layouts,
        tuple(frozen),
        tuple(tuple(n for n in names if rng.random() < 0.1) for _ in range(sum(STEPS))),
    )


def _layout(rng: random.Random, storage: str, ranks: int) -> Layout:
    if storage == "plain":
        return Layout(storage, ranks)
    if storage == "fsdp2":
        return Layout(storage, ranks, replicas=rng.choice([1, 2]) if ranks == 4 else 1)
    tp, etp = (rng.choice([1, min(2, ranks)]) for _ in range(2))
    ep = rng.choice([size for size in (1, 2, 4) if ranks % (size * etp) == 0])
    if storage == "copies":
        return Layout(storage, ranks, tp, ep, etp)
    buckets = rng.choice(["whole", "whole", "small", "padded", "copied"])
    # each instance needs as many ranks of the experts' data-parallel group
    can_repeat = buckets != "copied" and all(ranks // n % 2 == 0 for n in (tp, ep * etp))
    replicas = rng.choice([1, 2]) if can_repeat else 1
    return Layout(storage, ranks, tp, ep, etp, replicas, buckets)


def _other_layout(rng: random.Random, storage: str) -> Layout:
    """Return a layout that can load what a storage has saved."""
    family = next(family for family in TRAINERS if storage in family)
    other = rng.choice(sorted(family))
    return _layout(rng, other, rng.choice([1, 2, 2, 4]))


def _supported(layout: Layout, optimizer: str) -> Layout:
    """Return the layout, or one like it that an optimizer supports."""
    if optimizer == "soap" and layout.storage == "copies":
        # these neither split fused weights for SOAP nor put tensor-parallel ones together
        return replace(layout, storage="zero1")
    if optimizer == "adam" and layout.buckets == "copied":
        return replace(layout, buckets="whole")
    return layout


def _config(rng: random.Random, optimizer: str) -> dict[str, Any]:
    """Return the fields that are not the same in all draws."""
    fields: dict[str, Any] = {
        "lr": rng.choice([0.01, 0.03]),
        "weight_decay": rng.choice([0.0, 0.1, 0.3]),
        # so small a wave has one matrix, so large a one all
        "matrix_buffer_mb": rng.choice([0.001, 0.01, 32.0]),
        # some gradients are clipped, but not in an own loop
        "clip_grad": rng.choice([0.0, 5.0]),
    }
    if optimizer == "soap":
        fields["soap_use_kl_shampoo"] = rng.random() < 0.5
    if "muon" in optimizer:
        fields["muon_nesterov"] = rng.random() < 0.5
        fields["muon_momentum"] = rng.choice([0.8, 0.95])
        fields["muon_scale_mode"] = rng.choice(["spectral", "adamw_rms"])
        fields["muon_scalar_optimizer"] = rng.choice(["adam", "lion"])
    if optimizer == "muon":
        fields["muon_max_ranks_per_matrix"] = rng.choice([1, 2])
    if optimizer == "adaptive_muon":
        fields["adaptive_muon_moment2_method"] = rng.choice(["adamuon", "normuon", "namo"])
        fields["adaptive_muon_bias_correction"] = rng.random() < 0.5
    return fields


def parameters(draw: Draw) -> list[Parameter]:
    """Return the parameters of the whole model, in its order."""
    return parameters_of(draw.seed, draw.layouts)


def parameters_of(seed: int, layouts: tuple[Layout, ...]) -> list[Parameter]:
    """Return parameters that all layouts of a draw can store."""
    rng = random.Random(seed + 1)
    tp = math.lcm(*(size for layout in layouts for size in (layout.tp, layout.etp)))

    def cut(least: int = 3, most: int = 32) -> int:
        """Return a size that tensor parallelism can divide."""
        return tp * rng.randint(-(-least // tp), most // tp)

    def size() -> int:
        return rng.randint(3, 40)

    found = [Parameter("table.weight", (cut(), size()), cut=0), Parameter("norm.weight", (size(),))]
    shapes = [(size(), size()), (cut(), size()), (size(), cut())]
    for number, cut_dim in enumerate((-1, 0, 1)):
        shape = shapes[number]
        found.append(Parameter(f"dense{number}.weight", shape, whole(shape), cut_dim))
    found.append(Parameter("dense1.bias", shapes[1][:1], cut=0))
    groups, lengths = tp * rng.randint(1, 2), [rng.randint(2, 7), *[rng.randint(2, 5)] * 2]
    shape = (groups * sum(lengths), size())
    found.append(Parameter("qkv.weight", shape, qkv(shape, lengths), 0))
    # a batch of matrices of one shape
    twin = (size(), size())
    found += [Parameter(f"twins.{i}.weight", twin, whole(twin)) for i in range(rng.randint(2, 4))]
    shape = (2 * cut(3, 20), size())
    found.append(Parameter("gated.weight", shape, gated(shape), 0, 2))
    if layouts[0].storage in TRAINERS[1]:
        shape = (rng.randint(2, 5), rng.randint(2, 8), rng.randint(2, 8))
        return [*found, Parameter("experts.weight", shape, whole(shape))]
    shape, cut_dim = (cut(3, 20), cut(3, 20)), rng.choice([0, 1])
    of_experts = [f"moe.local_experts.{i}.weight" for i in range(4)]
    # which FSDP2 cannot cut
    found.append(Parameter("temperature.weight", ()))
    return found + [
        Parameter(name, shape, whole(shape), cut_dim, expert=i) for i, name in enumerate(of_experts)
    ]


def values(draw: Draw, param: Parameter, step: int = -1) -> torch.Tensor:
    """Return the gradient of a whole parameter in a step, or the weight before the first one.

    They are multiples of 1/8, which bfloat16 holds, except gradients of SOAP's matrices.
    """
    key = zlib.crc32(f"{draw.seed} {param.name} {step}".encode())
    generator = torch.Generator().manual_seed(key)
    if step >= 0 and param.name in draw.without_gradient[step]:
        return torch.zeros(param.shape)
    if step >= 0 and draw.optimizer == "soap" and param.split is not None:
        return _well_separated(param, generator)
    return torch.randint(-16, 17, param.shape, generator=generator) / 8


def _well_separated(param: Parameter, generator: torch.Generator) -> torch.Tensor:
    """Return a matrix of few singular values, far apart, in nearly the same bases in each step.

    Else SOAP's eigenbasis depends on last bits.
    """
    fixed = torch.Generator().manual_seed(math.prod(param.shape))
    cols = param.shape[-1]
    rows = math.prod(param.shape) // cols
    left, right = (
        torch.linalg.qr(torch.randn(size, size, generator=fixed, dtype=torch.float64))[0]
        for size in (rows, cols)
    )
    sizes = 30.0 * 0.5 ** torch.arange(min(rows, cols, 4))
    rank = len(sizes)
    mixed = torch.eye(rank) + 0.2 * torch.randn(rank, rank, generator=generator)
    found = left[:, :rank] @ (sizes[:, None] * mixed.double()) @ right[:, :rank].T
    return found.float().view(param.shape)
