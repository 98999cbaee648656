"""Update rules of optimizers that update each element, or each tensor they get, independently."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.base.errors import check_cautious
from megatron_eopt.base.names import (
    CAUTIOUS_DECAY,
    ELEMENT_WISE_STATE,
    FIRST_MOMENT,
    MOMENTUM,
    STEP,
)
from megatron_eopt.base.nested_state import by_rows, leaves
from megatron_eopt.math.passes import adam_
from megatron_eopt.optimizers.host_memory import HostMemory
from megatron_eopt.optimizers.plain_optimizer import PlainOptimizer
from megatron_eopt.optimizers.update_rule import (
    InitState,
    ParamGroup,
    State,
    UnshardedState,
    UpdateRule,
    bound,
    dry_step,
    loss_of,
    set_step,
    step_inside,
)
from megatron_eopt.storage.model_copies import model_copies_of
from megatron_eopt.storage.shard import ParamShard

# packages whose fused Adam has one step count for each group, not one for each parameter
_COUNT_IN_GROUPS = ("transformer_engine", "apex")

_MAXIMA = "max_exp_avg_sq"


class _InOnePass(PlainOptimizer, torch.optim.Adam):
    """Works as torch's Adam with ``fused=True``; can scale gradients, see Note [Gradient scale].

    With ``cautious_weight_decay``, weights decay as Note [Cautious weight decay] of
    :mod:`megatron_eopt.math.passes` says.
    """

    grad_scale: Tensor | None = None

    def __init__(
        self, params: ParamsT, *args: Any, cautious_weight_decay: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(params, *args, **kwargs)
        if cautious_weight_decay:
            check_cautious(CAUTIOUS_DECAY, decoupled=self.defaults["decoupled_weight_decay"])
        self.cautious_weight_decay = cautious_weight_decay

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters; return the closure's loss."""
        loss = loss_of(closure)
        for group in self.param_groups:
            if group["amsgrad"]:
                _add_maxima(self)
            # in the order in which torch's `_init_group` fills them: parameters, gradients, both
            # moments, maxima, step counts
            by_kind: list[list[Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *by_kind)  # type: ignore[no-untyped-call]
            params, grads, firsts, seconds, largest, steps = by_kind
            lists = (params, firsts, seconds, model_copies_of(params), grads, steps)
            cautious = self.cautious_weight_decay
            adam_(lists, largest, self.grad_scale, group, cautious=cautious)
        return loss


class Adam(_InOnePass):
    """Adam that adds weight decay to gradients (L2)."""


class AdamW(_InOnePass, torch.optim.AdamW):
    """Adam with decoupled weight decay."""


class ElementWiseRule(UpdateRule):
    """Runs Adam, SGD, Lion and similar optimizers on any shards of the parameters.

    ``init_state_fn(optimizer, config)`` creates their state; it may be None.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        init_state_fn: InitState,
        config: Any,
        shards: Sequence[ParamShard],
    ) -> None:
        # equal on all ranks: one without matrices has this rule in place of Muon's
        super().__init__(optimizer_name(optimizer), shards)
        self._optimizer: Any = optimizer
        self.one_pass = optimizer if isinstance(optimizer, _InOnePass) else None
        self.fuses_grad_scale = self.fits_beside = self.one_pass is not None
        self._init_state_fn = init_state_fn
        self._config = config
        if isinstance(optimizer, torch.optim.Adam) and self.one_pass is None:
            # a hook, because megatron-core's wrappers step it, too
            optimizer.register_step_pre_hook(_add_maxima)

    def init(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Create the state of every tensor, each with its own step counter."""
        if not self.shards:
            # Muon's own method would wait for ranks that have parameters, and call another rule
            return
        # a torch optimizer steps its own groups and state; here it gets the storage's
        with bound(self._optimizer, groups, state) as optimizer:
            if self._init_state_fn is not None:
                self._init_state_fn(optimizer, self._config)
            for group in optimizer.param_groups:
                for param in group["params"]:
                    _complete(optimizer, group, optimizer.state[param], param)

    def allocate_for_load(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Create all state that is about to be loaded."""
        self.init(groups, state)
        with bound(self._optimizer, groups, state) as optimizer:
            dry_step(optimizer)

    def counting(self, groups: Sequence[ParamGroup], state: State) -> Iterator[dict[str, Any]]:
        """Yield the dictionaries (states or groups) that hold step counters."""
        yield from (group for group in groups if group["params"] and STEP in group)
        yield from super().counting(groups, state)

    def set_steps(self, groups: Sequence[ParamGroup], state: State, steps: int) -> None:
        """Set the step counters where the optimizer keeps them: in states or in groups."""
        for group in groups:
            if type(self._optimizer).__module__.startswith(_COUNT_IN_GROUPS):
                # there is none before the first step
                group.setdefault(STEP, steps)
            for values in (group, *(state[param] for param in group["params"])):
                set_step(values, steps)

    def step(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Update the parameters; off-loaded ones chunk by chunk."""
        if not self.shards:
            return
        if self.host is not None:
            self._step_in_chunks(self.host, groups, state)
        else:
            self._step(groups, state)

    def _step(self, groups: Sequence[ParamGroup], state: State) -> None:
        params = [param for group in groups for param in group["params"]]
        if not all(map(state.__getitem__, params)):
            # a user may have cleared it
            self.init(groups, state)
        with bound(self._optimizer, groups, state) as optimizer:
            # several update rules may share one optimizer
            self.scale_gradients(self.grad_scale)
            step_inside(optimizer)

    def _step_in_chunks(self, host: HostMemory, groups: Sequence[ParamGroup], state: State) -> None:
        # groups may count steps, so every chunk starts from the same groups
        settings = [dict(group) for group in groups]

        def step(chunk: list[Tensor]) -> None:
            members = set(chunk)
            parts = [
                {**own, "params": [p for p in own["params"] if p in members]} for own in settings
            ]
            self._step(parts, state)
            for group, part in zip(groups, parts, strict=True):
                if part["params"]:
                    group.update({**part, "params": group["params"]})

        host.step_in_chunks((param for group in groups for param in group["params"]), step, state)


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Return what messages and saved groups call an optimizer, equal on all ranks."""
    name: str = getattr(optimizer, "called", type(optimizer).__name__)
    return name


class LocalShardRule(ElementWiseRule):
    """Runs any other optimizer on whole parameters, or on each tensor-parallel slab separately."""

    def is_sharded_like_param(self, kind: str, value: Any, param: Tensor) -> bool:
        """Whether a state value is known to have an element for each of the tensor's."""
        return kind in ELEMENT_WISE_STATE and super().is_sharded_like_param(kind, value, param)

    def step(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Update the parameters."""
        super().step(groups, state)
        for _, param, _ in self.numbered(groups):
            by_rows(state[param])

    def unsharded_state(
        self, groups: Sequence[ParamGroup], state: State
    ) -> Iterator[UnshardedState]:
        """Yield all other state, whose shape only the optimizer understands."""
        for _, param, number in self.numbered(groups):
            ranks = self.shards[number].ranks
            slab = (ranks.rank, ranks.size) if ranks.size > 1 else None
            for kind, value in state[param].items():
                if kind != STEP and not self.is_sharded_like_param(kind, value, param):
                    for path, leaf in leaves(value, (kind,)):
                        yield UnshardedState(
                            number, 0, path, leaf, slab=slab, container=state[param]
                        )


def _add_maxima(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Add the maxima of AMSGrad to states that were created before it was turned on."""
    for group in optimizer.param_groups:
        for param in group["params"] if group["amsgrad"] else ():
            state = optimizer.state.get(param)
            if state and _MAXIMA not in state:
                state[_MAXIMA] = torch.zeros_like(param)


def _complete(
    optimizer: torch.optim.Optimizer, group: ParamGroup, state: dict[str, Any], param: Tensor
) -> None:
    """Add what torch's own optimizers expect in a state that is not empty."""
    names: tuple[str, ...] = ()
    if isinstance(optimizer, torch.optim.Adam):
        names = (FIRST_MOMENT, "exp_avg_sq", *((_MAXIMA,) if group["amsgrad"] else ()))
        device = param.device if group["capturable"] or group["fused"] else "cpu"
        # a separate tensor for each state, because torch counts in place
        count = state.setdefault(STEP, torch.zeros((), dtype=torch.float32, device=device))
        state[STEP] = torch.as_tensor(count, device=device)
    elif isinstance(optimizer, torch.optim.SGD) and group["momentum"]:
        names = (MOMENTUM,)
    for name in names:
        state.setdefault(name, torch.zeros_like(param))
