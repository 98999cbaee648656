"""The optimizer of your own training loop, whose state dicts load at any layout.

Parameter groups and state hold DTensors, or plain tensors where a model is not sharded.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.base.agreement import raise_together
from megatron_eopt.base.names import STEP
from megatron_eopt.math.precision import matmul_precision
from megatron_eopt.optimizers.assigned_rule import AssignedRule
from megatron_eopt.optimizers.rates import RatesApart
from megatron_eopt.optimizers.recorder import Recorder
from megatron_eopt.optimizers.sharded_optimizer import Served, ShardedOptimizer
from megatron_eopt.optimizers.update_rule import ParamGroup, check_may_step, set_step
from megatron_eopt.optimizers.whole_matrix_rule import WholeMatrixRule
from megatron_eopt.routing.frozen import Frozen
from megatron_eopt.state.groups import take_settings
from megatron_eopt.state.rule import identity_of
from megatron_eopt.state.state_dicts import (
    Loads,
    SavedStateDict,
    misfit_of,
    named,
    write_state,
)
from megatron_eopt.state.whole_matrix_state import WholeMatrixState
from megatron_eopt.storage.local_tensors import (
    local_of,
    part_of,
    parts_of,
)
from megatron_eopt.storage.shard import ParamShard
from megatron_eopt.storage.uneven import is_uneven, uneven_kind


class DTensorOptimizer(ShardedOptimizer):
    """Updates the parameters of a sharded model; see :func:`megatron_eopt.fsdp2.build_optimizer`.

    ``momentum_buffer`` and similar state are float32 DTensors with the parameter's placements.
    Statistics of whole matrices are plain tensors, the same on all ranks. State of whole matrices
    (SOAP) stays on owner ranks; only :meth:`state_dict` has it, as DTensors sharded by rows.

    The arguments are those of the base class.
    """

    lends = True
    collects_stats = False  # whether to measure the next steps; the same on all ranks
    steps = 0  # number of steps done
    frozen: Frozen | None = None  # notices what is unfrozen later, in your own loop

    def __init__(
        self, groups: Sequence[ParamGroup], served: Served, params: Iterable[Tensor]
    ) -> None:
        self._recorder = Recorder([self])
        self._rates = RatesApart(groups)
        # shapes of the state that owners keep, by parameter and name; None for a number
        self._shapes: dict[Tensor, dict[str, tuple[int, ...] | None]] = {}
        super().__init__(groups, served, params)
        self.init_state()
        # keys of state that update rules make; all others are the user's
        self._kinds = {name: frozenset(self.state[p]) for p, name in self.names.items()}
        raise_together(self.refuse_faults)
        self._owned: dict[AssignedRule, WholeMatrixState] = {
            item: WholeMatrixState(item.rule, local_of(item.rule.params[0]).device)
            for item in self.assigned
            if isinstance(item.rule, WholeMatrixRule)
        }
        for item, owned in self._owned.items():
            with item.groups_and_state() as (groups_of, state):
                entries = owned.entries(groups_of, state)
            self._stand_for(item, [[entry.name for entry in its] for its in entries])

    def _step(self) -> None:
        check_may_step(self)
        if self.frozen is not None:
            self.frozen.warn()
        self._rates.warn(self.param_groups)
        recording = self._recorder.recording() if self.collects_stats else nullcontext()
        with recording, matmul_precision():
            super()._step()
            self.steps += 1

    def stats(self) -> dict[str, float]:
        """Return the statistics of the last measured step by name; collective."""
        return self._recorder.values()

    def share_of(self, shard: ParamShard) -> float:
        """Return how much a shard counts in sums over all ranks, so that each element counts once.

        Each of a mesh's replicas counts by its share.
        """
        if isinstance(shard.main, DTensor):
            return parts_of(shard.main) / shard.main.device_mesh.size()
        return 1 / dist.get_world_size() if dist.is_initialized() else 1.0

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return groups and state; collective, so all ranks must call it together.

        Raises:
            ConfigurationError: On all ranks, if an owner's state cannot be restored.
        """
        self._agree_on_counts()
        published: dict[AssignedRule, list[dict[str, Any]]] = {}
        for item, owned in self._owned.items():
            with item.groups_and_state() as (groups, state):
                published[item] = owned.publish(groups, state)
        for item, found in published.items():
            for param, found_of in zip(item.rule.params, found, strict=True):
                self.state[param].update(found_of)
        result = super().state_dict()
        for item, found in published.items():
            # only owners keep the values, and the result keeps the dictionaries replaced here
            self._stand_for(item, found)
        return named(result, self.names_of_groups)

    def _agree_on_counts(self) -> None:
        """Let ranks with empty shards count steps as the others do.

        Some of them do not see whether a parameter had a gradient in a step.
        """
        by_mesh: dict[Any, list[Tensor]] = {}
        for param in self.names:
            kind = uneven_kind(param)
            if kind is None or not kind.hides_gradients:
                continue
            # None stands for the counts of whole matrices, which only their owners have
            if self.state[param].get(STEP) is not None:
                by_mesh.setdefault(param.device_mesh, []).append(param)  # type: ignore[attr-defined]
        for mesh, params in by_mesh.items():
            found = [int(self.state[p][STEP]) if local_of(p).numel() else 0 for p in params]
            counts = torch.tensor(found, device=mesh.device_type)
            for group in mesh.get_all_groups():
                dist.all_reduce(counts, dist.ReduceOp.MAX, group=group)
            for param, count in zip(params, counts.tolist(), strict=True):
                set_step(self.state[param], count)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and state; collective.

        A group takes the settings of the group with its identity. State of another optimizer starts
        fresh.

        Raises:
            ConfigurationError: On all ranks and before any change, if a parameter's state is
                missing, does not fit, or is of an unknown optimizer.
        """
        state_dict = dict(state_dict) if isinstance(state_dict, Mapping) else state_dict
        # torch's `load_state_dict` would run the hooks, but also convert state to the parameter's
        # dtype
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        # groups may have been changed since the build, as before a step
        raise_together(self._follow_groups)
        self.allocate_for_load()
        twins, loads = raise_together(lambda: self.checked(state_dict))
        for group, saved in zip(self.param_groups, twins, strict=True):
            if saved is not None:
                take_settings(group, saved)
        self.load_checked(loads)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def allocate_for_load(self) -> None:
        """Create all state that can be loaded, before :meth:`checked`; collective."""
        for item in self.assigned:
            update_rule, owned = item.rule, self._owned.get(item)
            with item.groups_and_state() as (groups, state):
                # Rounded momentum has another form in state dicts. `load_checked` creates that one,
                # once no check can fail any more.
                if getattr(update_rule, "rounding", None) is None:
                    update_rule.allocate_for_load(groups, state)
                entries = [] if owned is None else owned.entries(groups, state)
            if owned is not None:
                self._stand_for(item, [[entry.name for entry in its] for its in entries])
            for param, its in zip(update_rule.params, entries, strict=False):
                self._shapes[param] = {entry.name: entry.shape for entry in its}

    @property
    def names_of_groups(self) -> list[list[str]]:
        """The names of each group's parameters."""
        return [[self.names[param] for param in group["params"]] for group in self.param_groups]

    def checked(
        self, state_dict: Any, saved: SavedStateDict | None = None, found: bool | None = None
    ) -> tuple[list[Mapping[str, Any] | None], Loads]:
        """Return what a state dict would load; call :meth:`allocate_for_load` before.

        Args:
            state_dict: The state dict.
            saved: The same by names, if the caller has it.
            found: Whether it has any parameter of other optimizers, too, if the caller knows.

        Returns:
            The saved group that each group continues from, and the values of each parameter.

        Raises:
            ConfigurationError: If state is missing or does not fit.
        """
        groups, names = self.param_groups, self.names_of_groups
        saved = saved or SavedStateDict.of(state_dict, groups, names)
        members = {identity_of(g): its for g, its in zip(groups, names, strict=True)}
        kinds = {
            param: (self._kinds[self.names[param]] & self.state[param].keys())
            | self._shapes.get(param, {}).keys()
            for group in groups
            for param in group["params"]
        }
        loads = saved.loads(
            groups,
            names,
            self.update_rules,
            kinds,
            self.state,
            self._misfit,
            has_stepped=self.steps > 0,
            found=found,
        )
        return saved.twins(groups, members), loads

    def load_checked(self, loads: Loads) -> None:
        """Load what :meth:`checked` returned; collective."""
        for item in self.assigned:
            update_rule, owned = item.rule, self._owned.get(item)
            params = update_rule.params
            for param in params if owned is None else ():
                if loads.get(param, {}) is None:
                    # torch's distributed checkpoints may have been loaded in place
                    own = self._kinds[self.names[param]]
                    self.state[param] = {k: v for k, v in self.state[param].items() if k not in own}
            for number, param in enumerate(params):
                if owned is not None and loads.get(param, {}) is None:
                    # an earlier load may have filled it
                    update_rule.forget_state(number)
            with item.groups_and_state() as (groups, state):
                update_rule.allocate_for_load(groups, state)
                if owned is not None:
                    owned.load(groups, state, [loads.get(param) or {} for param in params])
                    # the groups of a checkpoint may have set counts of state that starts fresh
                    for count in owned.counts():
                        if loads.get(params[count.shard], {}) is None:
                            count.replace(0)
            for param in params:
                values = loads.get(param) or {}
                if owned is not None:
                    kept = self._shapes.get(param, {})
                    values = {key: v for key, v in values.items() if key not in kept}
                write_state(self.state[param], values, partial(_copy, param))
        self.pack()

    def _misfit(self, param: Tensor, key: str, value: Any) -> str | None:
        """Return why a saved value cannot be loaded; None if it can."""
        own, shapes = self.state[param][key], self._shapes.get(param, {})
        if key in shapes:
            shape = tuple(value.shape) if isinstance(value, Tensor) and value.dim() else None
            return None if shape == shapes[key] else f"of shape {shape} must have {shapes[key]}"
        if not (isinstance(own, Tensor) and isinstance(value, Tensor)):
            return misfit_of(value, own, key)
        if own.is_floating_point() > value.is_floating_point() or value.layout != torch.strided:
            return f"of {value.dtype}, {value.layout}, must be a dense tensor of real numbers"
        if own.shape != value.shape:
            return f"of shape {tuple(value.shape)} must have shape {tuple(own.shape)}"
        is_cut = isinstance(value, DTensor) and (is_uneven(param) or _are_placed_alike(own, value))
        if is_cut and local_of(own).shape != local_of(value).shape:
            return "is sharded otherwise"
        return None

    def _stand_for(self, item: AssignedRule, kinds: Sequence[Iterable[str]]) -> None:
        """Set keys without values for state that owners keep, because torch reads the keys."""
        params, names = item.rule.params, [frozenset(its) for its in kinds]
        before = item.stands or [frozenset()] * len(params)
        for param, old, new in zip(params, before, names, strict=True):
            own = {key: value for key, value in self.state[param].items() if key not in old | new}
            self.state[param] = own | dict.fromkeys(new)
        item.stands = names


def _copy(param: Tensor, mine: Tensor, value: Any) -> None:
    """Copy a saved value into this rank's part of a tensor of a parameter's state."""
    if not _are_placed_alike(mine, value):
        # every rank has the whole tensor, and takes its own part
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        value = part_of(param if mine.shape == param.shape else mine, whole)
    local_of(mine).copy_(local_of(value))


def _are_placed_alike(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are sharded over the same ranks in the same way."""
    if not (isinstance(one, DTensor) and isinstance(other, DTensor)):
        return isinstance(one, DTensor) == isinstance(other, DTensor)
    return one.placements == other.placements and one.device_mesh == other.device_mesh
