"""Who gets an update that depends on the number of ranks, or far too long a one, is told so."""

import logging

import pytest

from megatron_eopt.build import differences
from tests.harness import run_ranks
from tests.unit.build.factories import losses
from tests.unit.stores.full_state import Case, build


class _Lines(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def _warnings(config, ddp, tp):
    return heard(lambda: losses("ours", 1, config=config, ddp=ddp, parallel={"tp": tp}))


def _recommended(case):
    return heard(lambda: build(case))


def heard(work):
    handler = _Lines()
    logger = logging.getLogger("megatron_eopt.build.differences")
    logger.addHandler(handler)
    differences._said.clear()  # each is said once in a process
    try:
        work()
    finally:
        logger.removeHandler(handler)
    return handler.lines


SHARDED = {"use_distributed_optimizer": True}


@pytest.mark.parametrize(
    ("config", "ddp", "tp", "expected"),
    [
        ({"optimizer": "muon", "muon_tp_mode": "blockwise"}, {}, 2, "muon_tp_mode='blockwise'"),
        ({"optimizer": "soap"}, {}, 2, "optimizer='soap'"),
        ({"optimizer": "muon", "muon_tp_mode": "duplicated"}, {}, 2, None),
        ({"optimizer": "muon", "muon_tp_mode": "blockwise"}, {}, 1, None),
        ({"optimizer": "soap", **SHARDED}, SHARDED, 2, None),
        ({"optimizer": "lion"}, {}, 2, None),
    ],
)
def test_a_warning_names_the_field(config, ddp, tp, expected):
    lines = run_ranks(2, _warnings, config, ddp, tp)[0]
    found = [line for line in lines if "depends on the number of ranks" in line]
    assert len(found) == (expected is not None)
    assert all(expected in line for line in found)


PLAIN = {"use_distributed_optimizer": False}


@pytest.mark.parametrize(
    ("case", "warned"),
    [
        (Case("soap", ddp=PLAIN, config=PLAIN), True),
        (
            Case(
                "soap",
                ddp=PLAIN,
                config={**PLAIN, "muon_split_qkv": False, "muon_split_gated": False}
                | {"muon_split_mla": False, "muon_split_linear_attention": False},
            ),
            False,
        ),
        (Case("soap"), False),
        (Case("muon", ddp=PLAIN, config=PLAIN), False),
        (Case("lion", ddp=PLAIN, config=PLAIN), False),
        (Case("adam", ddp=PLAIN, config=PLAIN), False),
    ],
    ids=str,
)
def test_who_gets_fused_weights_as_one_matrix_is_told_so(case, warned):
    lines = run_ranks(1, _recommended, case)[0]
    assert (
        any("as one matrix without use_distributed_optimizer" in line for line in lines) == warned
    )


@pytest.mark.parametrize(
    ("coefficients", "precision", "warned"),
    [("cans", "medium", True), ("cans", "highest", False), ("polar_express", "medium", False)],
)
def test_coefficients_that_rounding_makes_diverge(coefficients, precision, warned):
    config = {"optimizer": "muon", "muon_coefficient_type": coefficients}
    config["muon_fp32_matmul_prec"] = precision
    lines = run_ranks(1, _warnings, config, {}, 1)[0]
    assert any("such an update is huge" in line for line in lines) == warned


@pytest.mark.parametrize(
    ("method", "scale", "warned"),
    [
        ("adamuon", "spectral", True),
        ("adamuon", "adamw_rms", True),
        ("adamuon", "shape_scaling", False),
        ("normuon", "adamw_rms", False),
    ],
)
def test_adamuons_scale(method, scale, warned):
    config = {
        "optimizer": "adaptive_muon",
        "adaptive_muon_moment2_method": method,
        "muon_scale_mode": scale,
    }
    lines = run_ranks(1, _warnings, config, {}, 1)[0]
    assert any(f"muon_scale_mode={scale!r}" in line for line in lines) == warned


@pytest.mark.parametrize(
    ("name", "decay", "told"), [("scion", 0.1, 1), ("scion", 1.0, 0), ("soap", 0.1, 0)]
)
def test_a_weight_decay_in_place_of_scions_own(name, decay, told):
    case = Case(name, ddp=SHARDED, config={"weight_decay": decay})
    lines = run_ranks(1, _recommended, case)[0]
    assert sum("takes the place of Scion's own" in line for line in lines) == told
