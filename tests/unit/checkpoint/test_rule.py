"""The load rule, case by case."""

import re

import pytest
import torch

from megatron_eopt import ConfigurationError
from megatron_eopt.checkpoint.catalogue import Catalogue
from megatron_eopt.state.rule import LoadReport, SavedState, Writer, log_lines
from megatron_eopt.state.state_dicts import misfit_of

OF_ADAM = {"betas": (0.9, 0.95), "eps": 1e-8, "amsgrad": False, "decoupled_weight_decay": True}
ADAM = {"optimizer": "adam", **OF_ADAM, "maximize": False}
MUON = {"optimizer": "muon", "momentum": 0.95}
SGD = {"momentum": 0.9, "nesterov": False, "dampening": 0.0}
NAMO = {"optimizer": "adaptive_muon", "momentum": 0.95, "beta2": 0.9, "moment2_method": "namo"}


@pytest.mark.parametrize(
    ("saved", "present", "outcome"),
    [
        (ADAM, ADAM, True),
        ({"group_id": "adam/dense/"}, ADAM, True),
        ({"optimizer": "FusedAdam"}, ADAM, True),
        ({"pre_optimizer": "adam"}, ADAM, True),  # NeMo's names
        ({"optimizer": "dist_muon"}, MUON, True),
        (ADAM, MUON, False),
        ({"optimizer": "somebody's"}, MUON, False),
        # without a name
        (OF_ADAM, ADAM, True),
        ({"betas": (0.9, 0.95), "eps": 1e-8, "bias_correction": True}, ADAM, True),
        ({"momentum": 0.95}, MUON, True),
        ({"momentum": 0.95, "wd_mult": 1.0, "max_lr": 0.1, "fused": True}, MUON, True),
        (OF_ADAM, MUON, False),
        (SGD, MUON, False),
        ({"betas": (0.9, 0.95)}, ADAM, None),
        ({}, ADAM, None),
        # settings with a meaning, which older versions lack
        (ADAM | {"maximize": True}, ADAM, False),
        (OF_ADAM | {"maximize": True}, ADAM, False),
        (SGD | {"dampening": 0.5}, {"optimizer": "sgd", **SGD}, False),
        (NAMO | {"moment2_method": "normuon"}, NAMO, False),
        ({key: NAMO[key] for key in NAMO if key != "moment2_method"}, NAMO, True),
        (ADAM | {"maximize": None}, ADAM, True),  # not read
    ],
)
def test_who_reads_whose_state(saved, present, outcome):
    assert Writer.of(saved).is_readers(Writer.of(present)) is outcome


def wanted(name="w", reader=ADAM, kinds=("exp_avg", "exp_avg_sq"), problem=None):
    return name, Writer.of(reader), frozenset(kinds), lambda kind: problem


def had(kinds=("exp_avg", "exp_avg_sq"), *groups):
    return SavedState(frozenset(kinds), tuple(map(Writer.of, groups)))


@pytest.mark.parametrize(
    ("asked", "saved", "refused"),
    [
        (wanted(), had(("exp_avg",), ADAM), "w: no exp_avg_sq.*must have all state"),
        (wanted(), had((), ADAM), r"w: no state \(exp_avg, exp_avg_sq\).*leaves out .* frozen"),
        (wanted(problem="is odd"), had(("exp_avg", "exp_avg_sq"), ADAM), "w: exp_avg is odd"),
        (wanted(), had(("exp_avg",), {"betas": 1}), r"w: settings \['betas'\].* does not tell"),
        (wanted(), had(("exp_avg",), ADAM, MUON), "w: adam or muon.* does not tell"),
        (wanted(), had(), "w': has state of none of this run's parameters"),
        (wanted(), had(("exp_avg", "exp_avg_sq"), ADAM), None),
        (wanted(kinds=()), had(), None),
    ],
)
def test_what_is_refused(asked, saved, refused):
    report = LoadReport()
    report.continues(*asked, saved)
    if refused is None:
        report.refuse("checkpoint", has_stepped=True)
        return
    with pytest.raises(ConfigurationError, match=refused) as error:
        report.refuse("checkpoint", has_stepped=False)
    assert "pass --no-load-optim; in your own loop, do not load it" in str(error.value)


def test_fresh_state_is_one_line_for_all_parameters_unless_the_optimizer_has_stepped(caplog):
    report = LoadReport()
    for number in range(9):
        assert not report.continues(*wanted(f"w{number}"), had(("momentum_buffer",), MUON))
    assert report.fresh == {f"w{number}" for number in range(9)}
    report.refuse("checkpoint", has_stepped=False)
    log_lines(report.lines)
    (line,) = caplog.messages
    assert re.search("9 parameter.*w0, w1, w2, w3 and 5 more: starts fresh .* of muon", line)
    with pytest.raises(ConfigurationError, match="the optimizer has stepped"):
        report.refuse("checkpoint", has_stepped=True)


def test_the_parameters_of_other_ranks_count():
    report = LoadReport()
    report.continues(*wanted(), had())
    report.refuse("checkpoint", has_stepped=False, found=True)


OWN = {
    "adam": (frozenset({"exp_avg", "exp_avg_sq"}), frozenset({"exp_avg", "exp_avg_sq"})),
    "laprop": (frozenset({"exp_avg", "exp_avg_sq"}), frozenset({"exp_avg", "exp_avg_sq"})),
    "muon": (frozenset({"momentum_buffer"}), frozenset({"momentum_buffer"})),
}


@pytest.mark.parametrize(
    ("main", "kinds", "is_matrix", "writer"),
    [
        ("muon", ("momentum_buffer",), True, "muon"),
        ("muon", ("exp_avg", "exp_avg_sq"), False, "adam"),
        # overrides
        ("muon", ("exp_avg", "exp_avg_sq"), True, "adam"),
        ("muon", ("momentum_buffer",), False, "muon"),
        # by kinds alone they could not be told apart
        ("laprop", ("exp_avg", "exp_avg_sq"), True, "laprop"),
        ("laprop", ("exp_avg", "exp_avg_sq"), False, "adam"),
        # this run has no such optimizer, so that its kinds are not known
        ("soap", ("exp_avg", "exp_avg_sq", "L"), True, "soap"),
    ],
)
def test_which_of_megatron_cores_optimizers_had_a_parameter(main, kinds, is_matrix, writer):
    """Its checkpoints name neither parameters nor the main optimizer, which gets the matrices."""
    groups = [{key: MUON[key] for key in ("momentum",)}, ADAM]
    args = type("Args", (), {"optimizer": main})()
    state = {"param_groups": groups}
    catalogue = Catalogue("torch_dist", {}, {"args": args, "optimizer": state})
    found = catalogue.state_of(("w", "w"), frozenset(kinds), OWN, is_matrix=is_matrix)
    assert {one.name for one in found.writers} == {writer}


BELIEVED = "the checkpoint does not say who wrote it, and is believed to be adam's"
FRESH = "starts fresh for adam"
NONE = "the checkpoint has none, as of a new weight or one that torch saved frozen"


@pytest.mark.parametrize(
    ("asked", "saved", "continues", "line", "found"),
    [
        (wanted(), had(("exp_avg", "exp_avg_sq"), ADAM), True, None, True),
        (wanted(), had(("exp_avg", "exp_avg_sq"), OF_ADAM), True, BELIEVED, True),
        (wanted(), had(("exp_avg", "exp_avg_sq"), ADAM, OF_ADAM), True, BELIEVED, True),
        # an optimizer that the caller has made names itself in no group, in neither run
        (wanted(reader=OF_ADAM), had(("exp_avg", "exp_avg_sq"), OF_ADAM), True, None, True),
        (wanted(kinds=()), had(), True, None, False),
        (wanted(kinds=()), had((), ADAM), True, None, True),
        (wanted(), had(("a",), MUON), False, f"{FRESH}: the checkpoint's is of muon", True),
        (wanted(), had((), MUON), False, f"{FRESH}: the checkpoint's is of muon", False),
        (wanted(), had(), False, f"{FRESH}: {NONE}", False),
        (wanted(), had(("a",), {}), False, None, True),
        (wanted(), had(("exp_avg", "exp_avg_sq"), ADAM, MUON), False, None, True),
    ],
)
def test_what_becomes_of_a_parameter(asked, saved, continues, line, found):
    report = LoadReport()
    assert report.continues(*asked, saved) is continues
    assert report.lines == ([] if line is None else [(line, "w")])
    assert report.fresh == ({"w"} if "starts fresh" in str(line) else set())
    assert not report.lacks
    report.continues(*wanted("other"), had())
    # whether the checkpoint has any of the parameters
    assert report.found is found


@pytest.mark.parametrize(("count", "more"), [(1, ""), (2, " (and 1 more)"), (3, " (and 2 more)")])
def test_a_refusal_names_the_first_parameter_and_counts_the_others(count, more):
    report = LoadReport()
    for number in range(count):
        report.lack(f"w{number}", "is odd")
    assert report.lacks == "w0: is odd"
    with pytest.raises(ConfigurationError, match=re.escape(f"'w0: is odd{more}'")) as error:
        report.refuse("checkpoint", has_stepped=False)
    assert "frozen" not in str(error.value)


@pytest.mark.parametrize(("count", "more"), [(4, ""), (5, " and 1 more"), (6, " and 2 more")])
def test_the_log_names_four_parameters(count, more, caplog):
    log_lines([("is odd", f"w{number}") for number in range(count)])
    log_lines([("all is odd", "")])
    names = f"optimizer state of {count} parameter(s), w0, w1, w2, w3{more}: is odd"
    assert caplog.messages == [names, "optimizer state: all is odd"]


def test_what_a_writer_is_called():
    assert str(Writer.of(ADAM)) == "adam"
    assert str(Writer.of(NAMO)) == "adaptive_muon (moment2_method='namo')"
    both = Writer.of(SGD | {"optimizer": "sgd", "maximize": True, "dampening": 0.5})
    for writer in (both, Writer.of(NAMO), Writer.of(ADAM)):
        parsed = Writer.parsed(str(writer))
        assert parsed.is_readers(writer)
        assert dict(parsed.meaning) == {key: value for key, value in writer.meaning if value}


def test_a_class_names_a_writer_whose_group_does_not():
    assert Writer.of({"momentum": 0.9}, "FusedSGD").name == "sgd"
    assert Writer.of(OF_ADAM, "FusedSGD").name == "sgd"
    assert Writer.of(ADAM, "FusedSGD").name == "adam"
    assert Writer.of(ADAM).is_named
    assert not Writer.of(OF_ADAM, "FusedSGD").is_named


@pytest.mark.parametrize(
    ("kinds", "names"),
    [
        # an optimizer that this run does not have may have any kinds
        (("momentum_buffer",), {"muon", "odd"}),
        (("exp_avg", "exp_avg_sq"), {"adam", "odd"}),
        (("exp_avg",), {"odd"}),
    ],
)
def test_which_of_several_writers_have_these_kinds(kinds, names):
    saved = had(kinds, ADAM, MUON, {"optimizer": "odd"})
    assert {writer.name for writer in saved.by(OWN).writers} == names


def test_several_writers_stay_if_none_has_these_kinds():
    saved = had(("odd",), ADAM, MUON)
    assert saved.by(OWN) == saved


@pytest.mark.parametrize(
    ("saved", "own", "why"),
    [
        (torch.zeros(1), torch.zeros(()), None),
        (3, torch.tensor(3), None),
        (torch.ones(2, 1), torch.ones(2), None),
        (torch.ones(1, 2), torch.ones(2, 2), "of shape (1, 2) must have shape (2, 2)"),
        (torch.ones(2, dtype=torch.int8), torch.ones(2), "of torch.int8, torch.strided, must be"),
        (torch.ones(2), torch.ones(2, dtype=torch.int8), None),
        ("text", torch.ones(2), "is of type str, and must be a tensor"),
        (None, torch.ones(2), "is of type NoneType, and must be a tensor"),
        (2.0, 1, None),
        ([1], 1, "is of type NoneType, and must be int"),
        (None, 1, "is of type NoneType, and must be int"),
        ({"a": [torch.ones(2)]}, {"a": [torch.ones(2)]}, None),
        ({"a": [torch.ones(2)]}, {"a": [torch.ones(3)]}, "of shape (2,) must have shape (3,)"),
        ({}, {"a": 1}, "is of type NoneType, and must be int"),
        ({"a": 1, "b": "more"}, {"a": 1}, None),
    ],
)
def test_a_value_that_does_not_fit_is_told(saved, own, why):
    found = misfit_of(saved, own, "key")
    assert found is None if why is None else why in (found or "")


def test_a_sparse_value_is_told():
    saved = torch.ones(2, 2).to_sparse()
    assert "torch.sparse_coo, must be a dense" in str(misfit_of(saved, torch.ones(2, 2), "key"))
