"""The public conformance test: our optimizers, storages and variants pass, faulty ones fail."""

import copy
import logging
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from torch import distributed

from megatron_eopt import (
    ConfigurationError,
    EmergingOptimizerConfig,
    TensorParallelAdaptiveMuon,
    TensorParallelMuon,
    extending,
    get_megatron_optimizer,
)
from megatron_eopt.config import checks, registry
from megatron_eopt.config.arguments import entry_kwargs
from megatron_eopt.config.registry import registered
from megatron_eopt.config.settings import resolve
from megatron_eopt.contrib.declared_boxes import build_sharded
from megatron_eopt.fsdp2 import build_optimizer
from megatron_eopt.optimizers.adaptive_rule import NorMuonRule
from megatron_eopt.optimizers.stored_matrices import MatrixSums
from megatron_eopt.testing import conformance
from megatron_eopt.wrappers.replicated import Float32Optimizer
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import tiny_gpt, wrap_ddp, wrap_fsdp2
from tests.harness.tiers import mostly_long
from tests.unit.storage import full_state

# else its optimizer would be known in other tests, too
with mock.patch.dict(registry._entries):
    from examples.cautious_muon import CautiousRule

# the last bit of a factor that clips turns SOAP's eigenbases, which makes another update
OPTIMIZERS = full_state.OPTIMIZERS | {"soap": ("soap", {"clip_grad": 0.0})}


@pytest.mark.parametrize("name", mostly_long(OPTIMIZERS, *OPTIMIZERS.keys() - {"adamuon", "lion"}))
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


def variant(cls):
    """Return the entry of a variant of Muon, which reads Muon's settings."""
    return extending.EmergingOptimizerEntry(cls, state_layout="matrix_update", prefixes=("muon",))


def muon_with(rule):
    """Return Muon with another rule, by a name under which worker processes find it here."""
    name = rule.__name__.replace("Rule", "Muon")
    return type(name, (TensorParallelMuon,), {"update_rule_class": rule, "__module__": __name__})


CautiousMuon = muon_with(CautiousRule)


class BoundedRule(extending.MatrixSumsRule):
    """Lets no update of a whole matrix have a root mean square above a limit."""

    def partial_sums(self, item, update):
        return [self.stored_matrices(item.number).square_sums(update)]

    def use_totals(self, item, update, totals):
        sizes = totals.new_tensor([rows * cols for rows, cols in self.shapes[item.number]])
        limit = self.optimizer.limit
        factors = limit / (totals[0] / sizes).sqrt().clamp(min=limit)
        self.stored_matrices(item.number).multiply_(update, factors)


class BoundedMuon(TensorParallelMuon):
    """Muon with bounded updates, and a setting of its own."""

    update_rule_class = BoundedRule

    def __init__(self, params, *args, limit=0.1, **kwargs):
        super().__init__(params, *args, **kwargs)
        self.limit = limit


@dataclass
class BoundedConfig(EmergingOptimizerConfig):
    """A configuration with the setting."""

    muon_limit: float = 0.05


@pytest.mark.parametrize(
    ("cls", "config_class"),
    [(CautiousMuon, EmergingOptimizerConfig), (BoundedMuon, BoundedConfig)],
)
def test_variants_of_muon_conform(cls, config_class):
    conformance.check(variant(cls), config_class=config_class)


def test_a_variant_reads_muons_fields_and_its_own():
    fields = {"muon_scalar_optimizer": "lion", "muon_split_per_head": True, "muon_limit": 0.2}
    config = BoundedConfig(optimizer="under_test", lr=0.1, **fields)
    with registered("under_test", variant(BoundedMuon)), mock.patch.object(checks, "logger") as log:
        assert resolve(config).scalar == "lion"
        checks.warn_of_unused(config, "under_test", {"under_test", "lion"})
        log.warning.assert_not_called()
        assert entry_kwargs("under_test", config, [], None)["limit"] == 0.2


class HalvedRule(NorMuonRule):
    """Halves updates."""

    def _update(self, stack, matrices, reduce, shape):
        super()._update(stack, matrices, reduce, shape)
        stack.mul_(0.5)


class HalvedNorMuon(TensorParallelAdaptiveMuon):
    update_rule_class = HalvedRule


def test_a_variant_of_adaptive_muon_has_its_own_rule():
    moved = []
    for cls in (TensorParallelAdaptiveMuon, HalvedNorMuon):
        weight = torch.nn.Parameter(torch.zeros(4, 6))
        optimizer = cls([weight], lr=0.1, moment2_method="normuon")
        weight.grad = torch.arange(24.0).view(4, 6) - 7
        optimizer.step()
        moved.append(weight.detach())
    assert torch.equal(moved[1], 0.5 * moved[0])
    for method in ("adamuon", "namo"):
        with pytest.raises(ConfigurationError, match="is not what HalvedRule computes"):
            HalvedNorMuon([weight], moment2_method=method)


class PerWaveRule(extending.MuonRule):
    """Cautious Muon that adds up the sums of a wave, in which ranks have other parameters."""

    def _apply(self, stepped, updates):
        matrices = MatrixSums(self.shards, self.exchange.device, self.exchange.sharing)
        mine = {}
        for item in stepped:
            agrees = updates[item.number] * item.param.grad > 0
            updates[item.number].mul_(agrees)
            mine[item.number] = [matrices.stored[item.number].sums(agrees)]
        totals = matrices.totals(range(len(self.shards)), mine, 1)
        for item in stepped:
            sizes = torch.tensor([rows * cols for rows, cols in self.shapes[item.number]])
            factors = sizes / totals[item.number][0].clamp(min=1)
            matrices.stored[item.number].multiply_(updates[item.number], factors)
        super()._apply(stepped, updates)


class KeepingRule(extending.MuonRule):
    """Applies updates at the end of a step, when waves have overwritten them."""

    def _run(self, items, groups):
        self.kept = []
        super()._run(items, groups)
        for kept in self.kept:
            super()._apply(*kept)

    def _apply(self, items, updates):
        self.kept.append((items, updates))


class LateRule(KeepingRule):
    """Does the same with copies, but off-loaded weights are on the host by then."""

    def _apply(self, items, updates):
        self.kept.append((items, {number: value.clone() for number, value in updates.items()}))


PerWaveMuon, KeepingMuon, LateMuon = map(muon_with, (PerWaveRule, KeepingRule, LateRule))


@pytest.mark.parametrize(
    ("cls", "where"),
    [
        (PerWaveMuon, "allreduce_ while updates are stored"),
        (KeepingMuon, "in_zero1 on 1: tall.weight is nan"),
        (LateMuon, "in_zero1, off-loaded on 1: tall.weight"),
    ],
)
def test_the_conformance_test_fails_for_a_faulty_rule(cls, where):
    with pytest.raises(conformance.ConformanceError, match=where):
        conformance.check(variant(cls))


@extending.register_storage
def with_own_norms(context):
    """Build a storage in rows whose ranks have a gradient norm each."""
    if not hasattr(context.model_chunks[0], "has_own_norms"):
        return None
    groups = [distributed.new_group([rank]) for rank in range(distributed.get_world_size())]
    rank = distributed.get_rank()
    return build_sharded(context, distributed.group.WORLD, norm_group=groups[rank])


def with_own_norm(model):
    """Cut a model into rows."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    for param in model.parameters():
        first, stop = (len(param) * n // ranks for n in (rank, rank + 1))
        param.eopt_place = ((first, *[0] * (param.dim() - 1)), tuple(param.shape))
        param.data = param.data[first:stop].clone()
    model.has_own_norms = True
    return model


@extending.register_storage
def as_copies(context):
    """Take rows for whole parameters."""
    is_mine = hasattr(context.model_chunks[0], "has_undeclared_rows")
    return extending.build_replicated(context, Float32Optimizer) if is_mine else None


def undeclared(model):
    """Cut a model into rows without a word."""
    for param in with_own_norm(model).parameters():
        del param.eopt_place
        vars(param).pop("eopt_split", None)
    del model.has_own_norms
    model.has_undeclared_rows = True
    return model


@pytest.mark.parametrize(
    ("storage", "where"),
    [
        (with_own_norm, "gradient norm of the steps is"),
        (undeclared, "has other values on another data-parallel rank"),
    ],
)
def test_the_conformance_test_fails_for_a_faulty_storage(storage, where):
    with pytest.raises(conformance.ConformanceError, match=where):
        conformance.check("muon", storage=storage)


class CountingRule(extending.MuonRule):
    """Takes smaller steps the more often a hook has run, which is once a wave."""

    waves = 0

    def _apply(self, items, updates):
        self.waves += 1
        super()._apply(items, {n: update / self.waves for n, update in updates.items()})


class LosingRule(extending.MuonRule):
    """Keeps state that no checkpoint of Megatron has."""

    kept: Any = 0

    def init(self, groups, state):
        super().init(groups, state)
        for _, param, _ in self.numbered(groups):
            state[param].setdefault("mine", copy.copy(self.kept))


CountingMuon, LosingMuon = map(muon_with, (CountingRule, LosingRule))


@pytest.mark.parametrize("kept", [0, torch.tensor(0.0), torch.zeros(1)], ids=repr)
def test_state_that_checkpoints_would_lose_is_refused_at_the_build(kept, monkeypatch):
    monkeypatch.setattr(LosingRule, "kept", kept)
    entry = variant(LosingMuon)
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
    config = EmergingOptimizerConfig(optimizer="losing", lr=0.1)
    chunk = wrap_ddp(tiny_gpt(layers=1))
    with registered("losing", entry), pytest.raises(ConfigurationError) as caught:
        get_megatron_optimizer(config, [chunk])
    return str(caught.value)


def test_the_cause_comes_first():
    cause, first, *_ = problems_of(CountingMuon)
    assert cause.startswith("CountingMuon trains otherwise. The number of waves matters: ")
    assert "in _run" in cause
    assert "of its way off" in first


class RowsRule(extending.MuonRule):
    """Normalizes rows where it is told that matrices are whole."""

    def _update(self, stack, matrices, reduce, shape):
        super()._update(stack, matrices, reduce, shape)
        stack.div_(stack.norm(dim=-1, keepdim=True).clamp(min=1e-12))


class NormRule(extending.MuonRule):
    """Divides by the norm of the whole matrix."""

    def _update(self, stack, matrices, reduce, shape):
        super()._update(stack, matrices, reduce, shape)
        stack.div_(stack.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-12))


class WrongRowsRule(RowsRule):
    takes_slabs = True
    _update = RowsRule._update


class WrongNormRule(NormRule):
    takes_slabs = True
    _update = NormRule._update


RowsMuon, NormMuon = map(muon_with, (RowsRule, NormRule))
WrongRowsMuon, WrongNormMuon = map(muon_with, (WrongRowsRule, WrongNormRule))


def problems_of(cls):
    """Return the cause that the check gives, and the lines with what it is seen in."""
    with pytest.raises(conformance.ConformanceError) as raised:
        conformance.check(variant(cls))
    cause, first, _, *rest = str(raised.value).splitlines()
    return [cause, first.removeprefix("First: "), *rest]


@pytest.mark.parametrize("cls", [RowsMuon, NormMuon])
def test_an_update_of_whole_matrices_conforms(cls, caplog):
    with caplog.at_level(logging.INFO, "megatron_eopt"):
        conformance.check(variant(cls))
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


class PairsRule(extending.MuonRule):
    """Works on pairs of rows, and forgets the last of an odd number of rows in large weights."""

    def _apply(self, stepped, updates):
        for update in updates.values():
            if update.dim() == 2 and len(update) > 16:
                update[len(update) // 2 * 2 :] = 0
        super()._apply(stepped, updates)


PairsMuon = muon_with(PairsRule)


def test_a_rule_that_is_wrong_with_megatron_fsdp_alone_fails():
    _, *lines = problems_of(PairsMuon)
    assert all(line.startswith("in_megatron_fsdp") for line in lines), lines


class ForgetfulRule(extending.MuonRule):
    """Scales its momentum by the factor that clips, which is nan when a step is skipped."""

    def _directions(self, items, arriving, outs):
        if self.grad_scale is not None:
            for item in items.values():
                item.state["momentum_buffer"].mul_(self.grad_scale)
        return super()._directions(items, arriving, outs)


ForgetfulMuon = muon_with(ForgetfulRule)


def test_a_rule_that_changes_state_in_a_skipped_step_fails():
    cause, *lines = problems_of(ForgetfulMuon)
    assert "heed self.grad_scale" in cause
    assert lines[0].startswith("in_zero1 on 1: the momentum_buffer of qkv.weight is changed")
    assert all("momentum_buffer" in line and "self.grad_scale is nan" in line for line in lines)
