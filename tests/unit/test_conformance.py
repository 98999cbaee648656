"""The public conformance test: our optimizers and storages pass it, and faulty ones fail."""

import copy
import logging
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig

from megatron_eopt import (
    ConfigurationError,
    EmergingOptimizerConfig,
    TensorParallelMuon,
    get_megatron_optimizer,
)
from megatron_eopt.config.registry import registered
from megatron_eopt.extending import EmergingOptimizerEntry, MuonRule
from megatron_eopt.fsdp2 import build_optimizer
from megatron_eopt.testing import conformance
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import tiny_gpt, wrap_ddp, wrap_fsdp2

OPTIMIZERS = {
    "muon": ("muon", {}),
    "muon in 8 bits": ("muon", {"muon_momentum_dtype": "int8"}),
    "adamuon": ("adaptive_muon", {"adaptive_muon_moment2_method": "adamuon"}),
    "normuon": ("adaptive_muon", {"adaptive_muon_moment2_method": "normuon"}),
    "namo": ("adaptive_muon", {"adaptive_muon_moment2_method": "namo"}),
    # the last bit of a factor that clips turns eigenbases, which makes another update
    "soap": ("soap", {"clip_grad": 0.0}),
    "lion": ("lion", {}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_our_optimizers_conform(name):
    optimizer, config = OPTIMIZERS[name]
    conformance.check(optimizer, config)


def copied(model):
    """Store a copy on each rank."""
    return wrap_ddp(model, use_distributed_optimizer=False)


@pytest.mark.parametrize(
    ("storage", "optimizer", "config"),
    [(copied, "muon", {}), (wrap_fsdp2, "muon", {}), (wrap_fsdp2, "soap", {"clip_grad": 0.0})],
)
def test_our_storages_conform(storage, optimizer, config):
    conformance.check(optimizer, {"use_distributed_optimizer": False, **config}, storage=storage)


class CountingRule(MuonRule):
    """Takes smaller steps the more often a hook has run, which is once a wave."""

    waves = 0

    def _apply(self, items, updates):
        self.waves += 1
        super()._apply(items, {n: update / self.waves for n, update in updates.items()})


class CountingMuon(TensorParallelMuon):
    update_rule_class = CountingRule


class LosingRule(MuonRule):
    """Keeps state that no checkpoint of Megatron has."""

    kept: Any = 0

    def init(self, groups, state):
        super().init(groups, state)
        for _, param, _ in self.numbered(groups):
            state[param].setdefault("mine", copy.copy(self.kept))


class LosingMuon(TensorParallelMuon):
    update_rule_class = LosingRule


@pytest.mark.parametrize("kept", [0, torch.tensor(0.0), torch.zeros(1)], ids=repr)
def test_state_that_checkpoints_would_lose_is_refused_at_the_build(kept, monkeypatch):
    monkeypatch.setattr(LosingRule, "kept", kept)
    entry = EmergingOptimizerEntry(LosingMuon, state_layout="matrix_update", prefixes=("muon",))
    model = torch.nn.Linear(4, 4, bias=False)
    with registered("losing", entry):
        config = EmergingOptimizerConfig(optimizer="losing", lr=0.1)
        # an own loop saves all of it
        assert "mine" in build_optimizer(model, config).state_dict()["state"][0]
        (message,) = run_ranks(1, refusal, entry, kept)
    assert message.startswith("item.state['mine']=")
    assert "LosingRule that Megatron's checkpoints lose" in message


def refusal(entry, kept):
    LosingRule.kept = kept
    initialize_megatron()
    config, chunk = (
        EmergingOptimizerConfig(optimizer="losing", lr=0.1),
        wrap_ddp(tiny_gpt(layers=1)),
    )
    with registered("losing", entry), pytest.raises(ConfigurationError) as caught:
        get_megatron_optimizer(config, [chunk])
    return str(caught.value)


def test_the_cause_comes_first():
    entry = EmergingOptimizerEntry(CountingMuon, state_layout="matrix_update", prefixes=("muon",))
    with pytest.raises(conformance.ConformanceError) as raised:
        conformance.check(entry)
    cause, first, *_ = str(raised.value).splitlines()
    assert cause.startswith("CountingMuon trains otherwise. The number of waves matters: ")
    assert "in _run" in cause
    assert "of its way off" in first


class RowsRule(MuonRule):
    """Normalizes rows where it is told that matrices are whole."""

    def _update(self, stack, matrices, reduce, shape):
        super()._update(stack, matrices, reduce, shape)
        stack.div_(stack.norm(dim=-1, keepdim=True).clamp(min=1e-12))


class RowsMuon(TensorParallelMuon):
    update_rule_class = RowsRule


class NormRule(MuonRule):
    """Divides by the norm of the whole matrix."""

    def _update(self, stack, matrices, reduce, shape):
        super()._update(stack, matrices, reduce, shape)
        stack.div_(stack.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-12))


class NormMuon(TensorParallelMuon):
    update_rule_class = NormRule


class WrongRows(RowsRule):
    takes_slabs = True
    _update = RowsRule._update


class WrongRowsMuon(TensorParallelMuon):
    update_rule_class = WrongRows


class WrongNorm(NormRule):
    takes_slabs = True
    _update = NormRule._update


class WrongNormMuon(TensorParallelMuon):
    update_rule_class = WrongNorm


def entry_of(cls):
    return EmergingOptimizerEntry(cls, state_layout="matrix_update", prefixes=("muon",))


def problems_of(cls):
    """Return the cause that the check gives, and the lines with what it is seen in."""
    with pytest.raises(conformance.ConformanceError) as raised:
        conformance.check(entry_of(cls))
    cause, first, _, *rest = str(raised.value).splitlines()
    return [cause, first.removeprefix("First: "), *rest]


@pytest.mark.parametrize("cls", [RowsMuon, NormMuon])
def test_an_update_of_whole_matrices_conforms(cls, caplog):
    with caplog.at_level(logging.INFO, "megatron_eopt"):
        conformance.check(entry_of(cls))
    has_version_2 = hasattr(DistributedDataParallelConfig, "megatron_fsdp_version")
    text = caplog.records[-1].getMessage()
    assert text.splitlines() == [
        f"{cls.__name__} trains on two ranks as on one, also when resumed:",
        *("  in_zero1", "  in_rows", "  in_fsdp2", "  in_megatron_fsdp"),
        *(["  in_megatron_fsdp_v2, not resumed"] if has_version_2 else []),
        *("  in_copies", "  in_zero1, off-loaded", "  in_zero1, in teams"),
        *([] if has_version_2 else ["  not in_megatron_fsdp_v2, which needs megatron-core 0.20"]),
    ]


@pytest.mark.parametrize("cls", [WrongRowsMuon, WrongNormMuon])
def test_a_rule_that_takes_slabs_for_matrices_fails(cls):
    cause, *lines = problems_of(cls)
    assert "A slab is taken for a matrix" in cause
    assert all(line.startswith("in_zero1, in teams on 2") for line in lines)


class PairsRule(MuonRule):
    """Works on pairs of rows, and forgets the last of an odd number of rows in large weights."""

    def _apply(self, stepped, updates):
        for update in updates.values():
            if update.dim() == 2 and len(update) > 16:
                update[len(update) // 2 * 2 :] = 0
        super()._apply(stepped, updates)


class PairsMuon(TensorParallelMuon):
    update_rule_class = PairsRule


def test_a_rule_that_is_wrong_with_megatron_fsdp_alone_fails():
    _, *lines = problems_of(PairsMuon)
    assert all(line.startswith("in_megatron_fsdp") for line in lines), lines


class ForgetfulRule(MuonRule):
    """Scales its momentum by the factor that clips, which is nan when a step is skipped."""

    def _directions(self, items, arriving, outs):
        if self.grad_scale is not None:
            for item in items.values():
                item.state["momentum_buffer"].mul_(self.grad_scale)
        return super()._directions(items, arriving, outs)


class ForgetfulMuon(TensorParallelMuon):
    update_rule_class = ForgetfulRule


def test_a_rule_that_changes_state_in_a_skipped_step_fails():
    cause, *lines = problems_of(ForgetfulMuon)
    assert "heed self.grad_scale" in cause
    assert lines[0].startswith("in_zero1 on 1: the momentum_buffer of qkv.weight is changed")
    assert all("momentum_buffer" in line and "self.grad_scale is nan" in line for line in lines)
