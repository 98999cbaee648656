"""``optimizer.state`` is the state: after it is cleared, the next step is that of a fresh start."""

import copy
import itertools
from collections import defaultdict
from dataclasses import replace
from functools import partial

import pytest
import torch

from megatron_eopt import get_megatron_optimizer
from megatron_eopt.config.registry import optimizer_names
from megatron_eopt.fsdp2 import build_optimizer
from megatron_eopt.testing.scene import forget_megatron
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.harness.tiers import mostly_long
from tests.unit.fsdp2 import models
from tests.unit.fsdp2.models import FORMS, eager, far, load, make_model, named, stepped, whole
from tests.unit.storage import runs
from tests.unit.storage.runs import OVERLAP, PLAIN, SHARDED, Result, Run, gradients, make_chunk

STEPS = 3
LATER = range(STEPS, STEPS + 2)


WAYS = ("cleared", "replaced", "deleted", "popped", "emptied", "assigned")
OF_ALL_AND_OF_EACH = ("replaced", "deleted")
"""One way for all parameters and one for each: where storages differ, not the ways."""


def reset(optimizer, way, params):
    """Throw the state away, of all parameters at once or of each."""
    state = optimizer.state
    if way == "cleared":
        state.clear()
    elif way == "replaced":
        optimizer.state = defaultdict(dict)
    for param in list(state) if way == "popped" else params:
        if way == "deleted":
            del state[param]
        elif way == "popped":
            state.pop(param)
        elif way == "emptied":
            state[param].clear()
        elif way == "assigned":
            state[param] = {}


VARIANTS = {
    # sinkhorn_muon has Muon's state, but starts only from weights that its own mapper made
    **{name: {} for name in optimizer_names() if name != "sinkhorn_muon"},
    **{name: {} for name in models.METHODS},
    "int8": {"muon_momentum_dtype": "int8"},
    "bf16": {"muon_momentum_dtype": "bf16"},
    "amsgrad": {},
}
OF = {"int8": "muon", "bf16": "muon", "amsgrad": "adam"}


def settings(variant, **fields):
    if variant == "muon_hyperball":
        fields["weight_decay"] = 0.0
    return models.config(OF.get(variant, variant), **VARIANTS[variant], **fields)


@torch.no_grad()
def model_for(variant, layout="plain"):
    model = make_model(layout)
    for param in named(model).values():
        if variant.startswith("oblique") and param.dim() > 1:
            # of its matrices, columns have norm 1
            param.div_(param.norm(dim=0))
    return model


@torch.no_grad()
def copied(model, layout="plain"):
    other = make_model(layout)
    for mine, its in zip(named(other).values(), named(model).values(), strict=True):
        mine.copy_(its)
    return other


def build(model, variant, **fields):
    optimizer = build_optimizer(model, settings(variant, **fields))
    if variant == "amsgrad":
        for group in optimizer.param_groups:
            group["amsgrad"] = True
    return optimizer


def kinds_of(optimizer):
    return {number: state.keys() for number, state in optimizer.state_dict()["state"].items()}


@eager
def resets(layout, variant, ways, **fields):
    """Return how far two steps after each reset are from those of a new optimizer."""
    found = {}
    for way in ways:
        model = model_for(variant, layout)
        optimizer = build(model, variant, **fields)
        stepped(model, optimizer, *range(STEPS))
        other = copied(model, layout)
        reset(optimizer, way, list(optimizer.names))
        continued = stepped(model, optimizer, *LATER)
        new = build(other, variant, **fields)
        found[variant, way] = far(continued, stepped(other, new, *LATER))[0]
        # the state is there again to be saved
        assert kinds_of(optimizer) == kinds_of(new)
    return found


def wrong(by_rank):
    return [key for found in by_rank for key, distance in found.items() if distance > 0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cleared_state_is_a_fresh_start(variant):
    assert not wrong([resets("plain", variant, WAYS)])


OF_ALL_KINDS = ("muon", "normuon", "int8", "soap", "psgd_pro", "muon_hyperball", "adam", "scion")
BY_ROWS_AND_BY_OWNERS = mostly_long(OF_ALL_KINDS, "muon", "soap")


OFF_LOADED = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.6}


@pytest.mark.parametrize("fields", [{}, OFF_LOADED], ids=["resident", "off-loaded"])
@pytest.mark.parametrize("variant", BY_ROWS_AND_BY_OWNERS)
def test_on_shards(variant, fields):
    job = partial(resets, **fields)
    found = run_ranks(2, job, "fsdp", variant, OF_ALL_AND_OF_EACH, cpu=bool(fields))
    assert not wrong(found)


@pytest.mark.parametrize(
    "variant",
    mostly_long(
        ["muon", "normuon", "soap", "psgd_pro", "muon_hyperball"], "muon", "normuon", "soap"
    ),
)
@eager
def test_one_parameters_state(variant):
    model = make_model()
    optimizer = build(model, variant)
    stepped(model, optimizer, *range(STEPS))
    other = copied(model)
    fresh = stepped(other, build(other, variant), *LATER)
    param = named(model)["down.weight"]
    del optimizer.state[param]
    found = stepped(model, optimizer, *LATER)
    assert torch.equal(found["down.weight"], fresh["down.weight"])
    assert not torch.equal(found["wide.weight"], fresh["wide.weight"])


SLOW = "slow"


def look_ahead(model, optimizer):
    """Keep slow weights in the state, as Lookahead does, and a number and a plain tensor."""
    for param in named(model).values():
        optimizer.state[param][SLOW] = param.detach().clone()
        optimizer.state[param]["drawn"] = {"seed": 7, "noise": torch.arange(3.0)}


@eager
def users_keys(layout, variant):
    """Return where a user's own state is not what it was before a save and a load."""
    wrong = []
    for form in FORMS[:2]:
        model = make_model(layout)
        optimizer = build(model, variant)
        stepped(model, optimizer, 0)
        look_ahead(model, optimizer)
        kept = {name: whole(param) for name, param in named(model).items()}
        stepped(model, optimizer, 1)
        saved = copy.deepcopy(form(model, optimizer))
        for is_there in (False, True):
            other = copied(model, layout)
            following = build(other, variant)
            if is_there:
                look_ahead(other, following)
            load(form, other, following, saved)
            for name, param in named(other).items():
                found = following.state[param]
                same = SLOW in found and torch.equal(whole(found[SLOW]), kept[name])
                if not same or found.get("drawn", {}).get("seed") != 7:
                    wrong.append((form.__name__, is_there, name))
    return wrong


@pytest.mark.parametrize("variant", ["muon", "normuon", "int8", "soap", "adam", "lion"])
def test_a_users_own_state_is_saved_and_loaded(variant):
    assert not users_keys("plain", variant)


@pytest.mark.parametrize("variant", mostly_long(["muon", "int8", "soap", "adam"], "muon"))
def test_a_users_own_state_on_shards(variant):
    assert run_ranks(2, users_keys, "fsdp", variant, cpu=False) == [[], []]


@pytest.mark.parametrize(
    ("before", "after"), [("adam", "muon"), ("muon", "muon"), ("muon", "soap")]
)
@eager
def test_a_users_own_state_needs_no_counterpart(before, after):
    model = make_model()
    optimizer = build(model, before)
    stepped(model, optimizer, 0)
    saved = optimizer.state_dict()
    following = build(model, after)
    look_ahead(model, following)
    following.load_state_dict(saved)
    assert all(SLOW in following.state[param] for param in following.names)


CHAINS = {
    "replicated": Run(ddp=PLAIN, config=PLAIN),
    "ZeRO-1": Run(ddp=SHARDED, config=SHARDED),
    "overlap": Run(
        ddp=SHARDED | OVERLAP,
        config=SHARDED | {"overlap_param_gather": True, "muon_overlap_dp_comm": True},
    ),
}


def chain_steps(run, optimizer, chunk, first, count=2):
    for number in range(first, first + count):
        gradients(run, chunk, optimizer, number)
        optimizer.step()
    if chunk.ddp_config.overlap_param_gather:
        # a gather that waits for a forward pass
        chunk.disable_forward_pre_hook()
        chunk.enable_forward_pre_hook()
    return Result(runs.weights(run, chunk), []).tensors


def new_chain(run, variant, start=None):
    """Return a model, which starts with given weights, and its optimizer."""
    chunk = make_chunk(run)
    if start is not None:
        for name, param in chunk.named_parameters():
            param.data.copy_(start[runs.global_name(name, run.model)])
    chosen = settings(variant, **run.config)
    optimizer = get_megatron_optimizer(chosen, [chunk])
    runs.set_rates(optimizer, chosen)
    return chunk, optimizer


def after_reset(run, variant, way):
    """Return how far a chain's steps after a reset are from a new one's, and the chain."""
    chunk, optimizer = new_chain(run, variant)
    before = chain_steps(run, optimizer, chunk, 0, STEPS)
    for child in optimizer.chained_optimizers:
        groups = child.optimizer.param_groups
        reset(child.optimizer, way, [param for group in groups for param in group["params"]])
    continued = chain_steps(run, optimizer, chunk, STEPS)
    chunk, fresh = new_chain(run, variant, before)
    expected = chain_steps(run, fresh, chunk, STEPS)
    forget_megatron()
    return far(continued, expected)[0], optimizer


@pytest.mark.parametrize(
    ("name", "variant"),
    mostly_long(
        [("overlap", "muon"), *itertools.product(("replicated", "ZeRO-1"), OF_ALL_KINDS)],
        ("overlap", "muon"),
        ("replicated", "muon"),
        ("ZeRO-1", "muon"),
        ("ZeRO-1", "soap"),
    ),
)
@on_ranks(2, timeout=200)
@eager
def test_in_megatrons_loop(name, variant):
    for way in OF_ALL_AND_OF_EACH:
        assert after_reset(CHAINS[name], variant, way)[0] == 0, way


EMBEDDING = {"vocabulary": 4096, "untied": False}
WHOLE = ("soap", "psgd_pro", "scion", "muon_hyperball")


@eager
def resets_of_owners(variant):
    """Return the same where one of two ranks stores only a part of the embedding."""
    run, found, owners = replace(CHAINS["ZeRO-1"], model=EMBEDDING), {}, set()
    for way in ("deleted", "assigned"):
        found[variant, way], chain = after_reset(run, variant, way)
        (child,) = chain.chained_optimizers
        for item in child.assigned:
            rule = item.rule
            if rule.owned_state and not any(rule.numbered(item.groups())):
                owners.add(variant)
    return found, owners


@pytest.mark.parametrize("variant", mostly_long(WHOLE, "soap"))
def test_of_owners_that_store_none_of_their_matrices(variant):
    found, owners = zip(*run_ranks(2, resets_of_owners, variant, timeout=200), strict=True)
    assert variant in set().union(*owners) or variant not in ("soap", "psgd_pro")
    assert not wrong(found)


@pytest.mark.parametrize("variant", BY_ROWS_AND_BY_OWNERS)
@on_ranks(2, timeout=200)
@eager
def test_a_copy_of_the_state_is_the_state(variant):
    run, results = CHAINS["ZeRO-1"], []
    for is_copied in (False, True):
        chunk, optimizer = new_chain(run, variant)
        chain_steps(run, optimizer, chunk, 0, STEPS)
        for child in optimizer.chained_optimizers if is_copied else ():
            copies = {param: dict(values) for param, values in child.optimizer.state.items()}
            child.optimizer.state = defaultdict(dict, copies)
        results.append(chain_steps(run, optimizer, chunk, STEPS))
        forget_megatron()
    assert far(*results)[0] == 0


LATE = {
    "amsgrad": ("adam", {"amsgrad": True}),
    "maximize": ("adam", {"maximize": True}),
    "momentum": ("sgd", {"momentum": 0.9}),
    "nesterov": ("sgd", {"momentum": 0.9, "nesterov": True}),
    "reversed": ("sgd", {"momentum": 0.9, "maximize": True}),
}


@pytest.mark.parametrize("name", ["replicated", "ZeRO-1"])
@on_ranks(2, timeout=200)
@eager
def test_settings_that_are_turned_on_later(name):
    for case, (variant, late) in LATE.items():
        run = CHAINS[name]
        chunk = make_chunk(run)
        fields = {"sgd_momentum": 0.0, "adam_eps": 1e-8}
        ours = get_megatron_optimizer(settings(variant, **run.config, **fields), [chunk])
        its = make_chunk(CHAINS["replicated"])
        cls = {"adam": torch.optim.AdamW, "sgd": torch.optim.SGD}[variant]
        theirs = cls(its.parameters(), lr=0.02, weight_decay=0.1)
        for group in ours.param_groups:
            group.update(lr=0.02, weight_decay=0.1)
        for step in range(2 * STEPS):
            if step == STEPS:
                for group in (*ours.param_groups, *theirs.param_groups):
                    group.update(late)
                for param in its.parameters() if "amsgrad" in late else ():
                    theirs.state[param]["max_exp_avg_sq"] = torch.zeros_like(param)
            runs.inject(CHAINS["replicated"], its, step)
            for param in its.parameters():
                param.grad = param.main_grad
            theirs.step()
            continued = chain_steps(run, ours, chunk, step, 1)
        expected = Result(runs.weights(CHAINS["replicated"], its), [])
        # torch's loops over tensors round otherwise than fused ones
        assert far(continued, expected.tensors)[0] < 1e-6, case
        forget_megatron()
