"""Several optimizers that step as one.

Note [A step]
    1. :meth:`OptimizerChain.step` has each storage hand this step's gradients to the tensors that
       it steps (``collect_gradients``), and divides them by the loss scale.
    2. One all-reduce gives the gradient norm, which also shows whether all gradients are finite
       (``gradients.GradNorm``). Gradients are clipped, or kernels do so while they read them.
    3. Each storage steps its torch optimizer: a ``ShardedOptimizer`` steps its update rules, each
       with its parameter groups and state (``AssignedRule``). Adam and its like change each
       element. Muon turns gradients into directions, and its ``MatrixExchange`` sends these to the
       ranks that compute whole matrices, orthogonalizes them, and sends the updates back (Note
       [The way of a gradient] of muon_rule.py).
    4. Whoever steps a main weight also writes the model's copy (``model_copies_of``).
    5. Weights are gathered once, when all storages have stepped, or in the next forward pass.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any, NoReturn

import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor, nn

from megatron_eopt.base.agreement import any_rank, raise_together
from megatron_eopt.base.errors import (
    NonFiniteError,
    check_number,
)
from megatron_eopt.checkpoint import local_state, optimizer_state
from megatron_eopt.checkpoint.local_state import refuse_rank_files
from megatron_eopt.config.settings import RunSettings, Settings
from megatron_eopt.math import passes
from megatron_eopt.megatron_core.buckets import finish_gathers, gather_buckets
from megatron_eopt.megatron_core.stored_weights import StoredWeights, named_gradients, rules_of
from megatron_eopt.megatron_core.upstream import require_upstream
from megatron_eopt.optimizers.recorder import Recorder
from megatron_eopt.optimizers.update_rule import check_may_step, refuse_copy
from megatron_eopt.qk_clip import remember
from megatron_eopt.routing.frozen import Frozen
from megatron_eopt.routing.global_names import names_in
from megatron_eopt.routing.places import ModelWalk
from megatron_eopt.state.groups import check_state_dict
from megatron_eopt.wrappers.gradients import (
    GradNorm,
    clipped,
    exceeds,
    fuses_grad_scale,
    non_finite,
    unscale_,
)
from megatron_eopt.wrappers.memory import Memory, memory_of
from megatron_eopt.wrappers.overlap import Overlap

_NORM_GROUPS: Sequence[str] = require_upstream("SEPARATE_GRAD_NORM_GROUPS")


class OptimizerChain(ChainedOptimizer):
    """megatron-core's chain, with one loss scale and one gradient norm for all its optimizers.

    ``storages`` step and are saved in order. ``model_chunks`` names parameters in messages.
    """

    loads_itself = False  # whether the trainer must pass a loaded state dict to load_state_dict

    def __init__(
        self,
        storages: Sequence[StoredWeights],
        settings: RunSettings,
        scaler: Any,
        model_chunks: Sequence[Any],
    ) -> None:
        # its own wrappers of torch optimizers, which also know the update rules
        super().__init__(list(storages))
        self.settings = settings
        self.config = settings.original  # callers may change what steps read
        # name of the main optimizer, if a configuration gives it
        self._main_optimizer = settings.optimizer if isinstance(settings, Settings) else None
        # one for all storages: megatron-core makes one for each optimizer
        # (``_get_megatron_optimizer_based_on_param_groups``), and then only some of them notice an
        # overflow
        self._scaler = scaler
        self._named_chunks = list(model_chunks)
        # whether the current gradients have overflowed; None until they are unscaled
        self._found_inf: bool | None = None
        # whether to measure the next steps; callers may set it, to the same value on all ranks
        self.collects_stats = settings.config.log_optimizer_stats
        self._recorder = Recorder(storages)
        self._update_rules = list(rules_of(storages))
        self.skipped_steps = 0
        self.is_sharded = any(item.in_buffers for item in storages)
        self.number, self.superseded = -1, False  # see megatron_eopt.wrappers.factory
        # if so, the host reads norms one step later; see Note [No waits] of gradients.py
        self.has_kernels = passes.KERNELS.runs(torch.empty(0, device="cuda"))
        self._overlap: Overlap | None = None
        if settings.config.muon_overlap_dp_comm:
            self._overlap = Overlap(
                self.chained_optimizers, self._named_chunks, self._expects_no_clipping
            )
        chunks = [chunk for chunk in model_chunks if isinstance(chunk, nn.Module)]
        self._frozen = Frozen(ModelWalk(chunk) for chunk in chunks)
        self._last_norm = math.inf
        # norms of the last step, until the host reads them
        self._unread: dict[str | None, GradNorm] = {}
        remember(model_chunks, self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise a ConfigurationTypeError, because copies could not step."""
        refuse_copy(self)

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Pass gradients to the stepped tensors, and unscale them once per step or ``zero_grad``.

        Returns:
            Whether a gradient on any rank has overflowed. The loss scale is already updated.
        """
        if self._found_inf is not None:
            return self._found_inf
        for storage in self.chained_optimizers:
            storage.collect_gradients()
        if self._scaler is None:
            return False
        found_inf = False
        # every rank takes part for every optimizer, in this order, also where it has no gradients
        for child in self.chained_optimizers:
            grads = [grad for _, grad in named_gradients(child)]
            group = child.get_grad_stats_parallel_group()
            found_inf |= unscale_(grads, self._scaler.inv_scale, group)
        self._scaler.update(found_inf)
        self._found_inf = found_inf
        return found_inf

    def memory(self) -> Memory:
        """Return this rank's memory in bytes, by use."""
        return memory_of(self.chained_optimizers, self._named_chunks)

    def stats(self) -> dict[str, float]:
        """Return the statistics of the last measured step by name; collective."""
        return self._recorder.values() | {"optimizer/skipped-steps": float(self.skipped_steps)}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self._found_inf = None
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self) -> tuple[bool, Any, float | None]:
        """Update all parameters.

        Returns:
            Whether parameters were updated, the gradient norm before clipping, and the number of
            zeros in the gradients if the configuration sets ``log_num_zeros_in_grad``. On a GPU the
            norm may be a tensor of shape (), so that the host does not wait for it.

        Raises:
            NonFiniteError: If a gradient is inf or nan and no loss scale skips the step; on every
                rank with the same names, and no weight or state has changed. If the norm is a
                tensor, the next step raises the error.
        """
        with self._recorder.recording() if self.collects_stats else nullcontext():
            overflowed = self.prepare_grads()
            # an error of the last step is raised even if this step is skipped
            self.read_late()
            self._found_inf = None
            if overflowed:
                self.skipped_steps += 1
                return False, None, None
            # the flag whether gradients have changed is summed with the norm, in one all-reduce
            norms = self.norms(None if self._overlap is None else self._overlap.join())
            late = self.has_kernels and self._may_read_late(norms)
            norm: Any = norms[None].value if late else self._read(norms)
            if self._overlap is not None:
                self._overlap.settle(norms[None], self._keeps)
            skips = not late and self.is_above_skip_threshold(norm)
            with clipped(
                self._update_rules,
                # a step that is skipped leaves gradients as they are
                0.0 if skips else self.settings.original.clip_grad,
                norms,
                # With a norm for each of several groups, the factor differs by parameter, and
                # cannot be folded. Without our kernels, passes would copy gradients to scale them.
                fuses=self.has_kernels and len(norms) == 1,
            ):
                # after clipping, as in megatron-core
                zeros = self.count_zeros() if self.settings.original.log_num_zeros_in_grad else None
                if skips:
                    self.skipped_steps += 1
                    return False, norm, zeros
                done = self.step_with_ready_grads()
            if late:
                norms[None].send()
                self._unread = norms
            return done, norm, zeros

    def read_late(self) -> None:
        """Read the norms of the last step, which changed nothing if one is not finite."""
        try:
            if self._unread:
                self._read(self._unread)
        # the device has written nothing in that step, but the host has counted it
        except NonFiniteError:
            for storage in self.chained_optimizers:
                storage.steps -= 1
            raise

    @cached_property
    def _fuses(self) -> bool:
        """Whether the rules of all ranks clip by themselves; collective in the first step.

        Ranks of other pipeline stages have other rules, but raise an error together.
        """
        return not any_rank(not all(map(fuses_grad_scale, self.chained_optimizers)))

    def _may_read_late(self, norms: Mapping[str | None, GradNorm]) -> bool:
        """Return whether a step can run before the host knows its norms."""
        reads = len(norms) > 1 or math.isfinite(self.settings.original.grad_norm_skip_threshold)
        return not reads and self._fuses

    def _expects_no_clipping(self, margin: float) -> bool:
        """Return whether gradients will probably not be clipped; the same on all ranks."""
        is_open = not (self.collects_stats or self.superseded)
        return is_open and self._keeps(self._last_norm / margin)

    def _keeps(self, norm: float) -> bool:
        """Return whether gradients of this norm are neither clipped nor skipped."""
        is_clipped = exceeds(norm, self.settings.original.clip_grad)
        return not (is_clipped or self.is_above_skip_threshold(norm))

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Step all optimizers, then gather parameters unless the forward pass does."""
        check_may_step(self)
        if self._frozen.params:
            self._frozen.warn()
        self._found_inf = None
        if self._overlap is not None:
            # gathers each bucket itself
            self._overlap.step()
            return True
        for child in self.chained_optimizers:
            # ``step_with_ready_grads`` of each would gather all buckets of the model, also those
            # with parameters that other optimizers still have to step
            child.step_in_chain()
        self.gather_params()
        return True

    def gather_params(self, *, now: bool = False) -> None:
        """Gather stepped weights to all ranks, ``now`` even if hooks would do so; collective."""
        for chunk in self.model_chunks:
            gather_buckets(chunk, now=now)
        for storage in self.chained_optimizers:
            storage.gather_params(now=now)

    @torch.no_grad()
    def quantize_and_sync_model_params_from_main_params(self) -> None:
        """Copy main weights to the model's weights on all ranks; collective.

        The trainer of megatron-core 0.20 calls this after every load.
        """
        # a gather in progress would overwrite what is now copied to the buckets
        finish_gathers(self.model_chunks)
        # all optimizers before the gather, which is that of all buckets of the model
        self._stage_model_params_from_main_params()
        self.gather_params(now=True)

    def _stage_model_params_from_main_params(self) -> None:
        """Copy main weights to this rank's part of the model's weights, without a gather."""
        for child in self.chained_optimizers:
            child._stage_model_params_from_main_params()

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """Return the norm over all ranks of the gradients that Megatron counts; collective.

        Raises:
            NonFiniteError: If the norm, or that of a group with a norm of its own, is inf or nan,
                unless the configuration skips steps with this norm; same names on every rank.
        """
        self.read_late()
        return self._read(self.norms())

    @torch.no_grad()
    def clip_grad_norm(self, clip_grad: float) -> float:
        """Clip gradients to a norm of ``clip_grad``; return the norm before; collective."""
        check_number("clip_grad", clip_grad, above=0)
        self.read_late()
        norms = self.norms()
        norm = self._read(norms)
        with clipped(self._update_rules, clip_grad, norms, fuses=False):
            pass
        return norm

    def norms(self, flag: Tensor | None = None) -> dict[str | None, GradNorm]:
        """Return the norms of all gradients, and of each group with a norm of its own; collective.

        ``flag`` is as in :class:`GradNorm`.
        """
        names = (
            None,
            # megatron-core's answer is collective the first time, so all ranks ask in the same
            # order
            *filter(self.has_grad_norm_group, _NORM_GROUPS),
        )
        parts = self.chained_optimizers
        return {name: GradNorm(parts, name, None if name else flag) for name in names}

    def _read(self, norms: dict[str | None, GradNorm]) -> float:
        """Return the norm of gradients outside norm groups; raises if any norm is not finite."""
        self._unread = {}
        self._last_norm = math.inf
        values = {name: norm.read() for name, norm in norms.items()}
        self.grad_norms_by_group: dict[str, float] = {k: v for k, v in values.items() if k}
        for norm in values.values():
            if not math.isfinite(norm) and not self.is_above_skip_threshold(norm):
                self._refuse(list(norms.values()))
        self._last_norm = values.get(None, math.inf)
        return values.get(None, 0.0)

    def is_above_skip_threshold(self, norm: float) -> bool:
        """Return whether steps with this gradient norm are skipped; False for nan."""
        return bool(norm > self.settings.original.grad_norm_skip_threshold)

    def state_dict(self) -> Any:
        """Return this rank's state; only ``sharded_state_dict`` has state of ZeRO-1 fragments."""
        names = names_in(self._named_chunks)
        states = [
            local_state.save(storage, self._main_optimizer, names)
            for storage in self.chained_optimizers
        ]
        return states[0] if len(states) == 1 else states

    def sharded_state_dict(
        self, model_sharded_state_dict: Mapping[str, Any], is_loading: bool = False, **kwargs: Any
    ) -> Any:
        """Return what ``dist_checkpointing`` saves or loads; collective.

        State is saved by parameter, so it loads at any layout. For a save, ``metadata`` says so
        afterwards, because megatron-core's own optimizers load the form that it names.

        Raises:
            ConfigurationError: If a parameter is not in ``model_sharded_state_dict``.
        """
        form, metadata = "distrib_optim_sharding_type", kwargs.get("metadata")
        if not is_loading and metadata is not None and form in metadata:
            metadata[form] = "fully_reshardable"
        if self.is_stub_optimizer:
            return {}
        return optimizer_state.requested(
            self.chained_optimizers,
            model_sharded_state_dict,
            is_loading=is_loading,
            main_optimizer=self._main_optimizer,
            model_chunks=self._named_chunks,
        )

    def load_state_dict(self, state_dict: Any) -> None:
        """Load what :meth:`sharded_state_dict` or :meth:`state_dict` returned; collective.

        Raises:
            ConfigurationError: On all ranks and before any change, if it is of other optimizers, or
                state is missing or does not fit.
        """
        self._unread = {}
        if self._overlap is not None:
            self._overlap.forget()
        finish_gathers(self.model_chunks)
        # all ranks check before any rank writes, so that a load that fails changes nothing
        raise_together(lambda: check_state_dict(state_dict))
        if optimizer_state.REQUESTS in state_dict:
            raise_together(lambda: optimizer_state.check(state_dict))
            raise_together(lambda: optimizer_state.load(self.chained_optimizers, state_dict))
        elif self.is_sharded:
            raise refuse_rank_files("state_dict", "groups alone")
        else:
            local_state.load(self.chained_optimizers, state_dict, names_in(self._named_chunks))
        optimizer_state.pack_loaded(self.chained_optimizers)
        # main weights decide: without copies, each rank has loaded its part of the model's weights
        # only
        if self.is_sharded or self.settings.half is not None:
            self.quantize_and_sync_model_params_from_main_params()

    def save_parameter_state(self, filename: str) -> None:
        """Raise a ConfigurationError, because format ``torch`` cannot hold sharded state."""
        raise refuse_rank_files("save_parameter_state", filename)

    def load_parameter_state(self, filename: str, *, update_legacy_format: bool = False) -> None:
        """Raise a ConfigurationError, because format ``torch`` cannot hold sharded state."""
        raise refuse_rank_files("load_parameter_state", filename)

    def _refuse(self, norms: Sequence[GradNorm]) -> None:
        self.skipped_steps += 1
        if self._overlap is not None:
            self._overlap.forget()
        names = non_finite(names_in(self._named_chunks), norms)
        # all gradients can be finite while the sum of their squares overflows float32
        raise NonFiniteError("gradients" if names else "norm", sorted(names) or ["all gradients"])
