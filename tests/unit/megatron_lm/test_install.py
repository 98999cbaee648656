"""What :func:`megatron_eopt.megatron_lm.install` replaces, and that it all comes back."""

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_eopt import megatron_lm
from tests.harness.each_rank import on_ranks

FACTORY = ("config", "model_chunks", "config_overrides", "use_gloo_process_groups",
           "pg_collection", "dump_param_to_param_group_map")  # fmt: skip
VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
DOCUMENTED = {"get_megatron_muon_optimizer": FACTORY}
"""Parameters of what takes ``*args, **kwargs`` upstream and hands them to the factory."""


def replaced() -> list[tuple[str, str, Any, Any]]:
    """Return (module, name, upstream's object, ours) of everything that is replaced."""
    from megatron_eopt.megatron_lm.names import rebindings

    return [(owner.__name__, name, vars(owner)[name], ours) for owner, name, ours in rebindings()]


def signature_problem(name: str, theirs: Callable[..., Any], ours: Callable[..., Any]) -> str:
    """Say what of a call to ``theirs`` that is documented ``ours`` would not take as meant."""
    known = inspect.signature(theirs).parameters.values()
    documented = [p for p in known if p.kind not in VARIABLE]
    if name in DOCUMENTED:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        documented = [inspect.Parameter(n, kind) for n in DOCUMENTED[name]]
    named = {p.name: p.name for p in documented if p.kind is inspect.Parameter.KEYWORD_ONLY}
    by_place = [p.name for p in documented if p.name not in named]
    own = inspect.signature(ours, follow_wrapped=False)
    try:
        taken = own.bind(*by_place, **named).arguments
        own.bind(**{p.name: p.name for p in documented})
    except TypeError as error:
        return f"{name}: {error}"
    meant = {n: n for n in taken if own.parameters[n].kind not in VARIABLE}
    # a wrapper hands over the rest as it comes
    if meant == taken or (inspect.unwrap(ours) is theirs and meant.items() <= taken.items()):
        return ""
    return f"{name}: {[p.name for p in documented]} became {taken}"


@on_ranks(1)
def test_signatures_begin_with_upstreams():
    found = [
        (name, theirs, ours) for _, name, theirs, ours in replaced()
        if callable(theirs) and name != "compile_helpers"
    ]  # fmt: skip
    assert len(found) > 18
    assert [problem for case in found if (problem := signature_problem(*case))] == []


@pytest.mark.tested_release
@on_ranks(1)
def test_public_methods_and_fields_of_replaced_classes_exist():
    missing = {
        name: gone
        for _, name, theirs, ours in replaced()
        if inspect.isclass(theirs)
        if (gone := {a for a in dir(theirs) if not a.startswith("_") and not hasattr(ours, a)})
    }
    assert missing == {
        # Upstream's way of moving whole parameters between ranks, which is not ours.
        "LayerWiseDistributedOptimizer": {
            "set_bucket_layerwise_params_list", "shard_params",
            "start_param_sync_for_bucket_group_subset",
        },
    }  # fmt: skip


def objects() -> dict[tuple[str, str], int]:
    """Return what every name of every module of Megatron is bound to."""
    return {
        (module, name): id(value)
        for module, loaded in list(sys.modules.items())
        if module.split(".")[0] == "megatron"
        for name, value in list(vars(loaded).items())
    }


@on_ranks(1)
def test_everything_is_replaced_everywhere_and_comes_back():
    pairs = replaced()
    before = objects()
    megatron_lm.install()
    installed = objects()
    megatron_lm.install()
    assert objects() == installed
    changed = {place for place in before if installed[place] != before[place]}
    assert {(module, name) for module, name, _, _ in pairs} <= changed
    assert {
        ("megatron.training.training", "get_megatron_optimizer"),
        ("megatron.training.training", "LayerWiseDistributedOptimizer"),
        ("megatron.core.optimizer", "LayerWiseDistributedOptimizer"),
        ("megatron.core.optimizer", "_EMERGING_OPTIMIZERS"),
        ("megatron.core.optimizer", "_create_emerging_optimizer"),
    } <= changed
    # nothing of Megatron still holds what was replaced
    originals = {id(theirs) for _, _, theirs, _ in pairs if callable(theirs)}
    assert not originals & set(installed.values())
    for _ in range(2):
        megatron_lm.uninstall()
        assert objects() == before


@pytest.mark.parametrize(
    ("module", "name"),
    [("megatron.core.optimizer.qk_clip", "clip_qk"), ("megatron.training.arguments", "parse_args")],
)
@on_ranks(1)
def test_a_name_that_is_needed_and_missing_is_refused(module, name):
    owner = importlib.import_module(module)
    importlib.import_module("megatron_eopt.megatron_lm.names")
    importlib.import_module("megatron.training.training")
    kept = vars(owner).pop(name)
    before = objects()
    try:
        with pytest.raises(ImportError, match=f"has no {module}.{name}, which megatron-eopt needs"):
            megatron_lm.install()
        now = objects()  # more modules may have been imported
        assert {place: now[place] for place in before} == before
        assert not megatron_lm.is_installed()
    finally:
        setattr(owner, name, kept)


class Plain(torch.optim.SGD):
    """An optimizer that a script of upstream's style brings along."""


@on_ranks(1)
def test_upstreams_way_to_register_an_optimizer_works():
    from megatron.core import optimizer as megatron_optimizer

    from tests.harness.megatron import initialize_megatron
    from tests.harness.models import tiny_gpt, wrap_ddp

    initialize_megatron()
    chunk = wrap_ddp(tiny_gpt(layers=1))
    with megatron_lm.install():
        emerging = importlib.import_module("megatron.core.optimizer.emerging_optimizers")
        emerging._EMERGING_OPTIMIZERS["plain"] = emerging.EmergingOptimizerEntry(
            Plain, lambda optimizer, config=None: None, lambda config, chunks, groups: {"lr": 0.1}
        )
        try:
            config = megatron_optimizer.OptimizerConfig(optimizer="plain", lr=0.1)
            chain = megatron_optimizer.get_megatron_optimizer(config, [chunk])
        finally:
            del emerging._EMERGING_OPTIMIZERS["plain"]
    assert type(chain.chained_optimizers[0].optimizer).__name__ == "Plain"


@on_ranks(1)
def test_what_is_left_to_upstreams_factory_still_finds_it():
    from megatron_eopt.wrappers import factory

    with megatron_lm.install():
        from megatron.core.optimizer import get_megatron_optimizer
    assert factory.megatrons_own_factory.__module__ == "megatron.core.optimizer"
    assert get_megatron_optimizer.__module__ == "megatron_eopt.wrappers.factory"
