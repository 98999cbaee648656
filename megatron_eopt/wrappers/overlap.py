"""Overlap Muon's step with the communication of gradients and parameters.

When a bucket's gradients are reduced, the updates of its matrices are computed while the backward
pass continues. Once the gradient norm is known, buckets are stepped in the order in which the
forward pass needs them, and each is gathered while the next one is stepped. See Note [Look ahead,
then commit] of :mod:`megatron_eopt.optimizers.windows`.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.base import gpu
from megatron_eopt.megatron_core.buckets import finish_gathers
from megatron_eopt.megatron_core.stored_weights import StoredWeights
from megatron_eopt.optimizers.assigned_rule import AssignedRule
from megatron_eopt.optimizers.muon_rule import MuonRule
from megatron_eopt.optimizers.windows import Window
from megatron_eopt.storage.shard import ParamShard
from megatron_eopt.wrappers.gradients import GradNorm
from megatron_eopt.wrappers.zero1.buffers import bucket_groups
from megatron_eopt.wrappers.zero1.optimizer import Zero1Optimizer

_MARGIN = 0.9
"""Look ahead only if the last norm was below this share of the limit, so that clipping is rare."""

_CHANGED_LATER = ("sequence_parallel", "average_gradients_across_tp_domain", "pipeline_parallel")
"""Attributes of parameters whose gradients megatron-core sums again after the bucket reduction."""


@dataclass(eq=False)
class _InBucketGroup:
    """A window, whose matrices are in one bucket group."""

    storage: Zero1Optimizer
    assigned: AssignedRule
    update_rule: MuonRule
    window: Window
    shards: list[ParamShard]  # those of which this rank stores a part
    group: Any
    is_early: bool  # whether its gradients are final once they are reduced


class Overlap:
    """Computes updates while gradients are reduced, and steps window by window.

    ``may_look`` decides whether to compute ahead in this step, with the same result on all ranks.
    """

    def __init__(
        self,
        storages: Sequence[StoredWeights],
        chunks: Sequence[Any],
        may_look: Callable[[float], bool],
    ) -> None:
        self._storages = [item for item in storages if isinstance(item, Zero1Optimizer)]
        self._may_look = may_look
        self._groups, self._chunks = bucket_groups(chunks), chunks
        windows = list(self._found())
        self._update_rules = list({window.update_rule for window in windows})
        self._windows = {g: [w for w in windows if w.group is g] for g in self._groups}
        self._mains = {
            (storage, group): [s.main for s in storage.shards if s.param in group.params]
            for storage in self._storages
            for group in self._groups
        }
        # bucket groups in the order of a step, those without matrices first
        self._order = sorted(self._groups, key=lambda group: bool(self._windows[group]))
        self._others = [
            item
            for storage in storages
            for item in storage.assigned
            if item not in {window.assigned for window in windows}
        ]
        self.has_looked = False  # whether updates were computed ahead; the same on all ranks
        self._begun: set[Any] = set()  # bucket groups whose reduction has begun
        self._waiting: list[Any] = []  # those of them whose updates are not computed yet
        self._stream = torch.cuda.Stream() if gpu.is_there() else None  # type: ignore[no-untyped-call]
        for chunk in chunks:
            # so that megatron-core leaves the gather of buckets to this class
            chunk.overlap_param_gather_with_optimizer_step = True
        for group in self._groups:
            # the attribute hides the method, which DDP's backward hooks call when the last gradient
            # of a bucket group is there (``register_grad_ready``)
            group.start_grad_sync = functools.partial(self._started, group, group.start_grad_sync)

    def _found(self) -> Iterator[_InBucketGroup]:
        for group in self._groups:
            for storage in self._storages:
                for item in storage.assigned:
                    update_rule = item.rule
                    if not (isinstance(update_rule, MuonRule) and update_rule.can_look_ahead()):
                        continue
                    for window in update_rule.windows:
                        shards = [update_rule.shards[member] for member in window.members]
                        if all(shard.param in group.params for shard in shards):
                            # their gradients may still be summed over other ranks in
                            # ``finalize_model_grads``
                            late = any(
                                getattr(shard.param, name, False)
                                for shard in shards
                                for name in _CHANGED_LATER
                            )
                            held = [shard for shard in shards if shard.main is not None]
                            where = (storage, item, update_rule, window)
                            yield _InBucketGroup(*where, held, group, not late)

    def _started(self, group: Any, start: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Begin to reduce a bucket group, and compute the updates of the one before."""
        if group in self._begun:
            # another backward pass without a step in between
            self.forget()
        start(*args, **kwargs)
        # this group's backward pass has hidden the reduction of the one before
        ready, self._waiting = self._waiting, [group]
        self._begun.add(group)
        for earlier in ready:
            self._look_at(earlier)

    def _look_at(self, group: Any) -> None:
        if not self._may_look(_MARGIN):
            return
        self.has_looked = True
        # the stream waits for the last step, and for gradients that are already reduced
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if group.grad_reduce_handle is not None:
                # with NCCL, this makes the stream wait, not the host
                group.grad_reduce_handle.wait()
            for window in self._windows[group]:
                if window.is_early:
                    window.storage.collect_gradients(window.shards)
                    with window.assigned.groups_and_state() as (groups, state):
                        window.update_rule.compute_ahead(window.window, groups, state)

    def forget(self) -> None:
        """Discard all updates computed ahead."""
        self.has_looked = False
        self._begun.clear()
        self._waiting.clear()
        for update_rule in self._update_rules:
            update_rule.forget()

    def settle(self, norm: GradNorm, keeps: Callable[[float], bool]) -> None:
        """Discard updates computed ahead unless gradients are as they were and ``keeps`` them."""
        if self.has_looked:
            # with the verdict on the norm, the host launches one of two ways to step
            value, changed = norm.with_flag()
            if changed or not keeps(value):
                self.forget()

    def join(self) -> Tensor:
        """Return 1 if a gradient of this rank has changed since its update was computed, else 0."""
        # the last group has no later reduction to hide behind; the step computes its updates
        self._begun.clear()
        self._waiting.clear()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        flags = [update_rule.unchanged() for update_rule in self._update_rules]
        same = [flag for flag in flags if flag is not None]
        if not same:
            return torch.zeros((), device="cuda")
        return 1.0 - torch.stack(same).all().float()

    def step(self) -> None:
        """Step all parameters, and start to gather each bucket as soon as it is complete."""
        self.has_looked = False
        # gathers of the last step may still run if there was no forward pass
        finish_gathers(self._chunks)
        with ExitStack() as stack:
            for storage in self._storages:
                stack.enter_context(storage.writing_model_copies())
            self._step()
        for storage in self._storages:
            # ``StoredWeights.step_with_ready_grads``, which counts otherwise, is not called
            storage.steps += 1

    def _step(self) -> None:
        # before all windows, so that buckets without matrices can be gathered at once
        for item in self._others:
            with item.groups_and_state() as (groups, state):
                item.rule.step(groups, state)
        for group in self._order:
            for window in self._windows[group]:
                with window.assigned.groups_and_state() as (groups, state):
                    window.update_rule.step(groups, state, [window.window])
            for storage in self._storages:
                # the gather sends this rank's fragment of the bucket, so weights are written first
                storage.copy_mains(self._mains[storage, group])
            group.start_param_sync()
