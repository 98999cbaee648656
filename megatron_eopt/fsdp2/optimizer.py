"""One torch optimizer over DTensors, whose parts step plain tensors: this rank's shards.

Parameter groups and state hold DTensors and are alive: schedulers, checkpoints, hooks and whoever
writes into them are seen by the next step. In a step every part gets the shards of its
parameters, in float32, with their gradients and their state.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.fsdp2.adaptive import AdaptivePart
from megatron_eopt.fsdp2.owned_state import OwnedState
from megatron_eopt.fsdp2.shards import local_of, shard_like
from megatron_eopt.layouts import Plan
from megatron_eopt.storage.composite import ParamGroup, Part, State

__all__ = ["ShardedOptimizer", "ShardedPart"]


@dataclass
class _Scene:
    """What a part works on.

    Attributes:
        groups: The part's groups, with shards instead of parameters.
        state: State of the shards.
        shards: Parameter to shard.
    """

    groups: list[ParamGroup]
    state: State
    shards: dict[Tensor, Tensor]


class ShardedPart:
    """Lets a part step this rank's shards of some parameters.

    Args:
        part: The part.
        places: Which parameter groups of the optimizer it steps.
        params: Which of their parameters.
        owned: Its state of whole matrices, if it has such.
    """

    def __init__(
        self, part: Part, places: slice, params: Sequence[Tensor], owned: OwnedState | None = None
    ) -> None:
        self.part = part
        self.owned = owned
        self.params = list(params)
        # the part knows its parameters by the tensors it was made with
        self._known = list(params)
        self._places = places

    def follow(self, replaced: Mapping[Tensor, Tensor]) -> None:
        """Step other tensors from now on, in the place of those that are keys of ``replaced``."""
        self.params = [replaced.get(param, param) for param in self.params]
        if self.owned is not None:
            self.owned.follow(replaced)

    def init_state(self, optimizer: "ShardedOptimizer") -> None:
        """Make all state exist, so that it can be saved and loaded before the first step."""
        scene = self._scene(optimizer, with_grads=False)
        self.part.init_state(scene.groups, scene.state)
        self._keep(optimizer, scene)

    def step(self, optimizer: "ShardedOptimizer") -> None:
        """Step the parameters that have gradients; collective over the ranks that store them."""
        if self.owned is not None:
            self._refuse_missing(optimizer)
            everything = self._scene(optimizer, with_grads=False)
            # owners compute on copies of the weights, which may have been written to meanwhile
            self.part.refresh(everything.groups)
        scene = self._scene(optimizer, with_grads=True)
        self.part.step(scene.groups, scene.state)
        for param, shard in scene.shards.items():
            local = local_of(param)
            if local.dtype != shard.dtype and param.grad is not None:
                local.copy_(shard)
        self._keep(optimizer, scene)

    def complete(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Bring state that lies on all ranks up to date; collective."""
        if isinstance(self.part, AdaptivePart):
            self.part.complete([state[param] for param in self.params])

    def _scene(self, optimizer: "ShardedOptimizer", *, with_grads: bool) -> _Scene:
        shards = {param: _shard(param) for param in self.params}
        state: State = defaultdict(dict)
        for param, shard in shards.items():
            state[shard] = {k: local_of(v) for k, v in optimizer.state[param].items()}
            if with_grads and param.grad is not None:
                shard.grad = _grad(param, shard.dtype)
        groups = []
        for group in optimizer.param_groups[self._places]:
            mine = [param for param in group["params"] if param in shards]
            if with_grads:
                mine = [param for param in mine if param.grad is not None]
            groups.append({**group, "params": [shards[param] for param in mine]})
        self.part.attach(dict(zip(self._known, shards.values(), strict=True)))
        return _Scene(groups, state, shards)

    def _keep(self, optimizer: "ShardedOptimizer", scene: _Scene) -> None:
        """Take over new state tensors, and what the part counts in groups."""
        for param, shard in scene.shards.items():
            kept = optimizer.state[param]
            for key, value in scene.state[shard].items():
                if key in kept and local_of(kept[key]) is value:
                    continue
                whole = not isinstance(value, Tensor) or key in self._whole_keys
                like_param = not whole and value.shape == shard.shape
                kept[key] = shard_like(param, value) if like_param else value
        for outer, group in zip(optimizer.param_groups[self._places], scene.groups, strict=True):
            outer.update({key: value for key, value in group.items() if key != "params"})

    @property
    def _whole_keys(self) -> frozenset[str]:
        return self.part.whole_keys if isinstance(self.part, AdaptivePart) else frozenset()

    def _refuse_missing(self, optimizer: "ShardedOptimizer") -> None:
        missing = [optimizer.names[param] for param in self.params if param.grad is None]
        if missing:
            rule = f"{self.part.name} steps all matrices together, and these have no gradient"
            raise ConfigurationError("grad", missing[:8], rule, "Freeze them before building")


class ShardedOptimizer(torch.optim.Optimizer):
    """Steps the parameters of a sharded model; see :func:`megatron_eopt.fsdp2.build_optimizer`.

    State of a parameter: ``momentum_buffer`` and the like are DTensors with its placements, in
    float32; statistics of whole matrices are plain tensors, the same on all ranks. State that
    optimizers such as SOAP keep of whole matrices stays at their owners and appears in
    :meth:`state_dict` only, as DTensors cut along their rows.

    Args:
        groups: Parameter groups.
        parts: What steps them.
        names: Names of the parameters.

    Attributes:
        parts: The parts.
        names: Names of the parameters.
    """

    def __init__(
        self,
        groups: list[ParamGroup],
        parts: Sequence[ShardedPart],
        names: Mapping[Tensor, str],
    ) -> None:
        self.parts: list[ShardedPart] = []
        self.names = dict(names)
        super().__init__(groups, {})
        self.parts = list(parts)
        for part in self.parts:
            part.init_state(self)

    @property
    def plans(self) -> list[Plan]:
        """What travels in a step, one plan for each set of ranks that shares matrices."""
        return [part.part.plan for part in self.parts if hasattr(part.part, "plan")]

    def follow(self, replaced: Mapping[Tensor, Tensor]) -> None:
        """Step other tensors from now on, such as float32 copies of 16-bit parameters.

        Whoever put them into ``param_groups`` and ``state`` calls this.

        Args:
            replaced: Former to present tensor, cut and placed alike.
        """
        self.names = {replaced.get(param, param): name for param, name in self.names.items()}
        for part in self.parts:
            part.follow(replaced)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: which rank computes what is decided when the optimizer is built.

        Raises:
            ConfigurationError: Always, after construction.
        """
        if self.parts:
            count = len(list(param_group.get("params", ())))
            rule = "the plan of who computes what is made once, for the whole model"
            way_out = "Build the optimizer again"
            raise ConfigurationError("add_param_group", f"{count} parameters", rule, way_out)
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Do one step; collective over the ranks that store the parameters.

        Parameters without a gradient rest.

        Args:
            closure: Computes the loss again, with gradients enabled.

        Returns:
            The closure's loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step(self)
        return loss

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return groups and state; collective, so all ranks must call it together."""
        for part in self.parts:
            part.complete(self.state)
        owned = [part.owned for part in self.parts if part.owned is not None]
        for item in owned:
            for param, state in item.publish().items():
                self.state[param].update(state)
        result = super().state_dict()
        for item in owned:
            # the owners hold it
            self.state.update({param: {} for param in item.params})
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over groups and state; collective where owners hold state.

        Raises:
            ConfigurationError: If state of a parameter is missing.
        """
        expected = {param: set(state) for param, state in self.state.items()}
        super().load_state_dict(state_dict)
        self._restore_dtypes(state_dict)
        for param, keys in expected.items():
            if missing := keys - self.state[param].keys():
                rule = f"lacks {', '.join(sorted(missing))} of {self.names[param]}"
                way_out = "Load what this optimizer saved, or import_torch_muon"
                raise ConfigurationError("state_dict", "incomplete", rule, way_out)
        for part in self.parts:
            if part.owned is not None:
                part.owned.adopt({param: self.state[param] for param in part.owned.params})
                self.state.update({param: {} for param in part.owned.params})

    def _restore_dtypes(self, state_dict: dict[str, Any]) -> None:
        """Undo torch's conversion of state to the dtype of 16-bit parameters."""
        for number, param in _numbered(state_dict, self.param_groups):
            if param.dtype == torch.float32:
                continue
            for key, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.dim():
                    self.state[param][key] = value.to(param.device)


def _numbered(
    state_dict: dict[str, Any], groups: Sequence[ParamGroup]
) -> Iterator[tuple[Any, Tensor]]:
    saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    return zip(saved, chain.from_iterable(group["params"] for group in groups), strict=True)


def _shard(param: Tensor) -> Tensor:
    """Return this rank's part in float32: the storage itself, or a copy of a 16-bit one."""
    return local_of(param).detach().to(torch.float32)  # type: ignore[no-any-return]


def _grad(param: Tensor, dtype: torch.dtype) -> Tensor:
    grad: Any = param.grad
    placements = getattr(param, "placements", None)
    if isinstance(grad, DTensor) and grad.placements != placements:
        grad = grad.redistribute(placements=placements)
    return local_of(grad).to(dtype)  # type: ignore[no-any-return]
