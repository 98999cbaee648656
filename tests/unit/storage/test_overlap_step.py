"""Muon's step beside the communication of gradients and parameters, in the bits of one after it."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megatron_eopt import TensorParallelMuon, get_megatron_optimizer, register_optimizer
from megatron_eopt.base.errors import NonFiniteError
from megatron_eopt.config.keys import ParamKey, get_standard_config_overrides
from megatron_eopt.config.registry import is_registered
from megatron_eopt.extending import MuonRule
from megatron_eopt.optimizers.exchange import ParamWithGrad
from megatron_eopt.wrappers.chain import OptimizerChain
from megatron_eopt.wrappers.config import EmergingOptimizerConfig
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import forward_backward, synthetic_batch, tiny_gpt, wrap_ddp
from tests.harness.tiers import mostly_long
from tests.unit.storage.runs import OVERLAP, SHARDED

KINDS = ("as it is", "as it is", "clipped", "as it is", "as it is", "not finite")
KINDS += ("as it is", "as it is", "changed", "as it is", "other momentum", "in two passes")
"""What happens to the gradients of each step, once they have been looked at."""

READ_WITH_L2 = ("as it is", "as it is", "other weights", "as it is", "as it is", "other momenta")
READ_WITH_L2 += ("as it is", "as it is", "other weights, by data", "as it is", "other weight_decay")

LAYOUTS: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "1": (1, {}, {}),
    "DP 2": (2, {}, {}),
    "TP 2 x DP 2": (4, {"tp": 2}, {}),
    "experts, EP 2": (4, {"ep": 2}, {"experts": 4}),
}


def build(
    dtype: torch.dtype,
    overlap: bool,
    model: dict[str, Any],
    bucket_size: int = 3000,
    overrides: Any = None,
    **fields: Any,
) -> Any:
    model = tiny_gpt(layers=3, dtype=dtype, bias=False, **model)
    chunk = wrap_ddp(model, **SHARDED | OVERLAP | {"bucket_size": bucket_size})
    config = EmergingOptimizerConfig(
        lr=0.01,
        weight_decay=0.1,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
        muon_overlap_dp_comm=overlap,
        **{"optimizer": "muon", "clip_grad": 100.0} | fields,
    )
    overrides = get_standard_config_overrides(config) | (overrides or {})
    return chunk, get_megatron_optimizer(config, [chunk], overrides)


class Watch:
    """Notes what is sent before and in a step, in order, and what is written before it."""

    def __init__(self, chunk: Any, optimizer: Any, patch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.groups: set[str] = set()
        self._optimizer, self._versions = optimizer, []
        self._all_to_all = dist.all_to_all_single
        patch.setattr(dist, "all_to_all_single", self._exchange)
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            patch.setattr(group, "start_param_sync", self._gathering(group.start_param_sync))

    def _exchange(self, *args: Any, **kwargs: Any) -> Any:
        # those of Megatron's experts are waited for at once
        if kwargs.get("async_op"):
            self.events.append("exchange")
            self.groups.add(kwargs["group"].group_name)
        return self._all_to_all(*args, **kwargs)

    def _gathering(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.events.append("gather")
            return function(*args, **kwargs)

        return call

    def begin(self) -> None:
        self.events.clear()
        self.note_versions()

    def note_versions(self) -> None:
        self._versions = self._current_versions()

    def step(self) -> float | str:
        """Return the norm of a step that writes nothing before it knows the norm."""
        assert self._current_versions() == self._versions
        self.events.append("step")
        try:
            return self._optimizer.step()[1]
        except NonFiniteError:
            assert self._current_versions() == self._versions
            return "refused"

    def _current_versions(self) -> list[int]:
        found = []
        for link in self._optimizer.chained_optimizers:
            for item in link.shards:
                state = link.optimizer.state[item.main]
                kept = [value for value in state.values() if isinstance(value, torch.Tensor)]
                found += [tensor._version for tensor in (item.main, *kept)]
        return found


def exchanges(events: list[str]) -> tuple[int, int]:
    """Return how often ranks exchange matrices before a step and in it."""
    place = events.index("step")
    return events[:place].count("exchange"), events[place:].count("exchange")


@torch.no_grad()
def change(kind: str, optimizer: Any) -> None:
    """Change what the updates of matrices depend on besides gradients."""
    for link in optimizer.chained_optimizers:
        for item in link.shards:
            momentum = link.optimizer.state[item.main].get("momentum_buffer")
            if kind == "other weights":
                item.main.neg_()
            elif kind == "other weights, by data":
                item.main.data.mul_(0.5)
            elif momentum is not None:
                momentum.zero_()


def train(
    dtype: torch.dtype, layout: str, overlap: bool, kinds: tuple[str, ...] = KINDS, l2: bool = False
) -> tuple[dict[str, Any], list[list[str]]]:
    _, parallel, model = LAYOUTS[layout]
    initialize_megatron(**parallel)
    chunk, optimizer = build(dtype, overlap, model, decoupled_weight_decay=not l2)
    tp = parallel.get("tp", 1)
    log: list[list[str]] = []
    outcomes: dict[str, Any] = {}
    size, rank = dist.get_world_size() // tp, dist.get_rank() // tp
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(chunk, optimizer, patch)
        for step, kind in enumerate(kinds):
            optimizer.zero_grad()
            chunk.zero_grad_buffer()
            watch.begin()
            forward_backward([chunk], [synthetic_batch(4 * step + i) for i in range(rank, 4, size)])
            if kind == "in two passes":
                forward_backward([chunk], [synthetic_batch(100 + rank)])
            optimizer.config.clip_grad = 0.1 if kind == "clipped" else 100.0
            grads = chunk.buffers[0].grad_data
            if kind == "changed":
                grads.mul_(0.5)
            elif (setting := kind.removeprefix("other ")) in ("momentum", "weight_decay"):
                for group in optimizer.param_groups:
                    group |= {setting: 0.5} if setting in group else {}
            elif kind.startswith("other "):
                change(kind, optimizer)
                watch.note_versions()
            elif kind == "not finite" and dist.get_rank() == 0:
                grads[: grads.numel() // size].fill_(torch.nan)
            outcomes[f"norm {step}"] = watch.step()
            log.append(list(watch.events))
        # what is written to main weights comes to the model; in float32 they are the model's
        if dtype == torch.float32:
            optimizer.gather_params(now=True)
        for link in optimizer.chained_optimizers:
            for item in link.shards:
                item.main.data.mul_(0.5)
        optimizer.quantize_and_sync_model_params_from_main_params()
        chunk.disable_forward_pre_hook()
    outcomes |= {name: param.detach().clone() for name, param in chunk.named_parameters()}
    for link in optimizer.chained_optimizers:
        for number, item in enumerate(link.shards):
            outcomes |= {f"{number} {k}": v.clone() for k, v in link.tensors_of(item).items()}
    return outcomes, log


def is_same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


EVERY = itertools.product((torch.float32, torch.bfloat16), LAYOUTS)


@pytest.mark.parametrize(("dtype", "layout"), mostly_long(EVERY, (torch.float32, "DP 2")))
def test_the_bits_are_those_of_a_step_after_communication(dtype, layout):
    world = LAYOUTS[layout][0]
    serial = run_ranks(world, train, dtype, layout, False)
    ahead = run_ranks(world, train, dtype, layout, True)
    for (expected, before), (found, log) in zip(serial, ahead, strict=True):
        assert expected.keys() == found.keys()
        assert not [name for name in expected if not is_same(expected[name], found[name])]
        assert found["norm 5"] == "refused"
        if world == 1:
            continue  # nothing is sent
        windows = check_order(log[0])
        early, every = exchanges(log[0])
        assert early == 0
        for kind, events in zip(KINDS[1:], log[1:], strict=True):
            early, late = exchanges(events)
            if kind == "as it is" and early:
                # the bucket that is reduced last is not complete before the backward pass has ended
                assert early + late == every
                assert late < every / 2
            elif kind in ("clipped", "changed", "other momentum"):
                assert (early > every / 2, late) == (True, every)
        assert sum(exchanges(events)[0] > 0 for events in log) >= 6
        assert every <= exchanges(before[0])[1] + 2 * windows


@on_ranks(2)
def test_matrices_do_not_queue_with_reductions():
    initialize_megatron()
    chunk, optimizer = build(torch.float32, True, {})
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(chunk, optimizer, patch)
        forward_backward([chunk], [synthetic_batch(0)])
        optimizer.step()
    values = [value for group in chunk.bucket_groups for value in vars(group).values()]
    reducing = {group.group_name for group in values if isinstance(group, dist.ProcessGroup)}
    # calls of one group run one after another, in NCCL
    assert len(watch.groups) == 1
    assert reducing
    assert not watch.groups & reducing


@pytest.mark.parametrize("dtype", mostly_long([torch.float32, torch.bfloat16], torch.bfloat16))
def test_updates_of_weights_that_change_before_the_step_are_computed_again(dtype):
    serial = run_ranks(2, train, dtype, "DP 2", False, READ_WITH_L2, True)
    ahead = run_ranks(2, train, dtype, "DP 2", True, READ_WITH_L2, True)
    for (expected, _), (found, log) in zip(serial, ahead, strict=True):
        assert not [name for name in expected if not is_same(expected[name], found[name])]
        counts = [exchanges(events) for events in log]
        every = counts[0][1]
        for kind, (early, late) in zip(READ_WITH_L2[1:], counts[1:], strict=True):
            assert early > every / 2
            assert late == every - early if kind == "as it is" else late == every


def check_order(events: list[str]) -> int:
    """Check that each bucket is gathered before the next one is computed; return their number."""
    order = events[events.index("exchange") :]
    windows = [its for its in " ".join(order).split("gather") if "exchange" in its]
    assert len(windows) == order.count("gather") > 3
    return len(windows)


class WarmedRule(MuonRule):
    """Its momentum rises with the count of steps, which a step ahead must know, too."""

    counts_steps = looks_ahead = True

    def _directions(
        self, items: Mapping[int, ParamWithGrad], arriving: Sequence[int], outs: Any
    ) -> Mapping[int, torch.Tensor]:
        for item in items.values():
            share = item.group["momentum"] * (1 - 1 / (float(item.state["step"]) + 1))
            item.state["momentum_buffer"].lerp_(item.param.grad, 1 - share)
        return {number: item.state["momentum_buffer"] for number, item in items.items()}


class LastRule(MuonRule):
    """Reads the count where updates are applied, and looks ahead as Muon does."""

    counts_steps = True

    def _apply(self, items: Sequence[ParamWithGrad], updates: Mapping[int, torch.Tensor]) -> None:
        for item in items:
            updates[item.number].mul_(1 / float(item.state["step"]))
        super()._apply(items, updates)


class HeldRule(MuonRule):
    """Has directions of its own, and does not say what they depend on."""

    def _directions(
        self, items: Mapping[int, ParamWithGrad], arriving: Sequence[int], outs: Any
    ) -> Mapping[int, torch.Tensor]:
        directions = super()._directions(items, arriving, None)
        return {number: direction.abs().sqrt() for number, direction in directions.items()}


RULES = {"warmed": WarmedRule, "last": LastRule, "held": HeldRule}


def drawn(seed: int) -> dict[str, Any]:
    """Return settings of a run, drawn at random."""
    draw = random.Random(seed)
    # of some matrices, which another optimizer of matrices or of elements steps
    others = draw.choice([None, "held", "adaptive_muon", "soap", "lion", "adam", "warmed"])
    has_cautious = others not in ("soap", "lion")
    return {
        "optimizer": draw.choice(["muon", "warmed", "last"]),
        "others": others,
        "muon_nesterov": draw.random() < 0.5,
        "muon_momentum": draw.choice([0.0, 0.6, 0.95]),
        "decoupled_weight_decay": (decoupled := draw.random() < 0.7),
        "cautious_weight_decay": has_cautious and decoupled and draw.random() < 0.4,
        "muon_split_qkv": draw.random() < 0.5,
        "muon_skip_grad_clip": draw.random() < 0.3,
        "clip_grad": draw.choice([0.0, 0.05, 100.0]),
        "dtype": torch.bfloat16 if draw.random() < 0.5 else torch.float32,
        "bucket_size": draw.choice([1000, 3000, 20000]),
    }


def outcome(settings: dict[str, Any], overlap: bool) -> dict[str, torch.Tensor]:
    """Return weights and state after four steps."""
    settings = dict(settings)
    model_parallel_cuda_manual_seed(123)
    others, dtype = settings.pop("others"), settings.pop("dtype")
    overrides = {ParamKey(name="*fc1.weight"): {"optimizer": others}} if others else None
    chunk, optimizer = build(dtype, overlap, {}, overrides=overrides, **settings)
    size, rank = dist.get_world_size(), dist.get_rank()
    for step in range(4):
        optimizer.zero_grad()
        chunk.zero_grad_buffer()
        forward_backward([chunk], [synthetic_batch(4 * step + i) for i in range(rank, 4, size)])
        optimizer.step()
    chunk.disable_forward_pre_hook()
    found = {name: param.detach().clone() for name, param in chunk.named_parameters()}
    for link in optimizer.chained_optimizers:
        assert link.steps == 4
        for number, item in enumerate(link.shards):
            found |= {f"{number} {k}": v.clone() for k, v in link.tensors_of(item).items()}
    return found


def compare(seeds: list[int]) -> list[str]:
    """Return what differs between a step with overlap and one without, for some draws."""
    for name, rule in RULES.items():
        cls = type(name, (TensorParallelMuon,), {"update_rule_class": rule})
        fields = {"state_layout": "matrix_update", "prefixes": (name, "muon")}
        if not is_registered(name):
            register_optimizer(name, cls, **fields)
    initialize_megatron()
    differing = []
    for seed in seeds:
        settings = drawn(seed)
        plain, overlapped = outcome(settings, False), outcome(settings, True)
        names = [n for n in plain if not is_same(plain[n], overlapped[n])]
        steps = {float(v) for n, v in overlapped.items() if n.endswith(" step")}
        counted = "last" in settings.values() or "warmed" in settings.values()
        if names or plain.keys() != overlapped.keys() or (counted and 4.0 not in steps):
            differing.append(f"{seed}: {settings}: {names[:4]}, steps {steps}")
    return differing


def test_every_rule_with_any_settings_has_the_bits_of_a_plain_step():
    """Fresh draws in every run; a seed that fails is printed, and ``drawn`` repeats it."""
    seeds = [random.randrange(10**6) for _ in range(6)]
    for differing in run_ranks(2, compare, seeds, timeout=300):
        assert not differing


def test_updates_are_computed_ahead_where_nothing_measures_or_clips_them():
    chain: Any = SimpleNamespace(collects_stats=False, superseded=False, _last_norm=1.0)
    chain._keeps = lambda norm: norm < 2
    found = [OptimizerChain._expects_no_clipping(chain, margin) for margin in (1.0, 0.4)]
    for flag in ("collects_stats", "superseded"):
        other: Any = SimpleNamespace(**vars(chain) | {flag: True})
        found.append(OptimizerChain._expects_no_clipping(other, 1.0))
    assert found == [True, False, False, False]
