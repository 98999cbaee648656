"""Where each value of a parameter's state comes from, by its meaning."""

import pytest

import megatron_eopt.optimizers.built_in  # noqa: F401  registers optimizers
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.checkpoint.continuation import (
    LoadReport,
    Note,
    Origin,
    Policy,
    Reader,
    SavedState,
    continuation_of,
)

MOMENTS = {"exp_avg", "exp_avg_sq"}
NOTHING = frozenset()


def found(keys, reader, saved, policy=None):
    its = continuation_of(keys, reader, saved, policy or Policy())
    return its.origins, its.fresh, its.missing


def saved(keys, *optimizers, momentum=None):
    return SavedState(frozenset(keys), optimizers, momentum)


def test_state_of_the_same_optimizer_continues():
    origins = {key: Origin(key) for key in MOMENTS}
    assert found(MOMENTS, Reader("adam"), saved(MOMENTS, "adam")) == (origins, NOTHING, NOTHING)


def test_moments_start_fresh_together():
    policy = Policy(frozenset({"exp_avg_sq"}))
    its = found(MOMENTS, Reader("adam"), saved({"exp_avg"}, "adam"), policy)
    assert its == ({}, MOMENTS, NOTHING)
    # a maximum may be younger than its moment
    policy = Policy(frozenset({"max_exp_avg_sq"}))
    its = found({*MOMENTS, "max_exp_avg_sq"}, Reader("adam"), saved(MOMENTS, "adam"), policy)
    assert its == ({key: Origin(key) for key in MOMENTS}, {"max_exp_avg_sq"}, NOTHING)


def test_what_the_user_has_not_allowed_is_missing():
    its = found(MOMENTS, Reader("adam"), saved({"exp_avg"}, "adam"))
    assert its == ({"exp_avg": Origin("exp_avg")}, NOTHING, {"exp_avg_sq"})


def test_sums_and_means_are_converted_with_the_momentum_of_the_sum():
    key = "momentum_buffer"
    sums, means = saved({key}, "sgd", momentum=0.75), saved({key}, "muon", momentum=0.75)
    origins, *_ = found({key}, Reader("muon", 0.5), sums)
    assert origins == {key: Origin(key, 0.25)}
    origins, *_ = found({key}, Reader("sgd", 0.5), means)
    assert origins == {key: Origin(key, 2.0)}


def test_another_optimizers_state_starts_fresh_unless_the_optimizer_has_stepped():
    reader, its = Reader("muon", 0.9), saved(MOMENTS, "adam")
    continuation = continuation_of({"momentum_buffer"}, reader, its, Policy())
    assert continuation.fresh == {"momentum_buffer"}
    report = LoadReport(Policy())
    assert report.decide("w", reader, {"momentum_buffer"}, its) == continuation
    report.refuse("state_dict", has_stepped=False)
    text = "momentum_buffer starts fresh (the checkpoint has: exp_avg, exp_avg_sq)"
    assert report.notes == [Note(text, "w")]
    with pytest.raises(ConfigurationError, match="has stepped and would not start fresh"):
        report.refuse("state_dict", has_stepped=True)


def test_momentum_may_start_as_adams_first_moment_if_the_user_says_so():
    policy = Policy(momentum_from_adam=True)
    origins, *_ = found({"momentum_buffer"}, Reader("muon", 0.9), saved(MOMENTS, "adam"), policy)
    assert origins == {"momentum_buffer": Origin("exp_avg")}
    origins, *_ = found({"momentum_buffer"}, Reader("sgd", 0.75), saved(MOMENTS, "adam"), policy)
    assert origins == {"momentum_buffer": Origin("exp_avg", 4.0)}
