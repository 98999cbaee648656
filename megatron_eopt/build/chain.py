"""Several optimizers that step as one.

1. Gradients are handed to what is stepped, and unscaled.
2. Their norm is computed, which tells whether all are finite, and they are clipped.
3. Every stepper steps; matrices travel to where they are computed, and back.
4. When all have stepped, parameters are gathered, once.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.utils import log_single_rank
from torch import Tensor

from megatron_eopt.base import gpu
from megatron_eopt.base.agreement import agreed
from megatron_eopt.base.errors import ConfigurationError, NonFiniteError, check_number
from megatron_eopt.base.live_bytes import LiveBytes
from megatron_eopt.base.upstream import needed
from megatron_eopt.build.gradients import GradNorm, clipped, folds_clipping, non_finite, unscale_
from megatron_eopt.build.memory import Memory, memory_of
from megatron_eopt.build.overlap import Overlap
from megatron_eopt.build.stats import Stats
from megatron_eopt.checkpoint import local_state, optimizer_state
from megatron_eopt.checkpoint.migration import Policy
from megatron_eopt.checkpoint.rank_files import load_rank_file, save_rank_file
from megatron_eopt.optimizers.driver import CompositeOptimizer, check_may_step
from megatron_eopt.optimizers.stepper import Stepper
from megatron_eopt.qk_clip import remember
from megatron_eopt.routing.global_names import names_in
from megatron_eopt.settings.settings import RunSettings, Settings
from megatron_eopt.storage.interface import finish_gathers, gather_buckets, named_gradients
from megatron_eopt.storage.sharded import FragmentsOptimizer

logger = logging.getLogger(__name__)

_BY_BUCKET = "dp_reshardable"
"""Megatron's name for state bucket by bucket."""


class OptimizerChain(ChainedOptimizer):
    """megatron-core's chain, with one loss scale and one decision a step for all its steppers.

    They step and are saved in their order. The whole model names the parameters in messages.
    """

    # a loaded checkpoint leaves learning rates alone, and so does the trainer that loads it
    keeps_rates = True
    loads_itself = False  # whether a loaded state dict has to be handed over

    def __init__(
        self,
        steppers: Sequence[Stepper],
        settings: RunSettings,
        scaler: Any,
        model_chunks: Sequence[Any],
    ) -> None:
        storages = [stepper.storage for stepper in steppers]
        super().__init__(storages)
        self.steppers = list(steppers)
        self.settings = settings
        self.config = settings.config
        # name of the main optimizer, where a configuration says it
        self._main = settings.optimizer if isinstance(settings, Settings) else None
        self._scaler = scaler
        self._named_chunks = list(model_chunks)
        # whether the present gradients, once unscaled, had overflowed; None before
        self._found_inf: bool | None = None
        self._transient: int | None = None
        # whether the next steps are measured, the same on all ranks; a caller may change it
        self.collects_stats = settings.logs_stats
        self._stats = Stats(self.steppers)
        self.skipped_steps = 0
        self.is_sharded = any(isinstance(item, FragmentsOptimizer) for item in storages)
        self.number, self.superseded = -1, False  # see megatron_eopt.build.factory
        # whether the host reads norms a step later; see Note [No waits]
        self.reads_norms_late = gpu.runs_kernels(torch.empty(0, device="cuda"))
        self._overlap: Overlap | None = None
        if settings.overlaps_step:
            self._overlap = Overlap(self.steppers, self._named_chunks, self._expects_no_clipping)
        self._last_norm = math.inf
        # norms of the last step that the host has not read yet
        self._unread: dict[str | None, GradNorm] = {}
        remember(model_chunks, self)

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Hand all gradients to what is stepped and unscale them, once until a step or a zeroing.

        Returns:
            Whether any gradient on any rank overflowed; the loss scale has then been told.
        """
        if self._found_inf is not None:
            return self._found_inf
        for stepper in self.steppers:
            stepper.storage.collect_gradients()
        if self._scaler is None:
            return False
        found_inf = False
        for child in self.chained_optimizers:
            grads = [grad for _, grad in named_gradients(child)]
            group = child.get_grad_stats_parallel_group()
            found_inf |= unscale_(grads, self._scaler.inv_scale, group)
        self._scaler.update(found_inf)
        self._found_inf = found_inf
        return found_inf

    def memory(self) -> Memory:
        """Return what this rank's memory is used for, in bytes."""
        return memory_of(self.steppers, self._named_chunks, self._transient)

    def stats(self) -> dict[str, float]:
        """Return what was measured in the last step that was measured, by name; collective."""
        return self._stats.values() | {"optimizer/skipped-steps": float(self.skipped_steps)}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self._found_inf = None
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self) -> tuple[bool, Any, float | None]:
        """Update all parameters.

        Returns:
            Whether they were updated, the gradient norm before clipping, and the number of zeros in
            the gradients if the configuration asks for it. On a GPU the norm is a tensor of shape
            () that the host has not waited for.

        Raises:
            NonFiniteError: If a gradient is inf or nan and no loss scale lets the step be skipped;
                on every rank, with the same names, before anything has changed. Where the norm is a
                tensor nothing changes either, and the next step raises.
        """
        with self._stats.collecting() if self.collects_stats else nullcontext():
            if not self.settings.logs_memory or self._transient is not None:
                return self._step()
            # the first step makes what lives on; what follows does not depend on the step
            exists = any(stepper.storage.steps for stepper in self.steppers)
            with LiveBytes() as seen:
                result = self._step()
        if exists:
            self._transient = seen.peak
            # the trainer shows warnings alone, unless it is told otherwise
            log_single_rank(logger, logging.WARNING, str(self.memory()))
        return result

    def _step(self) -> tuple[bool, Any, float | None]:
        overflowed = self.prepare_grads()
        self._read_late()
        self._found_inf = None
        if overflowed:
            self.skipped_steps += 1
            return False, None, None
        norms = self._norms(None if self._overlap is None else self._overlap.join())
        late = self._may_read_late(norms)
        found: Any = norms[None].value if late else self._read(norms)
        if self._overlap is not None and (bool(norms[None].flag) or not self._keeps(found)):
            self._overlap.forget()
        with clipped(self.steppers, self.settings.clip_grad, norms, fold=len(norms) == 1):
            zeros = self.count_zeros() if self.settings.counts_zeros else None
            if not late and self.is_above_skip_threshold(found):
                self.skipped_steps += 1
                return False, found, zeros
            done = self.step_with_ready_grads()
        if late:
            norms[None].send()
            self._unread = norms
        return done, found, zeros

    def _read_late(self) -> None:
        """Read the norms of the last step, which has done nothing if one is not finite."""
        try:
            if self._unread:
                self._read(self._unread)
        except NonFiniteError:
            for stepper in self.steppers:
                stepper.storage.steps -= 1
            raise

    def _may_read_late(self, norms: Mapping[str | None, GradNorm]) -> bool:
        """Return whether nothing that a step does depends on what the host knows of its norms."""
        reads = len(norms) > 1 or math.isfinite(self.settings.skip_threshold)
        return self.reads_norms_late and not reads and all(map(folds_clipping, self.steppers))

    def _expects_no_clipping(self, margin: float) -> bool:
        """Return whether gradients will probably step as they are; the same on all ranks."""
        is_open = not (self.collects_stats or self.superseded)
        return is_open and self._keeps(self._last_norm / margin)

    def _keeps(self, norm: float) -> bool:
        """Return whether a step with gradients of this norm uses them as they are."""
        most = self.settings.clip_grad
        return norm + 1e-6 <= (most or math.inf) and not self.is_above_skip_threshold(norm)

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Step all steppers, then gather parameters unless the forward pass will."""
        check_may_step(self)
        self._found_inf = None
        if self._overlap is not None:
            self._overlap.step()
            return True
        for child in self.chained_optimizers:
            child.step_in_chain()
        self.gather_params()
        return True

    def gather_params(self, *, now: bool = False) -> None:
        """Bring the stepped weights to all ranks, ``now`` also where hooks would; collective."""
        for chunk in self.model_chunks:
            gather_buckets(chunk, now=now)
        for stepper in self.steppers:
            stepper.storage.gather_params(now=now)

    @torch.no_grad()
    def quantize_and_sync_model_params_from_main_params(self) -> None:
        """Let the model have the main weights, on all ranks; collective.

        The trainer of megatron-core 0.20 asks for it after every load.
        """
        finish_gathers(self.model_chunks)
        for child in self.chained_optimizers:
            child.quantize_and_sync_model_params_from_main_params()

    def _stage_model_params_from_main_params(self) -> None:
        """Do the same on this rank alone."""
        for child in self.chained_optimizers:
            child._stage_model_params_from_main_params()

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """Return the norm over all ranks of what Megatron counts in it; collective.

        Raises:
            NonFiniteError: If it is inf or nan, or the norm of a group that has its own, unless the
                configuration skips steps with such a norm. The names are the same on every rank.
        """
        self._read_late()
        return self._read(self._norms())

    @torch.no_grad()
    def clip_grad_norm(self, clip_grad: float) -> float:
        """Clip as a step does, to another norm, and return the norm before; collective."""
        check_number("clip_grad", clip_grad, above=0)
        self._read_late()
        norms = self._norms()
        found = self._read(norms)
        with clipped(self.steppers, clip_grad, norms, fold=False):
            pass
        return found

    def _norms(self, flag: Tensor | None = None) -> dict[str | None, GradNorm]:
        names = (None, *filter(self.has_grad_norm_group, needed("SEPARATE_GRAD_NORM_GROUPS")))
        parts = self.chained_optimizers
        return {name: GradNorm(parts, name, None if name else flag) for name in names}

    def _read(self, norms: dict[str | None, GradNorm]) -> float:
        """Return the norm of what has none of its own, once all are known to be finite."""
        self._unread = {}
        self._last_norm = math.inf
        found = {name: norm.read() for name, norm in norms.items()}
        self.grad_norms_by_group: dict[str, float] = {k: v for k, v in found.items() if k}
        for norm in found.values():
            if not math.isfinite(norm) and not self.is_above_skip_threshold(norm):
                self._refuse(list(norms.values()))
        self._last_norm = found.get(None, math.inf)
        return found.get(None, 0.0)

    def is_above_skip_threshold(self, norm: float) -> bool:
        """Return whether the configuration skips steps with this gradient norm; never with nan."""
        return norm > self.settings.skip_threshold

    def state_dict(self) -> Any:
        """Return this rank's state; that of fragments is in ``sharded_state_dict`` alone."""
        states = [local_state.save(stepper, self._main) for stepper in self.steppers]
        return states[0] if len(states) == 1 else states

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Mapping[str, Any],
        is_loading: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return what ``dist_checkpointing`` saves or loads; collective.

        State is saved by parameter, so it loads at any layout, but for Adam alone in the form that
        Megatron calls ``dp_reshardable``.

        Raises:
            ConfigurationError: If a parameter is not in the model's state.
        """
        metadata = kwargs.get("metadata") or {}
        form = kwargs.get("sharding_type") or metadata.get("distrib_optim_sharding_type")
        by_bucket = form == _BY_BUCKET and self._is_unmixed
        if by_bucket and not is_loading:
            optimizer_state.prepare(self.steppers, is_loading=is_loading)
            return super().sharded_state_dict(model_sharded_state_dict, is_loading, **kwargs)
        if self.is_stub_optimizer:
            return {}
        return optimizer_state.requested(
            self.steppers,
            model_sharded_state_dict,
            is_loading=is_loading,
            main=self._main,
            policy=Policy(self.settings.fresh_state, self.settings.momentum_from_adam),
            by_bucket=by_bucket,
        )

    def load_state_dict(self, state_dict: Any) -> None:
        """Load what :meth:`sharded_state_dict` or :meth:`state_dict` returned; collective.

        Raises:
            ConfigurationError: If it is not of these optimizers, or lacks state of theirs.
        """
        self._unread = {}
        if self._overlap is not None:
            self._overlap.forget()
        finish_gathers(self.model_chunks)
        agreed(lambda: self._take_over(state_dict))
        optimizer_state.settle(self.steppers)
        if self.is_sharded and self.settings.half is None:
            # each rank has read its part of the model's weights
            self.gather_params(now=True)

    def _take_over(self, state: Any) -> None:
        if optimizer_state.REQUESTS in state:
            optimizer_state.load(self.steppers, state)
        elif self.is_sharded:
            optimizer_state.load_groups(self.steppers, state, is_enough=self._is_unmixed)
        else:
            local_state.load(self.steppers, state, self.settings.fresh_state)

    def save_state_dict_to_file(self, filename: str) -> None:
        """Write this rank's state, for checkpoints of format ``torch``."""
        save_rank_file(filename, self.steppers, names_in(self._named_chunks))

    def load_state_dict_from_file(self, filename: str) -> None:
        """Read what :meth:`save_state_dict_to_file` wrote at the same layout.

        Raises:
            ConfigurationError: On every rank, if a file is missing, broken or of another layout.
        """
        load_rank_file(filename, self.steppers, names_in(self._named_chunks))

    def save_parameter_state(self, filename: str) -> None:
        """Write the state in fragments of Adam's, as megatron-core's distributed optimizer does.

        Raises:
            ConfigurationError: If it is another optimizer, or its state is not in fragments.
        """
        self._refuse_but_fragments_of_adam("save_parameter_state")
        optimizer_state.prepare(self.steppers, is_loading=False)
        super().save_parameter_state(filename)

    @torch.no_grad()
    def load_parameter_state(self, filename: str, *, update_legacy_format: bool = False) -> None:
        """Read what ``save_parameter_state`` wrote, for checkpoints of Adam's in format ``torch``.

        megatron-core fills what state there is, and main weights in float32 are part of leaves.

        Raises:
            ConfigurationError: If it is another optimizer, or its state is not in fragments.
        """
        self._refuse_but_fragments_of_adam("load_parameter_state")
        optimizer_state.prepare(self.steppers, is_loading=True)
        super().load_parameter_state(filename, update_legacy_format=update_legacy_format)
        optimizer_state.settle(self.steppers)

    def _refuse_but_fragments_of_adam(self, method: str) -> None:
        if not self._is_unmixed:
            rule = "knows fragments of the state of Adam alone"
            way_out = "Use sharded_state_dict, or save_state_dict_to_file and its counterpart"
            raise ConfigurationError(method, type(self).__name__, rule, way_out)

    @property
    def _is_unmixed(self) -> bool:
        """Whether megatron-core's own optimizers could read what this one writes by bucket."""
        return all(
            isinstance(item, FragmentsOptimizer)
            and not isinstance(item.optimizer, CompositeOptimizer)
            for item in self.chained_optimizers
        )

    def _refuse(self, norms: Sequence[GradNorm]) -> None:
        self.skipped_steps += 1
        if self._overlap is not None:
            self._overlap.forget()
        found = non_finite(self.chained_optimizers, names_in(self._named_chunks), norms)
        # each may be finite, and float32 have no room for the sum of their squares
        raise NonFiniteError("gradients" if found else "norm", sorted(found) or ["all gradients"])
