"""Variants of Muon as contributors write them, and faults that the conformance test notices."""

import ast
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import distributed

from megatron_eopt import (
    ConfigurationError,
    EmergingOptimizerConfig,
    TensorParallelAdaptiveMuon,
    TensorParallelMuon,
)
from megatron_eopt.config import checks
from megatron_eopt.config.arguments import entry_kwargs
from megatron_eopt.config.registry import registered
from megatron_eopt.config.settings import resolve
from megatron_eopt.contrib.declared_boxes import build_sharded
from megatron_eopt.extending import (
    EmergingOptimizerEntry,
    MatrixSumsRule,
    MuonRule,
    build_replicated,
    register_storage,
)
from megatron_eopt.optimizers.adaptive_rule import NorMuonRule
from megatron_eopt.optimizers.stored_matrices import MatrixSums
from megatron_eopt.testing import conformance
from megatron_eopt.wrappers.replicated import Float32Optimizer


def variant(cls):
    """Return the entry of a variant of Muon, which reads Muon's settings."""
    return EmergingOptimizerEntry(cls, state_layout="matrix_update", prefixes=("muon",))


class CautiousRule(MatrixSumsRule):
    """Drops entries that differ in sign from the gradient; scales the rest by how many remain."""

    def partial_sums(self, item, update):
        agrees = update * item.param.grad > 0
        update.mul_(agrees)
        return [self.stored_matrices(item.number).sums(agrees)]

    def use_totals(self, item, update, totals):
        sizes = totals.new_tensor([rows * cols for rows, cols in self.shapes[item.number]])
        self.stored_matrices(item.number).multiply_(update, sizes / totals[0].clamp(min=1))


class CautiousMuon(TensorParallelMuon):
    """Cautious Muon (arXiv:2411.16085)."""

    update_rule_class = CautiousRule


class BoundedRule(MatrixSumsRule):
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


def test_the_example_is_the_first():
    shown = ast.parse((Path(__file__).parents[2] / "examples/cautious_muon.py").read_text())
    here = ast.parse(Path(__file__).read_text())
    ours, theirs = (
        {
            part.name: [ast.unparse(line) for line in part.body if not is_text(line)]
            for node in tree.body
            if isinstance(node, ast.ClassDef) and node.name == "CautiousRule"
            for part in node.body
            if isinstance(part, ast.FunctionDef)
        }
        for tree in (here, shown)
    )
    assert ours == theirs


def is_text(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


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


# Faults that the conformance test notices


class PerWaveRule(MuonRule):
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


class KeepingRule(MuonRule):
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


class PerWaveMuon(TensorParallelMuon):
    update_rule_class = PerWaveRule


class KeepingMuon(TensorParallelMuon):
    update_rule_class = KeepingRule


class LateMuon(TensorParallelMuon):
    update_rule_class = LateRule


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


@register_storage
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


@register_storage
def as_copies(context):
    """Take rows for whole parameters."""
    is_mine = hasattr(context.model_chunks[0], "has_undeclared_rows")
    return build_replicated(context, Float32Optimizer) if is_mine else None


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
