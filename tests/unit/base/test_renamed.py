"""Old public names work for one more release, with a line that tells the new one."""

from importlib import import_module

import pytest


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
