"""Measuring in turn."""

from functools import partial

from benchmarks.rounds import measured, ratios, slowest


def test_everybody_goes_first_in_turn_and_the_first_rounds_do_not_count() -> None:
    order: list[tuple[int, str]] = []

    def work(name: str, round_: int) -> int:
        order.append((round_, name))
        return round_

    found = measured({name: partial(work, name) for name in "abc"}, rounds=3, warm_up=1)
    assert [name for _, name in order[::3]] == ["a", "b", "c", "a"]
    assert found == {name: [1, 2, 3] for name in "abc"}


def test_a_round_takes_as_long_as_its_slowest_rank() -> None:
    assert slowest([[1.0, 5.0], [3.0, 2.0]]) == [3.0, 5.0]


def test_ratios_are_of_rounds() -> None:
    assert ratios([2.0, 40.0, 600.0], [1.0, 10.0, 100.0]) == [2.0, 4.0, 6.0]
    assert ratios([], []) == []
