"""Main weights and state in host memory under torch's FSDP2 and Megatron-FSDP."""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint import state_dict as dicts
from torch.distributed.fsdp import CPUOffloadPolicy

from megatron_eopt import get_megatron_optimizer
from megatron_eopt.base.nested_state import leaves
from megatron_eopt.megatron_fsdp import build_optimizer
from megatron_eopt.optimizers import update_rule, whole_matrix_rule
from megatron_eopt.storage.local_tensors import local_of
from megatron_eopt.testing.poison import PoisonedHost
from megatron_eopt.testing.scene import forget_megatron
from megatron_eopt.wrappers.memory import memory_of
from tests.harness.each_rank import on_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import tiny_gpt, wrap_fsdp2
from tests.harness.tiers import mostly_long
from tests.unit.fsdp2.models import Model, config, cut, eager, make_model, set_gradients, stepped
from tests.unit.megatron_fsdp.runs import inject, make_chunk
from tests.unit.storage.runs import DENSE, Run, set_rates

OPTIMIZERS = ("muon", "normuon", "soap", "adam")
BF16 = {"bf16": True, "params_dtype": torch.bfloat16}
MANAGED = Run(model={**DENSE, "layers": 1, "dtype": torch.bfloat16})


@dataclass
class Loop:
    """A training loop, with what it does to save and load."""

    model: Any
    build: Callable[..., Any]  # returns the optimizer for fields of the configuration
    give_gradients: Callable[[int], None]
    save: Callable[[Any], Any]
    load: Callable[[Any, Any], None]


def own(layout: str) -> Loop:
    model = make_model(layout)
    return Loop(
        model,
        lambda **fields: build_optimizer(model, config(**fields)),
        partial(set_gradients, model),
        partial(dicts.get_optimizer_state_dict, model),
        lambda optimizer, saved: dicts.set_optimizer_state_dict(model, optimizer, saved),
    )


def megatrons(managed: bool) -> Loop:
    if managed:
        model = make_chunk(MANAGED)
    else:
        initialize_megatron()
        how = {"transformer_impl": "local", "params_dtype": BF16["params_dtype"]}
        model = wrap_fsdp2(tiny_gpt(layers=1, vocabulary=128, **how).bfloat16())

    def build(**fields):
        fields |= {**BF16, "use_distributed_optimizer": managed}
        optimizer = get_megatron_optimizer(config(**fields), [model])
        set_rates(optimizer, config(**fields))
        return optimizer

    return Loop(
        model,
        build,
        partial(inject, MANAGED, model) if managed else partial(set_gradients, model),
        lambda optimizer: optimizer.state_dict(),
        lambda optimizer, saved: optimizer.load_state_dict(saved),
    )


OWN_FSDP2 = "own loop, FSDP2"
LOOPS = {
    OWN_FSDP2: partial(own, "fsdp"),
    "own loop, Megatron-FSDP": partial(own, "optim_grads_params"),
    "own loop, units of Megatron-FSDP": partial(own, "units"),
    "Megatron's loop, FSDP2": partial(megatrons, managed=False),
    "Megatron's loop, Megatron-FSDP": partial(megatrons, managed=True),
}


def links_of(optimizer):
    if links := getattr(optimizer, "chained_optimizers", None):
        return links
    own = {"assigned": optimizer.assigned, "update_rules": optimizer.update_rules}
    own["shards"] = optimizer.shards
    return [SimpleNamespace(optimizer=optimizer, is_stub_optimizer=False, **own)]


class _NewMemory(PoisonedHost):
    """Writes back to new memory each time, as a GPU's memory is left for the host's."""

    def _fits(self, home, value):
        return False


@contextmanager
def poisoned() -> Iterator[None]:
    """Let update rules read nan where they have not fetched what is in host memory."""
    with (
        patch.object(update_rule, "HostMemory", _NewMemory),
        patch.object(whole_matrix_rule, "HostMemory", _NewMemory),
    ):
        yield


def built(loop, name, fraction):
    off_load = {"optimizer_cpu_offload": fraction > 0, "optimizer_offload_fraction": fraction}
    with poisoned():
        # several waves, so that something is fetched while something else is computed
        found = loop.build(optimizer=name, matrix_buffer_mb=0.001, **off_load)
    for rule in (rule for link in links_of(found) for rule in link.update_rules):
        if rule.host is not None:
            rule.step = partial(rule.host.during, rule.step)
    return found


@eager
def trained(make, name, fractions):
    """Step twice at each fraction, with a load between; return weights, state and used memory."""
    loop = make()
    optimizer, memory = built(loop, name, fractions[0]), []
    for number, fraction in enumerate(fractions):
        if number:
            saved = copy.deepcopy(loop.save(optimizer))
            optimizer = built(loop, name, fraction)
            loop.load(optimizer, saved)
        for step in (2 * number, 2 * number + 1):
            loop.give_gradients(step)
            optimizer.step()
        memory.append(memory_of(links_of(optimizer), [loop.model]))
    mains = [i.main for link in links_of(optimizer) for i in link.shards]
    saved = [value for _, value in leaves(loop.save(optimizer)) if isinstance(value, torch.Tensor)]
    forget_megatron()
    return [local_of(value).clone() for value in (*mains, *saved)], memory


FRACTIONS = (0.5, 0.0, 1.0)


@pytest.mark.parametrize(
    ("loop", "name"),
    mostly_long(
        itertools.product(LOOPS, OPTIMIZERS),
        (OWN_FSDP2, "muon"),
        (OWN_FSDP2, "soap"),
        *((loop, "muon") for loop in LOOPS if loop.startswith("Megatron's")),
    ),
)
@on_ranks(2, timeout=300)
def test_steps_and_loads_equal_those_of_a_resident_run(loop, name):
    expected, of_resident = trained(LOOPS[loop], name, (0.0, 0.0, 0.0))
    tensors, memories = trained(LOOPS[loop], name, FRACTIONS)
    assert all(torch.equal(*pair) for pair in zip(expected, tensors, strict=True))
    for fraction, resident, memory in zip(FRACTIONS, of_resident, memories, strict=True):
        kept = memory.state + memory.main_weights + memory.host
        assert kept == resident.state + resident.main_weights
        # float32 weights are the model's, and Megatron-FSDP keeps its main weights
        mains = resident.main_weights if loop == "Megatron's loop, FSDP2" else 0
        moved = resident.state + mains
        # whole tensors are chosen
        assert memory.host <= fraction * moved
        assert bool(memory.host) == bool(fraction)
        if fraction == 1:
            assert memory.main_weights == resident.main_weights - mains
            # statistics of rows, and counters of steps, stay
            assert memory.host > 0.8 * moved


@eager
def in_torchs_own_off_loading(name, **options):
    """Return the weights of a model whose weights and gradients FSDP2 keeps on the host."""
    model = cut(Model(), "fsdp", "up", **options)
    optimizer = build_optimizer(model, config(name))
    return stepped(model, optimizer, 0, 1, 2)


@on_ranks(2, cpu=False)
def test_torchs_own_off_loading_is_no_obstacle():
    policy = CPUOffloadPolicy(pin_memory=False)
    for name in ("muon", "soap", "adam"):
        expected = in_torchs_own_off_loading(name)
        found = in_torchs_own_off_loading(name, offload_policy=policy)
        assert all(torch.equal(found[key], weight) for key, weight in expected.items()), name
