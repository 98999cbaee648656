"""Saves and loads the state of a distributed optimizer, at any layout.

State is saved under the names and in the shapes of the parameters it belongs to (see
:mod:`megatron_eopt.storage.checkpoint.model_space`), and only what exists: no zeros stand in for
state that an optimizer does not have. The wrapper counts the steps, so that ranks without a
fragment agree with the others.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from torch import Tensor

from megatron_eopt.base.names import STEP
from megatron_eopt.storage.checkpoint.bucket_space import BucketSpace
from megatron_eopt.storage.checkpoint.model_space import ModelSpace, model_spaces
from megatron_eopt.storage.checkpoint.owned import OwnedMatrix, wanted_of
from megatron_eopt.storage.checkpoint.requests import REQUESTS, StateRequests, Wanted
from megatron_eopt.storage.checkpoint.saved_groups import (
    adopt,
    saved_groups,
    saved_scaler,
    saved_steps,
)
from megatron_eopt.storage.checkpoint.sources import MAIN

__all__ = ["CheckpointMixin"]

_COMMON = ("optimizer", "grad_scaler")
"""What a checkpoint by bucket keeps with the buckets, and all others once."""

_FORM = "fully_reshardable"
"""Megatron's name for state in the parameters' shapes."""


class CheckpointMixin:
    """Saves and loads the state of a distributed optimizer; stands before its Megatron base.

    Attributes:
        steps: Steps done, the same on every rank.
        number: Place of this optimizer in its chain.
    """

    steps: int = 0
    number: int = 0
    optimizer: Any
    config: Any
    grad_scaler: Any
    model_param_group_index_map: Any
    distributed_optimizer_instance_id: int
    _requests: StateRequests | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the parameters' state: groups, steps and loss scale."""
        groups = [
            {key: value for key, value in group.items() if key != "params"} | {"step": self.steps}
            for group in self.optimizer.param_groups
        ]
        state: dict[str, Any] = {"optimizer": {"param_groups": groups}}
        if self.grad_scaler:
            state["grad_scaler"] = self.grad_scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned and, where it is there, the parameters' state.

        Groups are matched by identity, and keep the present run's settings of their schedule. A
        group that the checkpoint does not know keeps all its settings. Main weights that the
        checkpoint does not have are taken from the model, which must be loaded before.
        """
        param_state = state_dict.get("param_state", {})
        common = param_state.get("buckets", {})
        known = {**state_dict, **{key: common[key] for key in _COMMON if key in common}}
        saved = saved_groups(known)
        for group in self.optimizer.param_groups:
            adopt(group, saved)
        self.steps = saved_steps(known)
        scaler = saved_scaler(known)
        if self.grad_scaler and scaler is not None:
            self.grad_scaler.load_state_dict(scaler)
        fresh: list[Tensor] = []
        if self._requests is not None and "param_state" in state_dict:
            fresh = self._take(self._requests, param_state)
            self._requests = None
        self._set_steps(self.steps)
        for param in fresh:
            self._restart(param)
        self._after_loading()

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Mapping[str, Any],
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return what ``dist_checkpointing`` saves or loads.

        Args:
            model_sharded_state_dict: The model's, with its parameters themselves as data.
            is_loading: Whether to load.
            sharding_type: Megatron's form; state is in the parameters' shapes in every form.
            metadata: The trainer's choice of a form, likewise.

        Raises:
            ConfigurationError: If a parameter is not in the model's state.
        """
        if is_loading:
            self.make_state_exist()
        state = self.state_dict()
        requests = self._state_requests(model_sharded_state_dict)
        state["param_state"] = requests.param_state
        state["param_state_sharding_type"] = _FORM
        if is_loading:
            self._requests = requests
            state[REQUESTS] = LocalNonpersistentObject(requests)
        return state

    def step_with_ready_grads(self) -> bool:
        """Step, and count the step if it was done."""
        done = bool(super().step_with_ready_grads())  # type: ignore[misc]
        self.steps += done
        return done

    def owned_matrices(self) -> Iterable[OwnedMatrix]:
        """Return the whole matrices that this rank owns, with their state."""
        return ()

    def params(self) -> list[Tensor]:
        """Return the model's parameters that this rank holds a fragment of."""
        return list(self.model_param_group_index_map)

    def tensors_of(self, param: Tensor) -> dict[str, Tensor]:
        """Return main weights and state of a fragment, each flat, by kind."""
        tensors: dict[str, Tensor] = self._get_main_param_and_optimizer_states(param)
        return tensors

    def put_tensors(self, param: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Take over what was written to what :meth:`tensors_of` returned."""
        self._set_main_param_and_optimizer_states(param, tensors)

    def held(self, param: Tensor) -> tuple[int, int]:
        """Return which elements of the flattened local parameter this rank holds."""
        held = self._get_model_param_range_map(param)["param"]  # type: ignore[attr-defined]
        return held.start, held.end

    def _state_requests(self, model_state: Mapping[str, Any]) -> StateRequests:
        owned = list(self.owned_matrices())
        params = dict.fromkeys([*self.params(), *(item.param for item in owned)])
        spaces = model_spaces(model_state, params)
        wanted = [self._wanted(param, spaces[param]) for param in self.params()]
        wanted += [wanted_of(item, spaces) for item in owned]
        bucket_space = BucketSpace(self, self.number)
        return StateRequests(wanted, self.distributed_optimizer_instance_id, bucket_space)

    def _wanted(self, param: Tensor, space: ModelSpace) -> Wanted:
        tensors = self.tensors_of(param)
        return Wanted(space, space.boxes(*self.held(param)), tensors, param)

    @torch.no_grad()
    def _take(self, requests: StateRequests, param_state: Mapping[str, Any]) -> list[Tensor]:
        """Write what was loaded to where it belongs; return the parameters without state."""
        fresh = []
        for item, loaded in requests.take(param_state):
            if item.param is None:
                if loaded and STEP not in loaded:
                    item.take_step(self.steps)
                continue
            self.put_tensors(item.param, item.tensors)
            if MAIN not in loaded:
                start, stop = self.held(item.param)
                main = self.tensors_of(item.param)[MAIN]
                main.copy_(item.param.detach().view(-1)[start:stop])
            if not loaded - {MAIN}:
                fresh.append(item.param)
        return fresh

    def _restart(self, param: Tensor) -> None:
        """Count the steps of a parameter anew, where they are counted by parameter."""
        group, place = self.model_param_group_index_map[param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        if STEP in state:
            state[STEP] = torch.zeros_like(torch.as_tensor(state[STEP]))

    def _get_main_param_and_optimizer_states(self, model_param: Tensor) -> dict[str, Tensor]:
        tensors = super()._get_main_param_and_optimizer_states(model_param)  # type: ignore[misc]
        return {
            kind: value.detach()
            for kind, value in tensors.items()
            if isinstance(value, Tensor) and kind != STEP
        }

    def _set_main_param_and_optimizer_states(
        self, model_param: Tensor, tensors: Mapping[str, Tensor]
    ) -> None:
        if self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            super()._set_main_param_and_optimizer_states(model_param, tensors)  # type: ignore[misc]
            return
        for kind, value in self._get_main_param_and_optimizer_states(model_param).items():
            if kind in tensors and tensors[kind].data_ptr() != value.data_ptr():
                value.copy_(tensors[kind])

    def make_state_exist(self) -> None:
        """Let every fragment and matrix have the state that it is about to load."""
        raise NotImplementedError

    def _set_steps(self, steps: int) -> None:
        """Continue after ``steps`` steps that another run did."""
        raise NotImplementedError

    def _after_loading(self) -> None:
        """Take over loaded values where copies of them are kept."""
