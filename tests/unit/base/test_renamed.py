"""Old public names work for one more release, with a line that tells the new one."""

from importlib import import_module

import pytest
import torch

from megatron_eopt import TensorParallelAdaptiveMuon, TensorParallelMuon
from megatron_eopt.base import renamed


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("extending", "Stored", "MainShard"),
        ("extending", "Wanted", "OptimizerBuildContext"),
        ("extending", "chain_of_slabs", "build_replicated"),
        ("fsdp2", "ShardedOptimizer", "DTensorOptimizer"),
    ],
)
def test_an_old_name_finds_what_has_the_new_one(module, old, new, caplog):
    place = import_module(f"megatron_eopt.{module}")
    assert getattr(place, old) is getattr(place, new)
    assert f"megatron_eopt.{module}.{old} is called {new} now" in caplog.text
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        getattr(place, "other")  # noqa: B009


@pytest.mark.parametrize("cls", [TensorParallelMuon, TensorParallelAdaptiveMuon])
def test_muons_constructor_takes_the_old_name_of_its_buffer(cls, caplog):
    renamed._tell.cache_clear()  # it tells once per process
    assert cls([torch.nn.Parameter(torch.ones(2, 2))], wave_mb=3).matrix_buffer_mb == 3
    assert "wave_mb is called matrix_buffer_mb now" in caplog.text
