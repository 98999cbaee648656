"""Optimizers told from kinds of state, by elimination."""

from pathlib import Path

import pytest

from megatron_eopt.explain.routes import attribute
from megatron_eopt.explain.saved import Saved

MOMENTUM = frozenset({"momentum_buffer"})
MOMENTS = frozenset({"exp_avg", "exp_avg_sq"})
FACTORS = MOMENTS | {"L", "R"}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("muon adam", {MOMENTUM: "muon", MOMENTS: "adam"}),
        ("muon lion", {MOMENTUM: "muon", frozenset({"exp_avg"}): "lion"}),
        ("soap adam", {FACTORS: "soap", MOMENTS: "adam"}),
        ("muon soap adam", {MOMENTUM: "muon", FACTORS: "soap", MOMENTS: "adam"}),
        # nothing tells these apart
        ("muon sgd", {MOMENTUM: "muon or sgd"}),
        ("oblique_adam adam", {MOMENTS: "oblique_adam or adam"}),
        # nothing names these
        ("", {MOMENTS: "adam", MOMENTUM: "not recorded"}),
        ("adam", {MOMENTUM: "not recorded"}),
    ],
)
def test_attribution(names, expected):
    saved = Saved(Path(), "torch_dist")
    for name in names.split():
        settings = {"momentum": 0.9} if name in ("muon", "sgd") else {"betas": (0.9, 0.99)}
        saved.groups.append({"optimizer": name, **settings})
    assert attribute(set(expected), saved) == expected
