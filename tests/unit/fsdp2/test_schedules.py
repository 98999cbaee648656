"""A schedule keeps rates apart that the configuration sets apart, or a warning says so."""

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.fsdp2 import ParamKey, build_optimizer
from megatron_eopt.optimizers.rates import RatesApart
from tests.harness.log import listening
from tests.unit.fsdp2.models import config, make_model, stepped

STEPS = 12


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def one_cycle(optimizer, most):
    return lr_scheduler.OneCycleLR(optimizer, most, STEPS, cycle_momentum=False)


def cyclic(optimizer, least, most):
    return lr_scheduler.CyclicLR(optimizer, least, most, 3, cycle_momentum=False)


KEEP = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1.0, step / 4)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, STEPS - 2),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS - 2),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "OneCycleLR": lambda o: one_cycle(o, rates(o)),
    "CyclicLR": lambda o: cyclic(o, [rate / 9 for rate in rates(o)], rates(o)),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.9, patience=0),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o), lr_scheduler.StepLR(o, 3)]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 9)], [3]
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, [rate / 9 for rate in rates(o)], 4),
}
"""Uses of schedulers that keep the ratios of rates."""

MERGE = {
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS - 2, eta_min=1e-4),
    "OneCycleLR": lambda o: one_cycle(o, 1e-3),
    "CyclicLR": lambda o: cyclic(o, 1e-4, 1e-3),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, min_lr=1e-3),
    "SWALR": lambda o: swa_utils.SWALR(o, 1e-3, 4),
}
"""Uses of schedulers that make rates equal, at first or in the end."""


def warnings_of(make, settings=None, overrides=None):
    model = make_model()
    optimizer = build_optimizer(model, settings or config(lr=1e-2, muon_lr=3e-2), overrides)
    scheduler = make(optimizer)
    seen = []
    with listening() as lines:
        for _ in range(STEPS):
            stepped(model, optimizer, 0)
            seen.append(rates(optimizer))
            of_plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([1.0] if of_plateau else []))
    return seen, [line for line in lines if "sets apart" in line]


def test_the_schedulers_are_those_of_torch():
    bases = {"LRScheduler", "SWALR"}
    assert set(lr_scheduler.__all__) | bases == set(KEEP) | bases


@pytest.mark.parametrize("name", KEEP)
def test_ratios_stay(name):
    overrides = {ParamKey(name="*up.weight"): {"lr_mult": 0.5}}
    seen, warned = warnings_of(KEEP[name], overrides=overrides)
    assert not warned
    first = seen[-1] if name == "LambdaLR" else seen[0]
    assert len(set(first)) == 3
    for now in filter(any, seen):
        assert now == pytest.approx([now[0] * rate / first[0] for rate in first])


@pytest.mark.parametrize("name", MERGE)
def test_equal_rates_are_said_once(name):
    seen, warned = warnings_of(MERGE[name])
    assert any(len(set(now)) == 1 for now in seen)
    assert len(warned) == 1
    assert "0.01 and 0.03" in warned[0]


def test_rates_that_were_equal_from_the_start_are_no_news():
    for settings in (config(lr=1e-2), config("adam", lr=1e-2)):
        assert not warnings_of(MERGE["OneCycleLR"], settings)[1]


def test_a_rate_that_is_missing_is_said_at_the_build():
    with pytest.raises(ConfigurationError, match=r"lr=None: .* Set lr in the configuration"):
        build_optimizer(make_model(), config(lr=None))
    # groups with rates of their own need none
    build_optimizer(make_model(), config(lr=None), {ParamKey(name="*"): {"lr": 0.1}})


def test_rates_that_are_tensors_are_not_read():
    low, high, tensor = {"lr": 0.1}, {"lr": 0.2}, {"lr": torch.tensor(0.1)}
    with listening() as lines:
        RatesApart([low, tensor]).warn([low, low])
        RatesApart([low, high]).warn([tensor, tensor])
    assert not lines
