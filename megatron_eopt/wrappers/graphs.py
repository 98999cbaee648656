"""Steps that a CUDA graph captures once and replays.

Note [Captured steps]
    With ``optimizer_cuda_graph``, megatron-core's trainer puts a wrapper in the place of ``step``.
    It captures one call, and then replays what this launched, without any Python. So a step has
    three parts. The host prepares: it reads the norm of the last step, and writes rates and decays
    to the device. Then the device steps, from tensors alone. Then the host counts the step. What
    takes the place of ``step`` gets the part of the device only, and the other two run around it.

    A replay reads and writes the memory of its capture. State that was replaced since, as loads do,
    is copied there. If another tensor has moved, or a setting has changed that kernels do not read
    from the device, the step raises an error.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.base import gpu
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.optimizers.live_numbers import LiveNumbers
from megatron_eopt.optimizers.update_rule import check_may_step
from megatron_eopt.wrappers.gradients import GradNorm, clipped

FLAG = "optimizer_cuda_graph"

_CAPTURED = "captures steps of Muon, NorMuon and Adam, but not of"

type ResultT = tuple[bool, Any, float | None]
type StepT = Callable[[], ResultT]


class CapturedSteps:
    """Steps an ``OptimizerChain`` as described in Note [Captured steps].

    Raises:
        ConfigurationError: If an optimizer of the chain cannot be captured.
    """

    def __init__(self, chain: Any) -> None:
        self._chain = chain
        self._live = LiveNumbers()
        self._is_inside = False  # whether a step is between both parts of the host
        self._norm: GradNorm | None = None  # of the last step that Python ran
        self._captured: Any = None  # what the graph relies on, once there is one
        # the optimizers' state that it reads and writes, and main weight and kind of each tensor
        self._state: list[tuple[Any, Tensor, str, Tensor]] = []
        for storage in chain.chained_optimizers:
            if not storage.is_stub_optimizer and not storage.update_rules:
                raise _refusal(f"{_CAPTURED} {type(storage.optimizer).__name__}")
            for update_rule in storage.update_rules:
                if not update_rule.can_be_captured(storage.groups_of(update_rule)):
                    raise _refusal(f"{_CAPTURED} {update_rule.name}")
                update_rule.read_live(self._live)
            if getattr(storage, "is_quantized", False):
                raise _refusal("needs fp8_param_gather=False and fp4_param_gather=False")
            if any(getattr(item.param, "main_grad", None) is None for item in _stored(storage)):
                raise _refusal("needs gradients in the buffers of Megatron's DDP")

    def step(self) -> ResultT:
        """Run a whole step, or the device's part of it where a replacement of ``step`` calls."""
        if self._is_inside:
            return self._on_device()
        if torch.cuda.is_current_stream_capturing():
            rule = "cannot be captured by itself, since a replay would leave out the host's part"
            hint = "Assign what captures and replays it to optimizer.step, and call that"
            raise ConfigurationError("optimizer.step", "a CUDA graph", rule, hint)
        return self._run(self._on_device)

    def around(self, replacement: StepT) -> StepT:
        """Return what calls a replacement of ``step`` between both parts of the host."""
        self._captured, self._state = None, []
        return partial(self._run, replacement, replays=True)

    @torch.no_grad()
    def _run(self, function: StepT, *, replays: bool = False) -> ResultT:
        self._prepare()
        if replays:
            self._return_state()
        if replays and self._captured not in (None, now := self._relied_on()):
            parts = ("tensors", "parameter groups", "settings of optimizers")
            pairs = zip(parts, self._captured, now, strict=True)
            changed = [part for part, before, after in pairs if before != after]
            rule = f"{' and '.join(changed)} have changed since the CUDA graph was captured"
            hint = "Load and change them before the first step, or build the optimizer again"
            raise ConfigurationError("optimizer.step", "a CUDA graph", rule, hint)
        done = self._counts()
        self._is_inside = True
        try:
            result = function()
        finally:
            self._is_inside = False
        if self._counts() == done:
            for storage in self._chain.chained_optimizers:
                storage.steps += 1
        assert self._norm is not None
        self._norm.send()
        self._chain.keep_unread({None: self._norm})
        return result

    def _prepare(self) -> None:
        """Do what the host does before a step."""
        chain = self._chain
        chain.read_late()
        check_may_step(chain)
        chain.warn_of_unfrozen()
        settings = chain.settings
        for name, is_on in (
            ("log_num_zeros_in_grad", settings.log_num_zeros_in_grad),
            ("grad_norm_skip_threshold", math.isfinite(settings.grad_norm_skip_threshold)),
            ("log_optimizer_stats", chain.collects_stats),
            ("log_optimizer_memory", settings.config.log_optimizer_memory),
        ):
            if is_on:
                rule = f"needs numbers on the host, which {FLAG} does not read in a step"
                raise ConfigurationError(name, is_on, rule, f"Leave it out, or {FLAG}")
        self._live.refresh()

    def _on_device(self) -> ResultT:
        """Launch a step; read nothing on the host."""
        chain = self._chain
        is_capturing = torch.cuda.is_current_stream_capturing()
        if is_capturing and self._norm is None:
            rule = "must be at least 1, since the first step allocates what remains"
            raise ConfigurationError("cuda_graph_warmup_steps", 0, rule, "Set it to 1")
        chain.prepare_grads()
        norms: dict[str | None, GradNorm] = chain.norms()
        if len(norms) > 1:
            others = sorted(name for name in norms if name)
            raise _refusal(f"clips by one norm, but {others} have norms of their own")
        self._norm = norms[None]
        device = self._norm.value.device
        limit = self._live.of("clip", chain.settings, device, _limit).view(())
        with clipped(chain.chained_optimizers, limit, norms, fold=True):
            done = chain.step_with_ready_grads()
        if is_capturing:
            self._captured = self._relied_on()
            self._state = [
                found for storage in chain.chained_optimizers for found in _state_of(storage)
            ]
        else:
            gpu.staging.reserve()
        return done, self._norm.value, None

    def _return_state(self) -> None:
        """Copy state that was replaced to where the graph reads it."""
        for optimizer, main, kind, kept in self._state:
            found = optimizer.state[main].get(kind)
            if isinstance(found, Tensor) and found is not kept and _is_like(found, kept):
                optimizer.state[main][kind] = kept.copy_(found)

    def _counts(self) -> list[int]:
        return [storage.steps for storage in self._chain.chained_optimizers]

    def _relied_on(self) -> tuple[Any, ...]:
        """Return what a graph cannot follow: addresses, parameter groups and settings."""
        storages = self._chain.chained_optimizers
        tensors = (tensor for storage in storages for tensor in _tensors_of(storage))
        settings = [
            update_rule.captured(storage.groups_of(update_rule))
            for storage in storages
            for update_rule in storage.update_rules
        ]
        groups = [id(group) for group in self._chain.param_groups]
        return [tensor.data_ptr() for tensor in tensors], groups, settings


def _limit(settings: Any) -> tuple[float]:
    return (settings.clip_grad or math.inf,)


def _stored(storage: Any) -> Any:
    return () if storage.is_stub_optimizer else storage.main_shards()


def _tensors_of(storage: Any) -> Iterator[Tensor]:
    for item in _stored(storage):
        yield from (item.param, item.main, item.param.main_grad)
    yield from (value for *_, value in _state_of(storage))
    for update_rule in storage.update_rules:
        yield from update_rule.buffers()


def _state_of(storage: Any) -> Iterator[tuple[Any, Tensor, str, Tensor]]:
    for item in _stored(storage):
        for kind, value in storage.optimizer.state[item.main].items():
            if isinstance(value, Tensor):
                yield storage.optimizer, item.main, kind, value


def _is_like(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _refusal(rule: str) -> ConfigurationError:
    return ConfigurationError(FLAG, True, rule, f"Set {FLAG}=False")
