import pytest
import torch
import torch.distributed as dist

from megatron_eopt.math.finite import NonFiniteError, check_finite, suspicion
from tests.harness import run_ranks

NAMED = {
    "fine": torch.ones(3, 4),
    "half": torch.ones(5, dtype=torch.bfloat16),
    "large": torch.full((2,), 3e38),
    "double": torch.full((2,), 1e300, dtype=torch.float64),
    "empty": torch.ones(0, 3),
}


def test_finite_tensors_pass() -> None:
    check_finite(NAMED.items())
    check_finite([])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["fine", "half", "double"])
def test_the_culprit_is_named(bad: float, name: str) -> None:
    tensors = {key: value.clone() for key, value in NAMED.items()}
    tensors[name].view(-1)[-1] = bad
    with pytest.raises(NonFiniteError, match=f"non-finite momentum of {name}:") as raised:
        check_finite(tensors.items(), "momentum")
    assert raised.value.names == [name]


def test_the_flag_is_a_tensor_and_waits_for_nobody() -> None:
    assert not suspicion([torch.ones(2)])
    flag = suspicion([torch.ones(2), torch.tensor([float("nan")])])
    assert flag.shape == ()
    assert flag
    # a meta tensor cannot be read, so this would fail if the host looked at a value
    assert suspicion([torch.ones(2, device="meta")]).dtype == torch.bool


def test_many_culprits_are_cut_short() -> None:
    with pytest.raises(NonFiniteError, match="and 4 more"):
        check_finite((f"layer{i}", torch.tensor([float("nan")])) for i in range(12))


CHAIN = [[[0, 1], [2], [3]], [[0], [1, 2], [3]], [[0], [1], [2, 3]]]
"""Groups of three kinds: each rank shares one with its neighbours, and none with all."""

SICK: list[tuple[int, ...]] = [(0,), (3,), (0, 3), ()]
"""Ranks that have a culprit, one time after another."""


def names_along_a_chain() -> list[list[str]]:
    """Return what this rank is told each time."""
    rank = dist.get_rank()
    groups = [dist.new_subgroups_by_enumeration(kind)[0] for kind in CHAIN]
    told: list[list[str]] = []
    for sick in SICK:
        bad = torch.tensor([float("nan" if rank in sick else 1)])
        try:
            check_finite([(f"w{rank}", bad)], groups=groups)
            told.append([])
        except NonFiniteError as error:
            told.append(error.names)
    return told


def test_ranks_that_share_no_group_raise_together() -> None:
    told = [[f"w{rank}" for rank in sick] for sick in SICK]
    assert run_ranks(4, names_along_a_chain) == [told] * 4
