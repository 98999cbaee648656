"""Distributed checkpoints of the plain storage: all optimizers, all layouts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_eopt.settings.registry import optimizer_names
from tests.harness import RankError, run_ranks
from tests.unit.build.plain_runs import (
    STEPS,
    Result,
    Run,
    build,
    load_adapted,
    local,
    read,
    sharded,
    step,
    write,
)

SMALL = {"layers": 1}
ADAPTIVE = [
    Run("adaptive_muon", {"adaptive_muon_moment2_method": method, "muon_split_qkv": True})
    for method in ("adamuon", "normuon", "namo")
]
MUON = Run("muon", dtype="bfloat16")
BF16 = [
    MUON,
    *(replace(run, dtype="bfloat16") for run in ADAPTIVE),
    Run("soap", dtype="bfloat16", model=SMALL),
    Run("lion", dtype="bfloat16"),
    Run("adam", dtype="bfloat16"),
    Run("sgd", {"sgd_momentum": 0.9}, dtype="bfloat16"),
    Run("muon", dtype="bfloat16", mixed=True),
]


def assert_continued(before: Result, after: Result) -> None:
    """Assert that a resumed run is the uninterrupted one, to the bit."""
    assert after.losses == before.losses[STEPS:]
    assert after.tensors.keys() == before.tensors.keys()
    for name, (_, tensor) in after.tensors.items():
        assert torch.equal(tensor, before.tensors[name][1]), name


def there_and_back(
    runs: list[Run], folder: str, in_background: bool = False
) -> list[tuple[Result, Result]]:
    """Write and read checkpoints of several runs."""
    results = []
    for number, run in enumerate(runs):
        place = f"{folder}/{number}"
        Path(place).mkdir(exist_ok=True)
        torch.distributed.barrier()
        results.append((write(run, place, in_background=in_background), read(run, place)))
    return results


def check(world: int, folder: Path, runs: list[Run], **options: Any) -> list[Any]:
    """Check on every rank that runs continue; return the first rank's results."""
    results = run_ranks(world, there_and_back, runs, str(folder), *options.values(), timeout=200)
    for rank in results:
        for before, after in rank:
            assert_continued(before, after)
    return results[0]


@pytest.mark.parametrize("name", optimizer_names())
def test_every_optimizer_continues(tmp_path, name):
    config = {"sgd_momentum": 0.9}
    ((_, after),) = check(1, tmp_path, [Run(name, config, model=SMALL)])
    # so that nothing was compared with nothing
    assert [n for n in after.tensors if n.startswith("decoder.layers.0.mlp.linear_fc2.weight ")]


@pytest.mark.parametrize("in_background", [False, True], ids=["sync", "async"])
def test_sixteen_bits_continue(tmp_path, in_background):
    check(2, tmp_path, BF16, in_background=in_background)


def test_a_step_that_the_first_rank_does_not_have(tmp_path):
    # only the last pipeline stage has a parameter of Adam
    run = Run("lion", overrides={"*output_layer*": "adam"}, parallel={"pp": 2})
    check(2, tmp_path, [run])


def assert_loaded(saved: list[Result], loaded: list[Result]) -> None:
    """Assert that every tensor is, to the bit, what was saved of it; one side has whole ones."""
    cut, whole = (saved, loaded) if len(saved) > len(loaded) else (loaded, saved)
    count = 0
    for rank in cut:
        for name, (slab, tensor) in rank.tensors.items():
            if name.startswith("final "):
                continue
            expected = whole[0].tensors[name][1]
            assert torch.equal(tensor, expected if slab is None else slab.of(expected)), name
            count += 1
    assert count >= len([n for n in whole[0].tensors if not n.startswith("final ")])


@pytest.mark.parametrize(
    ("before", "after"),
    [({"tp": 2}, {}), ({}, {"tp": 2}), ({"pp": 2}, {})],
    ids=["TP 2 to 1", "TP 1 to 2", "PP 2 to 1"],
)
@pytest.mark.parametrize("run", [MUON, *ADAPTIVE[1:]], ids=["muon", "normuon", "namo"])
def test_other_layouts_load_it(tmp_path, run, before, after):
    writes, reads = replace(run, parallel=before), replace(run, parallel=after)
    saved = run_ranks(2 if before else 1, write, writes, str(tmp_path))
    loaded = run_ranks(2 if after else 1, read, reads, str(tmp_path))
    assert_loaded(saved, loaded)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (2, 1, r"linear_\w+.weight.*: L, .*must hold this state"),
        (1, 2, r"linear_\w+.weight.*: L, .*must hold this state"),
    ],
)
def test_state_of_slabs_is_refused_at_another_size(tmp_path, before, after, message):
    run = Run("soap", model=SMALL)
    run_ranks(before, write, replace(run, parallel={"tp": before}), str(tmp_path))
    reads = replace(run, parallel={"tp": after})
    with pytest.raises(RankError, match=r"KeyError: .optimizer\.(matrix_)?state\.\w+\.decoder"):
        run_ranks(after, read, reads, str(tmp_path))
    # and where what is missing is let pass
    with pytest.raises(RankError, match=f"ConfigurationError: .*{message}"):
        run_ranks(after, _read_without, reads, str(tmp_path), ("L", "R", "Q_L", "Q_R"))


def _read_without(run: Run, folder: str, kinds: tuple[str, ...]) -> Result:
    return read(run, folder, without=kinds)


def _write_and_read_without(run: Run, folder: str, kinds: tuple[str, ...]) -> Result:
    write(run, folder)
    return read(run, folder, without=kinds)


def test_missing_state_is_an_error_unless_it_may_start_fresh(tmp_path):
    run = Run("adam", model=SMALL)
    with pytest.raises(RankError, match=r"checkpoint=.*: exp_avg_sq, .*must hold this state"):
        run_ranks(1, _write_and_read_without, run, str(tmp_path), ("exp_avg_sq",))
    fresh = replace(run, config={"checkpoint_fresh_state": ("exp_avg_sq",)})
    (result,) = run_ranks(1, _read_without, fresh, str(tmp_path), ("exp_avg_sq",))
    states = {
        kind: [
            t for n, (_, t) in result.tensors.items() if n.endswith(f" {kind}") and "final" not in n
        ]
        for kind in ("exp_avg", "exp_avg_sq")
    }
    assert all(not tensor.any() for tensor in states["exp_avg_sq"])
    assert any(tensor.any() for tensor in states["exp_avg"])
    assert {len(tensors) for tensors in states.values()} == {len(states["exp_avg"])} != {0}


STOCK = Run(
    "muon",
    {"muon_fp32_matmul_prec": "highest", "muon_tp_mode": "duplicated"},
    dtype="bfloat16",
    stock_config=True,
)


def _exchange(writes: Run, reads: Run, folder: str) -> tuple[Result, Result]:
    return write(writes, folder), read(reads, folder)


@pytest.mark.parametrize("name", ["muon", "adam"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("by_stock", [True, False], ids=["from stock", "to stock"])
def test_checkpoints_are_megatrons(tmp_path, name, dtype, by_stock):
    ours = replace(STOCK, optimizer=name, dtype=dtype)
    stock = replace(ours, stock=True)
    runs = (stock, ours) if by_stock else (ours, stock)
    ((before, after),) = run_ranks(1, _exchange, *runs, str(tmp_path))
    assert_continued(before, after)


def _convert(writes: Run, reads: Run, folder: str, from_adam: bool) -> tuple[Result, Result, str]:
    """Load another optimizer's checkpoint, step and save again."""
    before = write(writes, folder)
    chunk, optimizer = build(reads, seed=2)
    notes = load_adapted(chunk, optimizer, folder, momentum_from_adam=from_adam)
    found = {name: (slab, value.clone()) for name, (slab, value) in local(chunk, optimizer).items()}
    losses = [step(chunk, optimizer, number) for number in range(STEPS, 2 * STEPS)]
    sharded(chunk, optimizer, is_loading=False)
    return before, Result(losses, found), "\n".join(notes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("old", "new"), [("adam", "muon"), ("muon", "adam")])
def test_the_optimizer_may_change(tmp_path, old, new, dtype):
    runs = [Run(name, dtype=dtype, model=SMALL) for name in (old, new)]
    ((before, after, notes),) = run_ranks(1, _convert, *runs, str(tmp_path), new == "muon")
    matrix = "decoder.layers.0.mlp.linear_fc2.weight"
    if new == "muon":
        momentum = after.tensors[f"{matrix} momentum_buffer"][1]
        assert torch.equal(momentum, before.tensors[f"{matrix} exp_avg"][1])
        assert "momentum_buffer is taken from exp_avg: 4 parameter(s)" in notes
    else:
        assert not after.tensors[f"{matrix} exp_avg"][1].any()
        assert "exp_avg starts fresh" in notes
    kept = [n for n in after.tensors if n in before.tensors and not n.startswith(matrix + " exp")]
    assert any(name.startswith("output_layer.weight exp_avg") for name in kept)
    for name in kept:
        assert torch.equal(after.tensors[name][1], before.tensors[name][1]), name


def _read_adapted(run: Run, folder: str) -> None:
    load_adapted(*build(run, seed=2), folder)


def test_state_of_slabs_is_refused_before_anything_is_read(tmp_path):
    run = Run("soap", model=SMALL)
    run_ranks(2, write, replace(run, parallel={"tp": 2}), str(tmp_path))
    with pytest.raises(RankError, match=r"ConfigurationError: .*: L, .*must hold this state"):
        run_ranks(1, _read_adapted, run, str(tmp_path))
