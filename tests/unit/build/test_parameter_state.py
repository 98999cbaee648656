"""megatron-core's file of the distributed optimizer's state, which has room for Adam's alone."""

import pytest

from megatron_eopt.base.errors import ConfigurationError
from tests.harness import run_ranks
from tests.unit.stores.full_state import Case, build, differences, full_state, steps

SHARDED = {"use_distributed_optimizer": True}
PLAIN = {"use_distributed_optimizer": False}


def restored(name: str, count: int, path: str) -> list[str]:
    """Return what differs after a file of the state after some steps was read."""
    case = Case(name, ddp=SHARDED, config={"sgd_momentum": 0.9})
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
    return differences(saved, full_state(case, other, following))


@pytest.mark.parametrize(("name", "count"), [("adam", 2), ("adam", 0), ("sgd", 0)])
def test_adam_is_restored(tmp_path, name, count):
    assert run_ranks(2, restored, name, count, str(tmp_path / "state.pt")) == [[], []]


def refused(name: str, storage: dict[str, bool], path: str) -> list[str]:
    case = Case(name, ddp=storage, config=storage)
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 1)
    messages = []
    for method in (optimizer.save_parameter_state, optimizer.load_parameter_state):
        with pytest.raises(ConfigurationError) as error:
            method(path)
        messages.append(str(error.value))
    return messages


@pytest.mark.parametrize(
    ("name", "storage"),
    [("lion", SHARDED), ("muon", SHARDED), ("soap", SHARDED), ("muon", PLAIN), ("adam", PLAIN)],
)
def test_others_are_refused(tmp_path, name, storage):
    for save, load in run_ranks(2, refused, name, storage, str(tmp_path / "state.pt")):
        assert save.startswith("save_parameter_state=")
        assert load.startswith("load_parameter_state=")
        assert "save_state_dict_to_file" in save
    assert not list(tmp_path.iterdir())
