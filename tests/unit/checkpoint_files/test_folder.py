"""Programs without the trainer: verified saving and loading."""

from pathlib import Path

import pytest
import torch

from megatron_eopt import checkpoint_files
from megatron_eopt.checkpoint_files.manifest import Manifest
from tests.harness import RankError, run_ranks
from tests.unit.stores.full_state import Case, build, sharded, steps
from tests.unit.stores.runs import DENSE

BF16 = {**DENSE, "query_groups": 4, "dtype": torch.bfloat16}


def save(case: Case, folder: str) -> None:
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 2)
    checkpoint_files.save(sharded(case, chunk, optimizer, is_loading=False), folder)


def load(case: Case, folder: str, digests: bool = True) -> set[str]:
    chunk, optimizer = build(case)
    wanted = sharded(case, chunk, optimizer, is_loading=True)
    return set(checkpoint_files.load(wanted, folder, digests=digests))


def test_the_manifest_says_who_wrote_it(tmp_path):
    run_ranks(2, save, Case("muon", BF16, {"tp": 2}), str(tmp_path / "tp"))
    run_ranks(1, save, Case("muon", BF16), str(tmp_path / "dp"))
    first, second = (Manifest.read(tmp_path / name) for name in ("tp", "dp"))
    assert first is not None
    assert second is not None
    assert first.written_by == second.written_by
    kinds = {"exp_avg", "exp_avg_sq", "momentum_buffer", "param"}
    assert set(first.written_by["optimizer_state"]) == kinds
    assert first.written_by["parameters"] > 10_000


def test_files_are_verified_before_they_are_loaded(tmp_path):
    case, folder = Case("muon", BF16), str(tmp_path)
    run_ranks(2, save, case, folder)
    assert run_ranks(2, load, case, folder) == [{"model", "optimizer"}] * 2
    path = Path(folder, "__1_0.distcp")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(RankError, match=r"its file __1_0\.distcp have changed"):
        run_ranks(2, load, case, folder)
    run_ranks(2, load, case, folder, False)
