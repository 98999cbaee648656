"""What gradients are multiplied by as they are read: as if it were before; nan changes nothing."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_eopt.base import kernels
from megatron_eopt.math import passes
from megatron_eopt.megatron_core.stored_weights import StoredWeights
from megatron_eopt.testing.scene import forget_megatron
from megatron_eopt.wrappers.gradients import GradNorm
from tests.harness.each_rank import on_ranks
from tests.harness.kernels import interpreted_kernels
from tests.harness.tiers import mostly_long
from tests.unit.storage.full_state import Case, build, differences, full_state, steps
from tests.unit.storage.runs import NORMUON, REPLICATED, inject

MODEL = {"layers": 2, "hidden": 32, "heads": 4, "query_groups": 2, "dtype": torch.bfloat16}
OFF_LOADED = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
L2 = {"decoupled_weight_decay": False}
CASES = {
    "fragments": Case("muon", MODEL),
    "l2": Case("muon", MODEL, config=L2 | {"muon_nesterov": False}),
    "bf16 momentum": Case("muon", MODEL, config={"muon_momentum_dtype": "bf16"}),
    "8-bit momentum": Case("muon", MODEL, config={"muon_momentum_dtype": "int8"}),
    "off-loaded": Case("muon", MODEL, config=OFF_LOADED | {"matrix_buffer_mb": 1 / 128}),
    "plain": Case("muon", MODEL, **REPLICATED),
    "NorMuon": Case("adaptive_muon", MODEL, config=NORMUON),
    "adam": Case("adam", MODEL),
}
FOLDED, BEFORE, KERNELS, SKIPPED, NONE = range(5)


@contextmanager
def interpreted_passes() -> Iterator[None]:
    served = patch.object(passes, "_is_served", return_value=True)
    others = patch.object(kernels.Family, "runs", return_value=False)
    with interpreted_kernels(), served, others:
        yield


def stepped(case: Case, way: int) -> dict[str, Any]:
    """Return all there is after two steps, and a third one in a way."""
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 2)
    inject(case.run, chunk, 2)
    optimizer.prepare_grads()
    factor = torch.tensor(math.nan if way == SKIPPED else 0.3)
    for link in optimizer.chained_optimizers:
        for update_rule in link.update_rules:
            assert update_rule.fuses_grad_scale
            if way == BEFORE:
                for main in update_rule.params:
                    main.grad.mul_(factor)
            else:
                update_rule.scale_gradients(factor)
    # update rules write the model's weights as well: nobody has to copy them
    copied = patch.object(StoredWeights, "copy_mains", lambda *_: None)
    with interpreted_passes() if way == KERNELS else nullcontext(), copied:
        if way != NONE:
            optimizer.step_with_ready_grads()
    found = full_state(case, chunk, optimizer)
    weights = dict(chunk.named_parameters())
    mains = {
        name: item.main.detach().bfloat16()
        for link in optimizer.chained_optimizers
        for item in link.shards
        for name, param in weights.items()
        if param is item.param
    }
    assert all(torch.equal(weights[name].view(-1), mains[name].view(-1)) for name in weights)
    forget_megatron()
    return {**found, **{name: weight.detach().clone() for name, weight in weights.items()}}


@pytest.mark.parametrize(
    "name", mostly_long(CASES, "8-bit momentum", "bf16 momentum", "l2", "adam")
)
@on_ranks(1)
def test_a_coefficient_is_what_gradients_were_multiplied_by(name):
    folded, before, kernels, skipped, none = (stepped(CASES[name], way) for way in range(5))
    assert differences(folded, before) == []
    assert len(differences(folded, skipped)) > 10
    assert differences(skipped, none) == []
    assert folded.keys() == kernels.keys()
    for key in differences(folded, kernels):
        # Muon's have the same bits; torch's Adam on a CPU rounds other sums than kernels do
        assert name == "adam" or not re.search(r"linear_\w+\.weight$", key)
        rtol = 2**-7 if folded[key].dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(kernels[key], folded[key], rtol=rtol, atol=1e-8)


@pytest.mark.parametrize(
    ("norm", "max_norm", "factor"),
    [
        (4.0, 1.0, 0.25),
        (4.0, 8.0, 1.0),
        (4.0, 0.0, 1.0),
        *((bad, max_norm, math.nan) for bad in (math.inf, math.nan) for max_norm in (0.0, 1.0)),
    ],
)
def test_a_norm_that_is_not_finite_gives_nan_so_that_the_step_changes_nothing(
    norm, max_norm, factor
):
    its = object.__new__(GradNorm)
    its.value = torch.tensor(norm, dtype=torch.float64)
    assert float(its.factor(max_norm)) == pytest.approx(factor, rel=1e-6, nan_ok=True)
