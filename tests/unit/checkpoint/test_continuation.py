"""Where each value of a parameter's state comes from, by its meaning."""

from types import SimpleNamespace

import pytest

import megatron_eopt.optimizers.built_in  # noqa: F401  registers optimizers
from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.checkpoint.continuation import (
    LoadReport,
    Note,
    Origin,
    Policy,
    Reader,
    SavedState,
    continuation_of,
    log_notes,
    missing_state,
    of_other_weights,
    shortened,
)
from megatron_eopt.checkpoint.saved_groups import steps_of

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


BUFFER = {"momentum_buffer"}


@pytest.mark.parametrize(
    ("reader", "its", "factor"),
    [
        (Reader("sgd", 0.5), saved(BUFFER, "sgd", momentum=0.75), 1.0),
        (Reader("sgd", 0.5), saved(BUFFER, "oblique_sgd", momentum=0.75), 0.5),
        (Reader("sgd", 0.5), saved(BUFFER, "oblique_sgd"), 1.0),
        (Reader("sgd"), saved(BUFFER, "oblique_sgd", momentum=0.75), 1.0),
        (Reader("muon", 0.5), saved(BUFFER, "mop", momentum=0.75), 1.0),
        (Reader("muon", 0.5), saved(BUFFER, "sgd"), None),  # no momentum to convert with
        (Reader("sgd"), saved(BUFFER, "muon", momentum=0.75), None),
        # an optimizer that does not say what its state means
        (Reader("own", 0.5), saved(BUFFER, "sgd", momentum=0.75), None),
        (Reader("own", 0.5), saved(BUFFER, "muon", momentum=0.75), None),
        (Reader("muon", 0.5), saved(BUFFER, "muon", "mop"), 1.0),  # either means the same
        (Reader("muon", 0.5), saved(BUFFER, "muon", "sgd", momentum=0.75), None),
    ],
)
def test_what_a_saved_momentum_is_multiplied_by(reader, its, factor):
    origins, *_ = found(BUFFER, reader, its)
    assert origins == ({} if factor is None else {"momentum_buffer": Origin(*BUFFER, factor)})


@pytest.mark.parametrize(
    ("reader", "its", "factor"),
    [
        (Reader("sgd"), saved(MOMENTS, "adam"), 1.0),  # a momentum of 0 sums one gradient
        (Reader("muon", 0.9), saved(MOMENTS, "laprop"), None),  # not a mean of gradients
        (Reader("muon", 0.9), saved({"exp_avg_sq"}, "adam"), None),
        (Reader("own", 0.9), saved(MOMENTS, "adam"), None),
    ],
)
def test_momentum_starts_as_a_mean_of_gradients_only(reader, its, factor):
    origins, *_ = found(BUFFER, reader, its, Policy(momentum_from_adam=True))
    assert origins == ({} if factor is None else {"momentum_buffer": Origin("exp_avg", factor)})
    # other state is no momentum
    assert found({"trace"}, reader, its, Policy(momentum_from_adam=True))[0] == {}


def test_a_saved_momentum_comes_before_adams():
    its, policy = saved({*BUFFER, *MOMENTS}, "muon"), Policy(momentum_from_adam=True)
    assert found(BUFFER, Reader("muon", 0.9), its, policy)[0] == {
        "momentum_buffer": Origin("momentum_buffer")
    }


@pytest.mark.parametrize(
    ("reader", "its", "fresh", "expected"),
    [
        # nothing of a parameter's, or only what its own optimizer may have written, is missing
        ("muon", saved((), "adam"), (), (NOTHING, BUFFER)),
        ("muon", saved({"other"}, "muon"), (), (NOTHING, BUFFER)),
        ("muon", saved({"other"}, "adam", "muon"), (), (NOTHING, BUFFER)),
        ("muon", saved({"other"}, "adam", "lion"), (), (BUFFER, NOTHING)),
        # only what the user names is allowed, and only all of it
        ("adam", saved((), "adam"), ("exp_avg",), (NOTHING, MOMENTS)),
        ("adam", saved((), "adam"), ("exp_avg", "exp_avg_sq"), (MOMENTS, NOTHING)),
        ("adam", saved({"exp_avg"}, "lion"), (), (NOTHING, {"exp_avg_sq"})),
        ("adam", saved({"exp_avg"}, "lion"), ("exp_avg_sq", "else"), (MOMENTS, NOTHING)),
    ],
)
def test_what_starts_fresh_and_what_is_missing(reader, its, fresh, expected):
    keys = MOMENTS if reader == "adam" else BUFFER
    assert found(keys, Reader(reader), its, Policy(frozenset(fresh)))[1:] == expected


@pytest.mark.parametrize("younger", [{"moment2_buffer"}, {"moment2_buffer", "max_exp_avg_sq"}])
def test_a_second_moment_and_maxima_may_be_younger_than_the_momentum(younger):
    reader, its = Reader("adaptive_muon"), saved(BUFFER, "adaptive_muon")
    assert found({*BUFFER, *younger}, reader, its, Policy(frozenset(younger)))[1:] == (
        younger,
        NOTHING,
    )


def test_a_group_says_who_reads_and_with_which_momentum():
    assert Reader.of("muon", {"momentum": 0.5}) == Reader("muon", 0.5)


@pytest.mark.parametrize("usable", [True, False])
def test_state_of_another_shape_is_missing_not_another_optimizers(usable):
    its = saved({"exp_avg"}, "lion")
    continuation = continuation_of(
        {"exp_avg"}, Reader("adam"), its, Policy(), lambda key, other: usable
    )
    assert continuation.missing == (NOTHING if usable else {"exp_avg"})
    assert not continuation.fresh


def test_policies_allow_what_either_allows():
    one, other = Policy(frozenset("a")), Policy(frozenset("b"), momentum_from_adam=True)
    both = Policy(frozenset("ab"), momentum_from_adam=True)
    assert one | other == other | one == both
    assert one | one == one
    config = EmergingOptimizerConfig(
        lr=0.1, ckpt_allow_missing_optim_state=("a",), checkpoint_momentum_from_adam=True
    )
    assert Policy.of(SimpleNamespace(config=config)) == Policy(
        frozenset("a"), momentum_from_adam=True
    )


@pytest.mark.parametrize(
    ("optimizers", "is_anothers"),
    [((), False), (("muon",), False), (("adam",), True), (("adam", "muon"), True)],
)
def test_whose_state_it_is(optimizers, is_anothers):
    assert saved(BUFFER, *optimizers).is_anothers(Reader("muon")) == is_anothers


def refusal(report, *, has_stepped=False, **how):
    with pytest.raises(ConfigurationError) as caught:
        report.refuse("checkpoint", has_stepped=has_stepped, **how)
    return str(caught.value)


def decided(reader, keys, its, policy=None, **how):
    report = LoadReport(policy or Policy())
    return report, report.decide("w", reader, keys, its, **how)


@pytest.mark.parametrize(
    ("keys", "misfit", "missing"),
    [
        ({"exp_avg"}, None, {"exp_avg_sq"}),
        (MOMENTS, "has another shape", {"exp_avg", "exp_avg_sq"}),
        ({"exp_avg", "exp_avg_sq", "rare"}, "has another shape", {*MOMENTS, "rare"}),
    ],
)
def test_what_a_checkpoint_may_lack_must_fit_if_it_is_there(keys, misfit, missing):
    report, continuation = decided(
        Reader("adam"),
        {*MOMENTS, "rare"},
        saved(keys, "adam"),
        misfit=lambda key, other: misfit,
        spare=frozenset({"rare"}),
    )
    assert continuation.missing == missing
    text = refusal(report)
    assert all(f"w: {key} {misfit or ''}".strip() in text for key in missing)
    assert ("w: rare" in text) == ("rare" in missing)


@pytest.mark.parametrize(
    ("reader", "its", "reasons"),
    [
        ("adam", saved((), "lion"), []),
        ("adam", saved({"exp_avg"}, "adam"), []),
        ("adam", saved({"exp_avg"}, "lion"), ["exp_avg are lion's"]),
        (
            "adam",
            saved({"exp_avg"}, "lion", "adam"),
            ["exp_avg are lion or adam's", "set 'optimizer': 'adam' in its group if that is so"],
        ),
    ],
)
def test_a_refusal_says_whose_state_there_is_instead(reader, its, reasons):
    report, _ = decided(Reader(reader), MOMENTS, its)
    text = refusal(report)
    assert text.count(" (" + "; ".join(reasons) + ")") == bool(reasons)
    assert ("'s" in text) == bool(reasons)


def test_a_refusal_says_nothing_of_parameters_that_continue():
    report, _ = decided(Reader("adam"), {"exp_avg"}, saved({"exp_avg"}, "lion"))
    report.decide("v", Reader("adam"), {"exp_avg"}, saved((), "lion"))
    text = refusal(report)
    assert "v: exp_avg" in text
    assert "lion" not in text


@pytest.mark.parametrize(
    ("reader", "keys", "its", "policy", "notes"),
    [
        ("muon", BUFFER, saved(BUFFER, "muon"), Policy(), []),
        (
            "adam",
            {"exp_avg"},
            saved((), "adam"),
            Policy(frozenset({"exp_avg"})),
            ["exp_avg starts fresh (the checkpoint has: none)"],
        ),
        (
            "adam",
            {"exp_avg"},
            saved({"exp_avg"}, "laprop"),
            Policy(),
            ["exp_avg starts fresh (the checkpoint has: exp_avg of laprop)"],
        ),
        (
            "adam",
            MOMENTS,
            saved({"exp_avg"}, "lion"),
            Policy(frozenset({"exp_avg_sq"})),
            [f"{key} starts fresh (the checkpoint has: exp_avg)" for key in sorted(MOMENTS)],
        ),
        (
            "muon",
            BUFFER,
            saved(BUFFER, "sgd", momentum=0.75),
            Policy(),
            ["momentum_buffer starts as sgd's momentum_buffer, times 0.25"],
        ),
        (
            "muon",
            BUFFER,
            saved(MOMENTS, "adam"),
            Policy(momentum_from_adam=True),
            ["momentum_buffer starts as adam's exp_avg"],
        ),
    ],
)
def test_what_the_log_says_of_a_decision(reader, keys, its, policy, notes):
    report, _ = decided(Reader(reader, 0.5), keys, its, policy)
    assert report.notes == [Note(text, "w", is_asked="starts as" in text) for text in notes]


def test_what_is_noted_besides_is_refused_too():
    report = LoadReport(Policy())
    report.refuse("checkpoint", has_stepped=True)
    report.lack("v", "momentum_buffer", "is cut otherwise")
    assert "v: momentum_buffer is cut otherwise" in refusal(report)
    assert "--ckpt-allow-missing-optim-state momentum_buffer (" in refusal(report)
    assert "fill its buckets at no layout" in refusal(report, by_bucket=True)
    assert "(all else)" in str(missing_state([("v", "a", "")], reason="all else"))
    assert "first in v" in str(of_other_weights("v"))


def test_at_most_twelve_names_are_shown():
    names = [f"n{number}" for number in range(13)]
    assert shortened(names[:12]) == ", ".join(names[:12])
    assert shortened(names) == ", ".join(names[:12]) + ", and 1 more"


def test_equal_notes_are_one_line_and_a_warning_if_nobody_asks_for_it(caplog):
    caplog.set_level("INFO", "megatron_eopt")
    report = LoadReport(Policy())
    for name in ("a", "b", "a"):
        report.note("starts fresh", name)
    report.note("is old")
    log_notes([*report.notes, Note("is asked", "a", is_asked=True)])
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "optimizer state: starts fresh: 2 parameter(s): a, b"),
        ("WARNING", "optimizer state: is old"),
        ("INFO", "optimizer state: is asked: 1 parameter(s): a"),
    ]


@pytest.mark.parametrize(
    ("groups", "steps"),
    [
        # of several groups, the largest count
        (["muon/dense/a", "muon/dense/b"], 5),
        (["muon/dense/b"], 3),
        # a group that continues none counts as others of its optimizer
        (["adam/dense/new"], 7),
        (["sgd/dense/new"], 9),
    ],
)
def test_groups_go_on_with_the_steps_of_those_that_they_continue(groups, steps):
    saved = [
        {"group_id": "muon/dense/a", "params": [], "step": 5},
        {"group_id": "muon/dense/b", "params": [], "step": 3},
        {"optimizer": "adam", "params": [], "wd_mult": 0.0, "step": 7},
    ]
    own = [{"group_id": name, "params": [], "wd_mult": 1.0} for name in groups]
    assert steps_of(own, saved, 9) == steps
