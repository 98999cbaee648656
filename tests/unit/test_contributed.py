"""What a contributor adds, written with public names only: two variants of Muon, and a storage."""

import functools

import pytest
import torch
from torch import distributed

from megatron_eopt import TensorParallelMuon, conformance
from megatron_eopt.extending import (
    EmergingOptimizerEntry,
    MuonRule,
    build_replicated,
    build_sharded,
    register_storage,
)
from megatron_eopt.optimizers.stored_matrices import MatrixSums
from megatron_eopt.storage.replicated import Float32Optimizer
from tests.harness import run_ranks

check = functools.partial(conformance.check, run=run_ranks)


def variant(cls):
    """Return the entry of a variant of Muon, which reads Muon's settings."""
    return EmergingOptimizerEntry(cls, state_layout="matrix_update", prefixes=("muon",))


class CautiousRule(MuonRule):
    """Drops entries that differ in sign from the gradient; scales the rest by how many remain."""

    sums_per_matrix = 1

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


class BoundedRule(MuonRule):
    """Lets no update of a whole matrix have a root mean square above a tenth."""

    sums_per_matrix = 1

    def partial_sums(self, item, update):
        return [self.stored_matrices(item.number).square_sums(update)]

    def use_totals(self, item, update, totals):
        sizes = totals.new_tensor([rows * cols for rows, cols in self.shapes[item.number]])
        factors = 0.1 / (totals[0] / sizes).sqrt().clamp(min=0.1)
        self.stored_matrices(item.number).multiply_(update, factors)


class BoundedMuon(TensorParallelMuon):
    """Muon with bounded updates."""

    update_rule_class = BoundedRule


@pytest.mark.parametrize("cls", [CautiousMuon, BoundedMuon])
def test_variants_of_muon_conform(cls):
    check(variant(cls))


# A storage: halves of the rows, the first rank's the smaller


@register_storage
def in_halves(context):
    """Build the optimizer of a model that is cut into rows."""
    if not hasattr(context.model_chunks[0], "is_in_halves"):
        return None
    return build_sharded(context, distributed.group.WORLD)


def halved(model):
    """Cut a model into rows."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    for param in model.parameters():
        first, stop = (len(param) * n // ranks for n in (rank, rank + 1))
        param.eopt_place = ((first, *[0] * (param.dim() - 1)), tuple(param.shape))
        param.data = param.data[first:stop].clone()
    model.is_in_halves = True
    return model


@pytest.mark.parametrize(
    ("optimizer", "config"),
    [("muon", {}), ("soap", {"clip_grad": 0.0}), ("adam", {}), ("muon", {"bf16": True})],
)
def test_a_storage_in_rows_conforms(optimizer, config):
    check(optimizer, config, storage=halved)


# Faults that the conformance test notices


class PerWaveRule(MuonRule):
    """Cautious Muon that adds up the sums of a wave, in which ranks have other parameters."""

    def _apply(self, stepped, updates):
        matrices = MatrixSums(self.shards, self.engine.device, self.engine.sharing)
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

    def _begin(self, groups, stepped):
        self.kept = []

    def _apply(self, stepped, updates):
        self.kept.append((stepped, updates))

    def _end(self, stepped):
        for kept in self.kept:
            super()._apply(*kept)


class LateRule(KeepingRule):
    """Does the same with copies, but off-loaded weights are on the host by then."""

    def _apply(self, stepped, updates):
        self.kept.append((stepped, {number: value.clone() for number, value in updates.items()}))


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
        check(variant(cls))


@register_storage
def with_own_norms(context):
    """Build the same storage, whose ranks have a gradient norm each."""
    if not hasattr(context.model_chunks[0], "has_own_norms"):
        return None
    groups = [distributed.new_group([rank]) for rank in range(distributed.get_world_size())]
    rank = distributed.get_rank()
    return build_sharded(context, distributed.group.WORLD, norm_group=groups[rank])


def with_own_norm(model):
    """Cut a model for it."""
    model.has_own_norms = True
    return halved(model)


@register_storage
def as_copies(context):
    """Take rows for whole parameters."""
    is_mine = hasattr(context.model_chunks[0], "has_undeclared_rows")
    return build_replicated(context, Float32Optimizer) if is_mine else None


def undeclared(model):
    """Cut a model into rows without a word."""
    model.has_undeclared_rows = True
    for param in halved(model).parameters():
        del param.eopt_place
        vars(param).pop("eopt_split", None)
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
        check("muon", storage=storage)
