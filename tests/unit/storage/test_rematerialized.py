"""Weight rematerialization (GTP) cuts rows once more: the same update as in one process."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core import dist_checkpointing

from megatron_eopt import checkpoints
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.testing.scene import forget_megatron
from megatron_eopt.wrappers.gradients import GradNorm
from tests.harness import run_ranks
from tests.harness.collectives import counted
from tests.harness.tiers import mostly_long
from tests.unit.storage.full_state import Case, build, differences, resume, save_one, steps, write
from tests.unit.storage.runs import (
    DENSE,
    MOE,
    NORMUON,
    OVERLAP,
    PLAIN,
    REPLICATED,
    Result,
    deviation,
    inject,
    weights,
)
from tests.unit.storage.test_layouts import TOLERANCE
from tests.unit.storage.test_resharding import one_further

LONG = pytest.mark.long
EXACT = {"muon_fp32_matmul_prec": "highest", "clip_grad": 1.0, "log_num_zeros_in_grad": True}
PADDED = {**DENSE, "hidden": 24, "heads": 4, "query_groups": 4}
"""Megatron pads each piece to a multiple of 16 rows: some ranks have nothing but padding."""


def alone(cases: list[Case]) -> list[Result]:
    return [stepped(case, *build(case), 0, 10) for case in cases]


def begun(cases: list[Case], folder: str) -> list[Result]:
    """Do half of the steps of each run, and save it."""
    return [stepped(case, *build(case), 0, 5, Path(folder, str(n))) for n, case in enumerate(cases)]


def ended(cases: list[Case], folder: str) -> list[Result]:
    """Load each run, and do the other half."""
    return [
        stepped(case, *resume(case, Path(folder, str(n))), 5, 10) for n, case in enumerate(cases)
    ]


def stepped(
    case: Case, chunk: Any, optimizer: Any, first: int, end: int, folder: Path | None = None
) -> Result:
    returned: list[Any] = []
    amplifies = case.optimizer == "soap" or "muon_momentum_dtype" in case.config
    with alike_factors() if amplifies else nullcontext():
        steps(case, chunk, _Recording(optimizer, returned), first, end)
    if folder is not None:
        write(case, chunk, optimizer, folder)
    result = Result(weights(case.run, chunk), returned)
    forget_megatron()
    return result


@contextmanager
def alike_factors() -> Iterator[None]:
    """Round clipping factors to few bits, so that they have the same bits at every layout.

    Norms are summed in float32, as in megatron-core: those of one process and of four ranks are
    each within 1.1e-7 of the sum in float64, and factors differ in their last two bits. Momentum in
    8 bits amplifies that. After ten steps of ``experts``, four ranks are 3.4e-4 from one process,
    but 9.0e-8 with the factors of that process. One process alone is 1.7e-4 from itself if all
    factors are one unit of their last place larger.
    """
    factor = GradNorm.factor

    def rounded(norm: GradNorm, most: Any) -> torch.Tensor:
        return factor(norm, most).bfloat16().float()

    with patch.object(GradNorm, "factor", rounded):
        yield


class _Recording:
    def __init__(self, optimizer: Any, returned: list[Any]) -> None:
        self.zero_grad, self._optimizer, self._returned = optimizer.zero_grad, optimizer, returned

    def step(self) -> None:
        self._returned.append(self._optimizer.step())


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "muon": {"muon_tp_mode": "duplicated"},
    "muon distributed": {"muon_tp_mode": "distributed"},
    "muon exchange": {"muon_tp_mode": "exchange"},
    "muon int8": {"muon_momentum_dtype": "int8"},
    "adaptive_muon": NORMUON,
    "soap": {},
    "adam": {},
}


def cases_of(model: dict[str, Any], storage: dict[str, Any], names: list[str]) -> list[Case]:
    return [
        Case(
            name.split()[0],
            model,
            ddp=storage.get("ddp", {}),
            config=EXACT | OPTIMIZERS[name] | storage.get("config", {}),
        )
        for name in names
    ]


type Layout = tuple[int, dict[str, int]]

CUTS: dict[str, tuple[dict[str, Any], Layout, Layout]] = {
    "padded": (PADDED, (2, {"gtp": 2}), (1, {})),
    "tp": (DENSE, (4, {"gtp": 2, "tp": 2}), (2, {"tp": 2})),
    "experts": (MOE, (4, {"gtp": 2, "expert_gtp": 2, "ep": 2}), (2, {"ep": 2})),
}


@pytest.mark.parametrize(
    ("where", "storage", "names"),
    [
        pytest.param("padded", "sharded", [*OPTIMIZERS], id="padded-sharded"),
        pytest.param("tp", "sharded", ["muon", "muon exchange"], id="tp-sharded-Muon"),
        pytest.param("tp", "replicated", ["muon"], id="tp-replicated-Muon"),
        *(
            pytest.param(where, storage, [*OPTIMIZERS], id=f"{where}-{storage}", marks=LONG)
            for where, storage in product(CUTS, ("sharded", "replicated"))
            if (where, storage) != ("padded", "sharded")
        ),
    ],
)
def test_a_cut_of_rows_changes_no_update(tmp_path, where: str, storage: str, names: list[str]):
    """Five of ten steps with rows cut, and five at another layout, are those of one process."""
    model, cut, other = CUTS[where]
    fields = REPLICATED if storage == "replicated" else {}
    names = [name for name in names if storage == "sharded" or name != "soap"]
    cases = cases_of({**model, "layers": 1}, fields, names)
    references = run_ranks(1, alone, cases)[0]
    first, second = (
        run_ranks(world, part, [replace(c, parallel=its) for c in cases], str(tmp_path))
        for part, (world, its) in ((begun, cut), (ended, other))
    )
    for number, (case, reference) in enumerate(zip(cases, references, strict=True)):
        assert deviation([its[number] for its in second], reference) < TOLERANCE, case
        for halves in product(first, second):
            found = [step for half in halves for step in half[number].steps]
            for (_, norm, _), (_, expected, _) in zip(found, reference.steps, strict=True):
                assert norm == pytest.approx(expected, rel=1e-6), case


# one layer; Megatron needs no padding up to four pieces of two slabs
BF16 = {**DENSE, "layers": 1, "hidden": 64, "vocabulary": 64, "dtype": torch.bfloat16}
UNCLIPPED = EXACT | {"clip_grad": 0.0}
GOING_ON: dict[str, tuple[list[Case], list[tuple[int, dict[str, int]]]]] = {
    "by rows and by owners": (
        [Case("muon", BF16, config=UNCLIPPED), Case("soap", BF16)],
        [(2, {"gtp": 2}), (4, {"gtp": 2, "tp": 2})],
    ),
    "sharded": (
        [
            Case("muon", BF16, config=UNCLIPPED),
            Case("adaptive_muon", BF16, config=UNCLIPPED | NORMUON),
            Case("adam", BF16),
            Case("soap", BF16),
        ],
        [(2, {"gtp": 2}), (4, {"gtp": 2, "tp": 2}), (2, {"tp": 2})],
    ),
    "replicated": (
        [
            Case("muon", BF16, ddp=PLAIN, config=PLAIN | UNCLIPPED),
            Case("adam", BF16, ddp=PLAIN, config=PLAIN),
        ],
        [(4, {"gtp": 2, "tp": 2}), (4, {"gtp": 4})],
    ),
    "padded": (
        [Case("muon", PADDED, config=UNCLIPPED), Case("muon", PADDED, ddp=PLAIN, config=PLAIN)],
        [(2, {"gtp": 2}), (4, {"gtp": 4})],
    ),
    "experts": (
        [
            Case("muon", MOE, config=UNCLIPPED),
            Case("muon", MOE, ddp=PLAIN, config=PLAIN | UNCLIPPED),
            Case("adam", MOE),
        ],
        # four ranks have the router, whose rows are not cut
        [(4, {"gtp": 2}), (2, {"gtp": 2, "expert_gtp": 2}), (2, {"ep": 2, "gtp": 2})],
    ),
}
"""Runs, and the layouts at which each goes on; Megatron cannot take padding out of weights."""


@pytest.mark.parametrize(
    "name",
    mostly_long(GOING_ON, "by rows and by owners"),
)
def test_state_goes_on_at_other_cuts(tmp_path, name):
    """Optimizer state is saved by the unsharded parameter, without padding rows."""
    cases, layouts = GOING_ON[name]
    folders = [str(tmp_path / str(number)) for number in range(len(layouts) + 1)]
    for folder in folders:
        Path(folder).mkdir()
    begun = [replace(case, parallel=layouts[0][1]) for case in cases]
    saved = run_ranks(layouts[0][0], begin, begun, folders[0])[0]
    expected = run_ranks(1, begin, cases, str(tmp_path), 1 + len(layouts))[0]
    for place, (world, parallel) in enumerate(layouts[1:]):
        own = [replace(case, parallel=parallel) for case in cases]
        loaded, after = run_ranks(
            world, one_further, own, *folders[place : place + 2], 2 + place, timeout=300
        )[0]
        for before, now, case in zip(saved, loaded, own, strict=True):
            assert not differences(of_optimizer(before), of_optimizer(now)), case
        saved = after
    for case, state, other in zip(cases, saved, expected, strict=True):
        for key, value in of_optimizer(other).items():
            if isinstance(value, torch.Tensor) and "eigenbas" not in key:
                far = float((state[key] - value).norm() / value.norm().clamp(min=1e-30))
                assert far < TOLERANCE, (case, key)


def begin(cases: list[Case], folder: str, count: int = 2) -> list[dict[str, Any]]:
    """Do some steps of each run and save it; return the whole states."""
    states = []
    for number, case in enumerate(cases):
        states.append(save_one(case, Path(folder, str(number)), count))
        forget_megatron()
    return states


def of_optimizer(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key.startswith("optimizer")}


def collectives(case: Case) -> tuple[list[str], int]:
    """Return those of a later step, and how many gather weights, which Megatron calls itself."""
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 1)
    inject(case.run, chunk, 1)
    with counted() as calls:
        optimizer.step()
    gathers = chunk.ddp_config.use_distributed_optimizer
    return [name for name, *_ in calls], len(chunk.bucket_groups) if gathers else 0


@pytest.mark.parametrize(
    ("storage", "gathers"),
    [({}, 1), pytest.param(PLAIN, 0, marks=LONG)],
    ids=["sharded", "plain"],
)
def test_a_step_has_at_most_four_collectives(storage, gathers):
    """One for the norm, two for all matrices, and one that gathers the weights."""
    model = {**DENSE, "layers": 1, "hidden": 64, "vocabulary": 128}
    config = {"clip_grad": 1.0, "muon_tp_mode": "exchange"} | storage
    case = Case("muon", model, {"gtp": 2, "tp": 2}, ddp=storage, config=config)
    found = run_ranks(8, collectives, case, timeout=300)
    assert found == [(["all_reduce", "all_to_all_single", "all_to_all_single"], gathers)] * 8


def refused(case: Case) -> str:
    with pytest.raises(ConfigurationError) as error:
        build(case)
    return error.value.argument


@pytest.mark.parametrize(
    ("argument", "ddp"),
    [("muon_overlap_dp_comm", OVERLAP), ("tp_mode", {})],
    ids=["overlap", "mode"],
)
def test_what_needs_whole_slabs_is_refused(argument, ddp):
    config = {"muon_overlap_dp_comm": True} if ddp else {"muon_tp_mode": "blockwise"}
    case = Case("muon", parallel={"gtp": 2}, ddp=ddp, config=config)
    assert run_ranks(2, refused, case) == [argument] * 2


def weights_saved(case: Case, folder: str) -> Result:
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 2)
    write(case, chunk, optimizer, folder)
    return Result(weights(case.run, chunk), [])


def weights_loaded(case: Case, folder: str, read: Any = checkpoints.load) -> Result:
    return Result(weights(case.run, resume(case, folder, read)[0]), [])


@pytest.mark.parametrize(
    ("dtype", "storage", "read"),
    [
        (torch.bfloat16, {}, checkpoints.load),
        # which knows nothing of rows: the model's weights are those of the main weights then
        (torch.bfloat16, {}, dist_checkpointing.load),
        (torch.bfloat16, PLAIN, dist_checkpointing.load),
        (torch.float32, {}, checkpoints.load),
        (torch.float32, PLAIN, checkpoints.load),
    ],
    ids=[
        "bf16",
        "bf16 by megatron-core",
        "copies in bf16 by megatron-core",
        "float32",
        "float32 without main weights",
    ],
)
@pytest.mark.parametrize(
    ("before", "after"),
    [({"gtp": 2}, {}), ({}, {"gtp": 2}), pytest.param({"gtp": 2}, {"tp": 2}, marks=LONG)],
)
def test_gate_and_up_are_loaded_from_where_they_are(tmp_path, before, after, dtype, storage, read):
    """megatron-core's own state has their rows in the order of one size of the group."""
    model = {**BF16, "gated": True, "dtype": dtype}
    case = Case("muon", model, before, ddp=storage, config=storage)
    saved = run_ranks(2 if before else 1, weights_saved, case, str(tmp_path))
    whole = run_ranks(1, weights_loaded, replace(case, parallel={}), str(tmp_path))[0]
    after_load = replace(case, parallel=after)
    found = run_ranks(2 if after else 1, weights_loaded, after_load, str(tmp_path), read)
    assert deviation(saved, whole) == deviation(found, whole) == 0
