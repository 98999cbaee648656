"""megatron-core's file of the distributed optimizer's state, which has room for Adam's alone."""

import pytest

from megatron_eopt.base.errors import ConfigurationError
from tests.harness import run_ranks
from tests.unit.storage.full_state import Case, build, differences, full_state, steps


def restored(name: str, count: int, path: str) -> None:
    """Compare states after a file of the state after some steps was read."""
    case = Case(name, config={"sgd_momentum": 0.9})
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, count)
    optimizer.save_parameter_state(path)
    saved = full_state(case, chunk, optimizer)
    common = optimizer.state_dict()
    other, following = build(case)
    for new, old in zip(other.parameters(), chunk.parameters(), strict=True):
        new.data.copy_(old.data)
    following.load_state_dict(common)
    following.load_parameter_state(path)
    assert differences(saved, full_state(case, other, following)) == []


def restored_or_refused(path: str) -> None:
    for name, count in (("adam", 2), ("adam", 0), ("sgd", 0)):
        restored(name, count, f"{path}-{name}-{count}")
    _, optimizer = build(Case("muon"))
    for method in (optimizer.save_parameter_state, optimizer.load_parameter_state):
        with pytest.raises(ConfigurationError, match="save_state_dict_to_file"):
            method(path)


def test_adam_is_restored_and_muon_is_refused(tmp_path):
    run_ranks(2, restored_or_refused, str(tmp_path / "state.pt"))
