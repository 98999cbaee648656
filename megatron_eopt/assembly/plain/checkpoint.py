"""Checkpoints of optimizers that hold whole parameters, replicated over data-parallel ranks.

megatron-core's own wrappers save state of the parameter's shape alone, and the step only if the
first rank has a parameter; see Note [Keys of plain checkpoints] for the other state.
"""

import copy
import itertools
import logging
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
)
from megatron.core.utils import log_single_rank
from torch import Tensor, distributed

from megatron_eopt.assembly.plain.groups import (
    STEPS,
    adapted,
    match_groups,
    resumed_settings,
    twin_or_none,
)
from megatron_eopt.assembly.plain.requests import PlainRequests
from megatron_eopt.assembly.plain.state import StoredState, restore
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import STATE_PREFIX, STEP
from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon
from megatron_eopt.optimizers.engines import tensor_parallel_cut
from megatron_eopt.storage.checkpoint.requests import REQUESTS
from megatron_eopt.storage.checkpoint.sources import MAIN, MAIN_OF_PLAIN
from megatron_eopt.storage.main_copies import main_copies

__all__ = ["MAINS", "PlainCheckpoint"]

logger = logging.getLogger(__name__)

MAINS = "fp32_from_fp16_params"
"""Key of the main weights in the state of megatron-core's wrapper for 16-bit parameters."""

_MAIN_KEY = f"{STATE_PREFIX}{MAIN_OF_PLAIN}"
_WRAPPERS = ("grad_scaler", MAINS)
_TP_SIZES = "tensor_parallel_sizes"


class PlainCheckpoint:
    """Saves and loads state of any shape; stands before megatron-core's wrapper in its bases."""

    optimizer: Any
    config: Any
    init_state_fn: Any
    is_stub_optimizer: bool
    tp_group: Any = None
    expert_tp_group: Any = None
    float16_groups: Sequence[Sequence[Tensor]] = ()
    fp32_from_float16_groups: Sequence[Sequence[Tensor]] = ()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the whole state of this rank: tensors, numbers, lists and dictionaries alone."""
        if self.is_stub_optimizer:
            return {}
        self._make_state()
        state: dict[str, Any] = super().state_dict(*args, **kwargs)  # type: ignore[misc]
        if MAINS in state:
            # aliases without the attributes, which may be objects of our classes
            state[MAINS] = [[main.detach() for main in group] for group in state[MAINS]]
        inner = state.get("optimizer", state)
        main_optimizer = self.config.optimizer.removeprefix("dist_")
        for group in inner["param_groups"]:
            # megatron-core names the other optimizers alone, and matches groups by it
            if group.get("optimizer") == main_optimizer:
                del group["optimizer"]
        return state

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Mapping[str, Any],
        is_loading: bool = False,
        metadata: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return what ``dist_checkpointing`` saves or loads; collective over the world on saving.

        Args:
            model_sharded_state_dict: The model's, with its parameters themselves as data.
            is_loading: Whether to load.
            metadata: Not needed.

        Raises:
            ConfigurationError: If a parameter is not in the model's state.
        """
        if self.is_stub_optimizer:
            return {}
        if not is_loading and isinstance(self.optimizer, TensorParallelAdaptiveMuon):
            self.optimizer.complete_statistics()
        state_dict = self.state_dict()
        stored = self._stored(model_sharded_state_dict)
        if MAINS in state_dict:
            state_dict[MAINS] = self._sharded_main(stored)
        inner = state_dict.get("optimizer", state_dict)
        states = {number: self.optimizer.state[item.main] for number, item in stored.items()}
        inner["state"] = {number: item.entries(states[number]) for number, item in stored.items()}
        inner["param_groups"] = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in inner["param_groups"]
        ]
        if is_loading:
            requests = PlainRequests(
                inner["state"], state_dict.get(MAINS, {}), self._main_places(), stored
            )
            state_dict[REQUESTS] = LocalNonpersistentObject(requests)
        elif (step := _agreed_step(states.values())) is not None:
            inner["state"]["common_step"] = step
        if any(item.has_slab_state(states[number]) for number, item in stored.items()):
            inner[_TP_SIZES] = self._tp_sizes()
        return state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` or ``dist_checkpointing`` returned; it is not changed.

        Groups match by identity and keep the present run's schedule.

        Raises:
            ConfigurationError: If it has other groups, or lacks state that is not named in the
                configuration's ``checkpoint_fresh_state``.
        """
        if self.is_stub_optimizer:
            return
        self._make_state()
        inner = dict(state_dict.get("optimizer", state_dict))
        fresh = adapted(state_dict)
        saved, present = inner.get("param_groups", ()), self.optimizer.param_groups
        numbers = _numbers(present)
        if fresh is None:
            twins = match_groups(saved, present)
            self._check_tp_sizes(inner)
            pairs: list[Any] = [(saved[twin], saved[twin].get("params")) for twin in twins]
        else:
            twins = list(range(len(present)))
            pairs = [(twin_or_none(group, saved), None) for group in present]
        groups = [
            {**resumed_settings(its, group), "params": own}
            for (its, _), group, own in zip(pairs, present, numbers, strict=True)
        ]
        theirs = [
            own if params is None else params
            for (_, params), own in zip(pairs, numbers, strict=True)
        ]
        state = self._loaded_state(inner, groups, theirs, fresh)
        result: dict[str, Any] = {"state": state, "param_groups": groups}
        if "optimizer" in state_dict or self.fp32_from_float16_groups:
            rest = {key: value for key, value in state_dict.items() if key in _WRAPPERS}
            result = {**rest, "optimizer": result}
            result[MAINS] = self._loaded_main(state_dict.get(MAINS, {}), twins, fresh)
        super().load_state_dict(result)  # type: ignore[misc]

    @staticmethod
    def _filter_and_reorder_param_groups(
        current_groups: Sequence[Any], state_dict_groups: Sequence[Any]
    ) -> Sequence[Any]:
        """Leave the groups as they are: :meth:`load_state_dict` has matched them."""
        return state_dict_groups

    def _make_state(self) -> None:
        if self.init_state_fn is not None:
            self.init_state_fn(self.optimizer, self.config)

    def _model_params(self) -> list[list[Tensor]]:
        """Return the model's parameters in the order of the optimizer's, group by group."""
        groups: list[list[Tensor]] = [group["params"] for group in self.optimizer.param_groups]
        model_of = {main: model for model, main in main_copies(self)}
        return [[model_of.get(param, param) for param in group] for group in groups]

    def _stored(self, model_sharded_state_dict: Mapping[str, Any]) -> dict[int, StoredState]:
        """Return how each parameter's state is written, by torch's number of the parameter."""
        models = self._model_params()
        # of a DTensor the entry holds this tensor; to_local() returns another one
        flat = [getattr(param, "_local_tensor", param) for group in models for param in group]
        shards = get_param_id_to_sharded_param_map(dict(model_sharded_state_dict), flat)
        stored: dict[int, StoredState] = {}
        for group, params in zip(self.optimizer.param_groups, models, strict=True):
            for main, model in zip(group["params"], params, strict=True):
                number = len(stored)
                if number not in shards:
                    raise _not_in_model(model)
                rank, size = self._slab(model)
                stored[number] = StoredState(self.optimizer, main, shards[number], rank, size)
        return stored

    def _slab(self, model: Tensor) -> tuple[int, int]:
        groups = SimpleNamespace(tp=self.tp_group, expt_tp=self.expert_tp_group)
        cut = tensor_parallel_cut(model, groups, "blockwise")[1]
        if cut is None:
            return 0, 1
        return distributed.get_rank(cut), distributed.get_world_size(cut)

    def _sharded_main(self, stored: Mapping[int, StoredState]) -> dict[int, dict[int, Any]]:
        """Return checkpoint entries of the main weights of the 16-bit parameters.

        By numbers of groups and parameters: ``dist_checkpointing`` cannot load an empty list, which
        a group without 16-bit parameters would have.
        """
        shards = {item.main: item.shard for item in stored.values()}
        return {
            number: {
                place: make_sharded_optimizer_tensor(shards[main], main.detach(), _MAIN_KEY)
                for place, main in enumerate(group)
            }
            for number, group in enumerate(self.fp32_from_float16_groups)
            if group
        }

    def _loaded_state(
        self,
        inner: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]],
        theirs: Sequence[Sequence[int]],
        may_lack: Mapping[int, Collection[str]] | None,
    ) -> dict[int, dict[str, Any]]:
        """Return the state by torch's numbers, as the optimizer keeps it.

        Args:
            inner: A torch optimizer's state dict.
            groups: What the groups will be.
            theirs: The numbers in ``inner`` of each group's parameters.
            may_lack: Kinds of state that each number may lack besides those of the configuration.
        """
        states = inner.get("state", {})
        named = set(getattr(self.config, "checkpoint_fresh_state", ()))
        result, missing, started = {}, [], set()
        for present, group, numbers in zip(
            self.optimizer.param_groups, groups, theirs, strict=True
        ):
            if len(numbers) != len(group["params"]):
                raise _other_count(group, len(numbers))
            common = states.get("common_step", group.get(STEP, inner.get(STEPS)))
            for param, number, its in zip(present["params"], group["params"], numbers, strict=True):
                template = self.optimizer.state[param]
                values = dict(states.get(its, {}))
                if common is not None:
                    # one for each: torch counts in place
                    values.setdefault(STEP, copy.deepcopy(common))
                fresh = named | set((may_lack or {}).get(number, ()))
                lacking = template.keys() - values.keys()
                started |= lacking & named
                where = f"parameter {number} of shape {tuple(param.shape)}"
                missing += [f"{where}: {name}" for name in sorted(lacking - fresh)]
                result[number] = {
                    name: _loaded(name, mine, values, where) for name, mine in template.items()
                }
        if missing:
            raise _missing(missing)
        if started and may_lack is None:
            line = f"not in the checkpoint, starts anew: {', '.join(sorted(started))}"
            log_single_rank(logger, logging.WARNING, line)
        return result

    def _tp_sizes(self) -> dict[str, int]:
        groups = {"dense": self.tp_group, "experts": self.expert_tp_group}
        return {
            name: distributed.get_world_size(group)
            for name, group in groups.items()
            if group is not None
        }

    def _check_tp_sizes(self, inner: Mapping[str, Any]) -> None:
        saved = inner.get(_TP_SIZES)
        if saved is not None and saved != self._tp_sizes():
            raise ConfigurationError(
                "tensor_model_parallel_size",
                self._tp_sizes(),
                f"the checkpoint's state of {type(self.optimizer).__name__} belongs to the slabs "
                f"of {saved} tensor-parallel ranks",
                "Resume with these sizes, or start the optimizer anew (--no-load-optim)",
            )

    def _loaded_main(
        self, saved: Any, twins: Sequence[int], may_lack: Mapping[int, Collection[str]] | None
    ) -> list[list[Tensor]]:
        """Return the main weights group by group, in the present order."""
        given = {place: number for number, place in self._main_places().items()}
        result = []
        for group, (models, twin) in enumerate(zip(self.float16_groups, twins, strict=True)):
            # what was asked for is in the present order
            asked = isinstance(saved, Mapping)
            its = dict(saved.get(group, {}) if asked else enumerate(saved[twin]))
            for place, model in enumerate(models):
                if MAIN in (may_lack or {}).get(given[group, place], ()):
                    its[place] = model.detach().float()
            if [(p, m.shape) for p, m in enumerate(models)] != [
                (place, its[place].shape) for place in sorted(its)
            ]:
                raise _missing([f"{MAINS}: {len(its)} of {len(models)} main weights of a group"])
            result.append([its[place] for place in sorted(its)])
        return result

    def _main_places(self) -> dict[int, tuple[int, int]]:
        """Return group and place among the main weights, by torch's number of the parameter."""
        places = {
            main: (group, place)
            for group, mains in enumerate(self.fp32_from_float16_groups)
            for place, main in enumerate(mains)
        }
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        return {number: places[param] for number, param in enumerate(params) if param in places}


def _loaded(name: str, mine: Any, values: Mapping[str, Any], where: str) -> Any:
    return restore(mine, values[name], f"{name} of {where}") if name in values else mine


def _numbers(groups: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return torch's numbers of the parameters of each group."""
    count = itertools.count()
    return [[next(count) for _ in group["params"]] for group in groups]


def _agreed_step(states: Any) -> Tensor | int | float | None:
    """Return the step of all parameters on all ranks; collective over the world.

    The first rank alone writes it, and may have no parameter of this optimizer.

    Raises:
        ConfigurationError: If parameters have done different numbers of steps.
    """
    steps = [state[STEP] for state in states if STEP in state]
    counts = {float(step) for step in steps}
    ends = [max(counts, default=-1.0), -min(counts, default=torch.inf)]
    both = torch.tensor(ends, dtype=torch.float64, device="cuda")
    distributed.all_reduce(both, op=distributed.ReduceOp.MAX)
    last, first = both.tolist()
    if last < 0:
        return None
    if last != -first:
        raise ConfigurationError(
            STEP,
            sorted(counts),
            "a checkpoint holds one step for all parameters of an optimizer",
            "Save when all have done the same number of steps",
        )
    return copy.deepcopy(steps[0]) if steps else torch.tensor(last, dtype=torch.float32)


def _not_in_model(param: Tensor) -> ConfigurationError:
    return ConfigurationError(
        "model_sharded_state_dict",
        f"a parameter of shape {tuple(param.shape)}",
        "is stepped by the optimizer and is not in the model's state",
        "Build it from the wrapped model with sharded_state_dict(), which keeps the parameters "
        "themselves (keep_vars=True)",
    )


def _other_count(group: Mapping[str, Any], saved: int) -> ConfigurationError:
    return ConfigurationError(
        "state_dict",
        f"{saved} parameters in group {group.get('group_id')}",
        f"this rank has {len(group['params'])} of them",
        "Resume with the same model in the same parallel layout, or from a torch_dist checkpoint",
    )


def _missing(missing: Sequence[str]) -> ConfigurationError:
    shown = ", ".join(missing[:12])
    more = f" and {len(missing) - 12} more" if len(missing) > 12 else ""
    return ConfigurationError(
        "state_dict",
        f"without {shown}{more}",
        "must hold all state of this run's optimizers",
        "Load a checkpoint of the same optimizers, or name the states that shall start anew in "
        "checkpoint_fresh_state",
    )
