"""Every setting of an override changes the update of exactly its parameters, or is refused."""

from typing import Any

import pytest
import torch
from megatron.core.optimizer import ParamKey

from megatron_eopt import ConfigurationError
from megatron_eopt.config.registry import optimizer_names
from megatron_eopt.routing.routes import read_overrides
from tests.harness import run_ranks
from tests.harness.tiers import mostly_long
from tests.unit.wrappers.override_runs import (
    CHAINS,
    OWN,
    REFUSED,
    SCHEDULED,
    Case,
    built,
    cases,
    trained,
    trained_with_tf32,
)

STORAGES = (*OWN, *CHAINS)


def jobs(storage: str) -> tuple[int, dict[str, Any]]:
    """Return how many ranks a storage needs, and how they run."""
    own = storage in ("plain", "fsdp")
    return 1 if storage == "plain" else 2, {"timeout": 300, "cpu": not own}


@pytest.mark.parametrize("storage", mostly_long(STORAGES, "plain", "sharded"))
def test_every_setting_changes_its_parameter_and_no_other(storage):
    wanted = cases(scheduled=storage in CHAINS)
    ranks, how = jobs(storage)
    (weights, *_) = run_ranks(ranks, trained, storage, wanted, **how)
    plain: dict[str, torch.Tensor] = {}
    distances = []
    for case, weight in zip(wanted, weights, strict=True):
        usual = plain.setdefault(case.optimizer, weight)
        distances.append((case, float((weight - usual).norm() / usual.norm())))
    assert not [(case, far) for case, far in distances if case.setting and far < 2e-5]
    assert not [(case, far) for case, far in distances if not case.setting and far > 1e-6]


WRONG: list[tuple[str, str, Any]] = [
    ("muon", "nesterov", "false"),
    ("muon", "nesterov", None),
    ("muon", "momentum", 1.5),
    ("muon", "momentum", "0.9"),
    ("muon", "num_ns_steps", 2.5),
    ("muon", "scale_mode", "spectrum"),
    ("muon", "lr", "0.1"),
    ("muon", "weight_decay", None),
    ("muon", "betas", (0.9, 0.95)),
    ("adam", "betas", 0.9),
    ("adam", "betas", (0.9,)),
    ("adam", "momentum", 0.9),
    ("soap", "nesterov", "false"),
    ("lion", "weight_decay_method", "sometimes"),
]
"""An optimizer, a setting, and a value that it cannot have."""


def errors(storage: str, wanted: list[Case]) -> list[str]:
    """Return what building raises for each case; empty if it succeeds."""
    found = []
    for case in wanted:
        try:
            built(storage, [case])
            found.append("")
        except ConfigurationError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize(
    "storage", mostly_long(["plain", "replicated", "sharded"], "plain", "sharded")
)
def test_other_settings_and_values_are_refused_by_name(storage):
    wanted = [Case(*wrong) for wrong in WRONG]
    scheduled = SCHEDULED if storage in OWN else {}
    for optimizer in ("adam", "muon", "soap"):
        wanted += [Case(optimizer, name, 0.5) for name in sorted(REFUSED | scheduled.keys())]
    (found, *_) = run_ranks(1, errors, storage, wanted, **jobs(storage)[1])
    for case, error in zip(wanted, found, strict=True):
        assert repr(case.setting) in error, case


def test_one_rate_has_one_value():
    for setting, other in (("lr", "max_lr"), ("weight_decay", "end_wd")):
        with pytest.raises(ConfigurationError, match=f"{setting!r}.*contradicts {other}=0.5"):
            read_overrides({ParamKey(name="*"): {setting: 0.25, other: 0.5}})


@pytest.mark.parametrize("storage", mostly_long(STORAGES, "sharded"))
def test_every_optimizer_steps_after_torchs_newer_precision_setting(storage):
    wanted = [Case(name, None) for name in optimizer_names()]
    ranks, how = jobs(storage)
    (expected, *_), (found, *_) = (
        run_ranks(ranks, by, storage, wanted, **how) for by in (trained, trained_with_tf32)
    )
    torch.testing.assert_close(found, expected)  # a CPU has no tf32
