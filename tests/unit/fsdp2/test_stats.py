"""``log_optimizer_stats`` in your own training loop: the same statistics at every sharding."""

from types import SimpleNamespace

import pytest
import torch

from megatron_eopt.fsdp2.optimizer import DTensorOptimizer
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.unit.fsdp2.models import build_optimizer, config, eager, make_model, stepped


@eager
def measured(layout):
    """Return the statistics of a step, of a second one, and of one that is not measured."""
    model = make_model(layout)
    optimizer = build_optimizer(model, config(log_optimizer_stats=True))
    found = [optimizer.stats()]
    for step, collects in enumerate((True, True, False)):
        optimizer.collects_stats = collects and optimizer.collects_stats
        stepped(model, optimizer, step)
        found.append(optimizer.stats())
    return found


def test_statistics_are_those_of_whole_weights():
    before, first, second, unmeasured = measured("plain")
    assert before == {}
    assert first != second == unmeasured
    names = {name.partition("/")[2] for name in second if name.startswith("TensorParallelMuon/")}
    assert {"learning-rate", "weight-rms", "update-rms"} <= names
    for ranks, layout in ((2, "fsdp"), (4, "hsdp"), (2, "optim_grads_params"), (2, "units")):
        cpu = layout not in ("fsdp", "hsdp")
        for _, _, found, _ in run_ranks(ranks, measured, layout, cpu=cpu):
            for name, value in second.items():
                if "exchange" not in name and not name.endswith("seconds"):
                    assert found[name] == pytest.approx(value, rel=1e-4), (layout, name)


def test_nothing_is_measured_unless_asked_for():
    model = make_model()
    optimizer = build_optimizer(model, config())
    stepped(model, optimizer, 0)
    assert optimizer.stats() == {}


@eager
def test_nothing_is_sent_or_orthogonalized_without_gradients():
    optimizer = build_optimizer(make_model(), config(log_optimizer_stats=True))
    optimizer.step()
    assert not [name for name in optimizer.stats() if "exchange" in name or "seconds" in name]


@eager
def test_without_a_rate_there_is_no_update_to_measure():
    model = make_model()
    optimizer = build_optimizer(model, config("soap", lr=0.0, log_optimizer_stats=True))
    stepped(model, optimizer, 0)
    assert optimizer.stats()["SOAP/learning-rate"] == 0.0
    assert not [name for name in optimizer.stats() if "update-rms" in name]


@on_ranks(2, cpu=False)
def test_a_copy_counts_by_its_share():
    shard = SimpleNamespace(main=torch.zeros(1))
    assert DTensorOptimizer.share_of(None, shard) == 0.5
