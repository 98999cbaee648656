"""Cautious weight decay equals a loop in float64, on every storage and layout.

Updates follow from gradients alone, which are injected. So a run without weight decay shows the
updates of each step, and the loop adds what should decay.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_eopt import ConfigurationError, EmergingOptimizerConfig, get_megatron_optimizer
from megatron_eopt.fsdp2 import ParamKey
from megatron_eopt.megatron_fsdp import build_optimizer
from megatron_eopt.optimizers.element_wise import Adam
from megatron_eopt.storage.local_tensors import local_of
from megatron_eopt.testing.scene import forget_megatron
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.tiers import mostly_long
from tests.unit.fsdp2.models import UNITS, eager, gradient, make_model, set_gradients
from tests.unit.storage import foreign, runs
from tests.unit.storage.runs import DENSE, INSTANCES, MOE, OVERLAP, PLAIN, Run
from tests.unit.wrappers.test_parts import in_columns, in_rows

STEPS, LR, DECAY = 6, 0.02, 2.0
FIELDS = {"optimizer": "muon", "lr": LR, "clip_grad": 0.0, "muon_fp32_matmul_prec": "highest"}

type Built = tuple[Any, Callable[[int], None]]
"""An optimizer, and what does a step with the gradients of its number."""


@dataclass(frozen=True)
class Case:
    """Ranks that train, and how an optimizer is built there for fields of a configuration."""

    ranks: int
    build: Callable[..., Built]
    arguments: tuple[Any, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)


def own_loop(fields: dict[str, Any], layout: str, dtype: torch.dtype = torch.float32) -> Built:
    initialize_megatron()
    model = make_model(layout, dtype)
    optimizer = build_optimizer(model, EmergingOptimizerConfig(**fields))

    def step(number: int) -> None:
        set_gradients(model, number)
        optimizer.step()

    return optimizer, step


def complex_weights(fields: dict[str, Any]) -> Built:
    model = nn.Linear(5, 4).to(torch.complex64)
    optimizer = build_optimizer(model, EmergingOptimizerConfig(**fields))

    def step(number: int) -> None:
        for param in model.parameters():
            parts = gradient("complex", (*param.shape, 2), number)
            param.grad = torch.view_as_complex(parts)
        optimizer.step()

    return optimizer, step


def trainer(fields: dict[str, Any], storage: str) -> Built:
    chunk = foreign.wrapped(storage, foreign.Foreign())
    chunk.ddp_config.use_distributed_optimizer = storage in ("sharded", "megatron_fsdp")
    optimizer = foreign.built(storage, chunk, **fields)

    def step(number: int) -> None:
        foreign.inject(storage, chunk, number)
        optimizer.step()

    return optimizer, step


def megatron(fields: dict[str, Any], run: Run) -> Built:
    chunk = runs.make_chunk(run)
    sharded = chunk.ddp_config.use_distributed_optimizer
    config = EmergingOptimizerConfig(**fields, use_distributed_optimizer=sharded)
    optimizer = get_megatron_optimizer(config, [chunk])
    runs.set_rates(optimizer, config)

    def step(number: int) -> None:
        optimizer.zero_grad()
        runs.inject(run, chunk, number)
        optimizer.step()

    return optimizer, step


def in_parts(fields: dict[str, Any], cut: Callable[[Any], Any]) -> Built:
    initialize_megatron()
    torch.manual_seed(0)
    model = cut(nn.Sequential(nn.Linear(9, 12), nn.Linear(12, 6)))
    config = EmergingOptimizerConfig(**fields)
    optimizer = get_megatron_optimizer(config, [model])
    runs.set_rates(optimizer, config)

    def step(number: int) -> None:
        for name, param in model.named_parameters():
            offset, whole = param.eopt_place
            part = gradient(name, whole, number)
            for dim, start in enumerate(offset):
                part = part.narrow(dim, start, param.shape[dim])
            param.grad = part.clone()
        optimizer.step()

    return optimizer, step


BF16 = DENSE | {"dtype": torch.bfloat16}
ADAM = {"optimizer": "adam"}
NORMUON, ADAMUON, NAMO = (
    {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": name}
    for name in ("normuon", "adamuon", "namo")
)
HALF = {"bf16": True, "params_dtype": torch.bfloat16}
OFF_LOADED = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
INT8 = {"muon_momentum_dtype": "int8"}
OF_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Muon": {},
    "Adam": ADAM,
    "Adam, torch's": ADAM | {"fused_adam": False},
    "NorMuon": NORMUON,
    "AdaMuon": ADAMUON,
    "NAMO": NAMO,
    **{f"Muon, {dtype}": {"muon_momentum_dtype": dtype} for dtype in ("bf16", "fp8", "int8")},
}
CASES = {
    **{name: Case(1, own_loop, ("plain",), fields) for name, fields in OF_OPTIMIZERS.items()},
    "float64": Case(1, own_loop, ("plain", torch.float64)),
    "complex": Case(1, complex_weights),
    **{f"own loop, {name}": Case(4, own_loop, (name,)) for name in ("fsdp", "hsdp", "tp")},
    **{f"own loop, {name}": Case(2, own_loop, (name,)) for name in ("optim_grads_params", *UNITS)},
    "own loop, fsdp, off-loaded": Case(2, own_loop, ("fsdp",), OFF_LOADED),
    "own loop, fsdp, Adam": Case(2, own_loop, ("fsdp",), ADAM),
    **{f"trainer, {name}": Case(2, trainer, (name,)) for name in foreign.STORAGES},
    **{f"trainer, {name}, Adam": Case(2, trainer, (name,), ADAM) for name in foreign.STORAGES},
    "DP 4": Case(4, megatron, (Run(),)),
    "TP 2 x DP 2": Case(4, megatron, (Run(parallel={"tp": 2}),)),
    "TP 2, replicated": Case(2, megatron, (Run(parallel={"tp": 2}, ddp=PLAIN),)),
    "experts, EP 2": Case(2, megatron, (Run(model=MOE, parallel={"ep": 2}),)),
    "two instances": Case(4, megatron, (Run(**INSTANCES),)),
    "bf16": Case(2, megatron, (Run(model=BF16),), HALF),
    "bf16, replicated": Case(2, megatron, (Run(model=BF16, ddp=PLAIN),), HALF),
    "bf16, NorMuon, int8": Case(2, megatron, (Run(model=BF16),), HALF | NORMUON | INT8),
    "bf16, off-loaded": Case(2, megatron, (Run(model=BF16),), HALF | OFF_LOADED),
    "overlap": Case(2, megatron, (Run(ddp=OVERLAP),), {"muon_overlap_dp_comm": True}),
    "rows": Case(2, in_parts, (in_rows,)),
    "columns, Adam": Case(2, in_parts, (in_columns,), ADAM),
}


def stepped_weights(optimizer: Any) -> list[tuple[float, Tensor]]:
    """Return weight decay and values of what this rank steps, in float64."""
    found = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            local = local_of(param).detach()
            local = torch.view_as_real(local) if local.is_complex() else local
            found.append((group["weight_decay"], local.double().flatten().clone()))
    return found


def trajectory(case: Case, **fields: Any) -> list[list[tuple[float, Tensor]]]:
    """Return the weights before and after each step."""
    optimizer, step = case.build(FIELDS | case.fields | fields, *case.arguments)
    found = [stepped_weights(optimizer)]
    for number in range(STEPS):
        step(number)
        found.append(stepped_weights(optimizer))
    forget_megatron()
    return found


@eager
def compared(case: Case) -> tuple[float, float, float, int]:
    """Return how far this rank is from the loop, and from decay everywhere, and what was compared.

    The last two are the share and the number of weights that have updates whose signs show.
    """
    free = trajectory(case, weight_decay=0.0)
    decayed = trajectory(case, weight_decay=DECAY, cautious_weight_decay=True)
    far, apart, seen, count = 0.0, 0.0, 0, 0
    for number, (decay, start) in enumerate(decayed[0]):
        by_hand, everywhere, shows = start, start, torch.ones_like(start, dtype=torch.bool)
        for step in range(STEPS):
            move = free[step + 1][number][1] - free[step][number][1]
            # the weights' own rounding hides smaller updates
            shows = shows & (move.abs() > 1e-6 * start.abs().clamp(min=1e-2))
            toward_zero = move * by_hand <= 0
            by_hand = by_hand - LR * decay * toward_zero * by_hand + move
            everywhere = everywhere - LR * decay * everywhere + move
        found = decayed[-1][number][1]
        far = max([far, *(found - by_hand)[shows].abs().tolist()])
        apart = max([apart, *(found - everywhere)[shows].abs().tolist()])
        seen, count = seen + int(shows.sum()), count + len(start)
    return far, apart, seen / max(count, 1), count


USUAL = ("Muon", "Adam", "NorMuon", "complex", "own loop, fsdp", "TP 2 x DP 2", "rows")


@pytest.mark.parametrize("name", mostly_long([*CASES], *USUAL))
def test_weights_decay_as_in_a_loop_in_float64(name: str) -> None:
    case = CASES[name]
    for far, apart, share, count in run_ranks(case.ranks, compared, case, timeout=300):
        # six steps, each of which rounds weights of at most 4 in float32 some times
        assert far < 4e-6
        if count > 100:
            assert apart > 1e-2
            assert share > 0.9


REFUSED: dict[str, dict[str, Any]] = {
    "needs decoupled weight decay": {"decoupled_weight_decay": False},
    "but soap updates some parameters": {"optimizer": "soap"},
    "but muon_hyperball updates": {"optimizer": "muon_hyperball"},
    "but sgd updates": {"optimizer": "sgd"},
    "but lion updates": {"muon_scalar_optimizer": "lion"},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_has_no_such_decay_is_refused(words: str) -> None:
    config = EmergingOptimizerConfig(**FIELDS | REFUSED[words], cautious_weight_decay=True)
    with pytest.raises(ConfigurationError, match=f"^cautious_weight_decay=True: .*{words}"):
        build_optimizer(make_model(), config)


def test_so_are_overrides_by_which_another_optimizer_steps() -> None:
    config = EmergingOptimizerConfig(**FIELDS, cautious_weight_decay=True)
    with pytest.raises(ConfigurationError, match="but soap updates some parameters"):
        build_optimizer(make_model(), config, {ParamKey(name="up.weight"): {"optimizer": "soap"}})
    l2 = {ParamKey(name="up.weight"): {"weight_decay_method": "l2"}}
    with pytest.raises(ConfigurationError, match="needs decoupled weight decay"):
        build_optimizer(make_model(), config, l2)
    with pytest.raises(ConfigurationError, match="needs decoupled weight decay"):
        Adam([nn.Parameter(torch.ones(2))], cautious_weight_decay=True)


@on_ranks(1)
def test_so_are_modes_of_megatrons_own_adam() -> None:
    chunk = foreign.wrapped("sharded", foreign.Foreign())
    fields = {"cautious_weight_decay": True, "use_distributed_optimizer": True}
    config = EmergingOptimizerConfig(optimizer="adam", lr=0.1, **fields)
    # set later, since making such a configuration needs Transformer Engine
    config.use_precision_aware_optimizer = True
    with pytest.raises(ConfigurationError, match="cautious_weight_decay=True: is not supported"):
        get_megatron_optimizer(config, [chunk])
