"""What a checkpoint of a composite in fragments holds, and how it is read back.

Megatron's distributed optimizer takes an Adam for granted: one pair of state keys for a whole
buffer, a step counter where Adam keeps it. Here a buffer holds fragments of several optimizers, and
the wrapper counts the steps.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.versions import megatron_name
from megatron_eopt.routing.groups import GROUP_ID

__all__ = ["CheckpointMixin"]

_LOADERS = {
    "dp_zero_gather_scatter": "load_parameter_state_from_dp_zero",
    "fully_reshardable": "load_parameter_state_from_fully_reshardable",
    "dp_reshardable": "load_parameter_state_from_dp_reshardable",
    "fully_sharded_model_space": "load_parameter_state_from_fs_model_space",
}


class CheckpointMixin:
    """Saves and loads the state of a ``BufferSetOptimizer``; stands before its Megatron base.

    Attributes:
        steps: Steps done, the same on every rank.
        state_keys: Names of all tensors that some fragment of the buffers has on some rank.
    """

    steps: int = 0
    state_keys: tuple[str, ...] = ()
    optimizer: Any
    grad_scaler: Any
    model_param_group_index_map: Any
    buffers: list[Any]

    @property
    def optimizer_state_keys(self) -> tuple[str, ...]:
        """Names of the state tensors that every fragment is saved with."""
        return self.state_keys

    def local_state_keys(self) -> set[str]:
        """Return the names of this rank's state tensors, step counters apart."""
        states = self.optimizer.state.values()
        return {name for state in states for name, value in state.items() if _is_saved(name, value)}

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

        Groups are matched by identity, and keep the present run's settings of their schedule.

        Raises:
            ConfigurationError: If a group is not in the checkpoint.
        """
        saved = state_dict["optimizer"]["param_groups"]
        for group in self.optimizer.param_groups:
            self._adopt(group, _find(group, saved))
        steps = {int(group["step"]) for group in saved if group.get("step") is not None}
        self.steps = max(steps, default=0)
        self.optimizer.set_steps(self.steps)
        if self.grad_scaler and "grad_scaler" in state_dict:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
        if "param_state" in state_dict:
            loader = _LOADERS[state_dict["param_state_sharding_type"]]
            getattr(self, loader)(state_dict["param_state"])
            self.optimizer.refresh()

    def _adopt(self, group: dict[str, Any], saved: Mapping[str, Any]) -> None:
        keep = {"params", "step", "default_config", *megatron_name("param_group_identifier_keys")}
        group.update({key: value for key, value in saved.items() if key not in keep})

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return what ``dist_checkpointing`` saves or loads; arguments are those of the base.

        Raises:
            ConfigurationError: If an optimizer keeps matrix-wide state at owners.
        """
        for part in self.optimizer.parts:
            if part.owned_state is not None:
                raise ConfigurationError(
                    "optimizers",
                    part.name,
                    "keeps whole matrices' state at their owners, which no checkpoint format holds",
                    "Train with it without saving optimizer state (--no-save-optim)",
                )
        return super().sharded_state_dict(*args, **kwargs)  # type: ignore[misc]

    def sharded_param_state_fully_reshardable(self, *args: Any, **kwargs: Any) -> Any:
        """Return one tensor per parameter and state key.

        Megatron concatenates buckets without the padding at their ends, and then looks parameters
        up by places that count it: all after the first padded bucket would be shifted.
        """
        maps = [buffer.param_index_map for buffer in self.buffers]
        try:
            for buffer in self.buffers:
                buffer.param_index_map = _without_padding(buffer)
            return super().sharded_param_state_fully_reshardable(*args, **kwargs)  # type: ignore[misc]
        finally:
            for buffer, original in zip(self.buffers, maps, strict=True):
                buffer.param_index_map = original

    def get_parameter_state_dp_reshardable(self) -> Any:
        """Return the fragments bucket by bucket.

        Megatron refuses an empty bucket, which a rank has whose shard is nothing but padding.
        """
        state = super().get_parameter_state_dp_reshardable()  # type: ignore[misc]
        for number in range(len(self.buffers)):
            for buckets in state[number].values():
                for fragments in buckets:
                    if not fragments:
                        nothing = {"gbuf_local_start": 0, "gbuf_local_end": 0, "padding": True}
                        fragments.append(nothing)
        return state

    def _get_main_param_and_optimizer_states(self, model_param: Tensor) -> dict[str, Tensor]:
        main, state = self._main_and_state(model_param)
        tensors = {"param": main}
        for name in self.state_keys:
            tensors[name] = state[name] if name in state else torch.zeros_like(main)
        return tensors

    def _set_main_param_and_optimizer_states(
        self, model_param: Tensor, tensors: Mapping[str, Tensor]
    ) -> None:
        main, state = self._main_and_state(model_param)
        with torch.no_grad():
            main.copy_(tensors["param"])
            for name, value in state.items():
                if _is_saved(name, value):
                    value.copy_(tensors[name])

    def _main_and_state(self, model_param: Tensor) -> tuple[Tensor, dict[str, Any]]:
        group, place = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][place]
        return main, self.optimizer.state[main]


def _without_padding(buffer: Any) -> dict[Tensor, tuple[int, int, int]]:
    """Return where parameters lie if the buckets follow one another without padding."""
    padding = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets]
    before = [0, *itertools.accumulate(padding)]
    return {
        param: (start - before[bucket], stop - before[bucket], bucket)
        for param, (start, stop, bucket) in buffer.param_index_map.items()
    }


def _is_saved(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and name != "step"


def _find(group: Mapping[str, Any], saved: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the saved twin of ``group``: by its identity, else by Megatron's keys."""
    keys = (GROUP_ID,) if GROUP_ID in group else megatron_name("param_group_identifier_keys")
    identity = [group.get(key) for key in keys]
    for candidate in saved:
        if [candidate.get(key) for key in keys] == identity:
            return candidate
    known = [[candidate.get(key) for key in keys] for candidate in saved]
    raise ConfigurationError(
        "state_dict",
        identity,
        f"must have this parameter group, and has {known}",
        "Resume with the optimizers and overrides of the run that wrote the checkpoint",
    )
