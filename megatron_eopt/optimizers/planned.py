"""A torch optimizer that is planned when it is made, and stepped by one driver."""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any

from emerging_optimizers.orthogonalized_optimizers import OrthogonalizedOptimizer
from torch import Tensor

from megatron_eopt.base.agreement import agreed_in
from megatron_eopt.base.names import MOMENTUM
from megatron_eopt.optimizers.driver import ParamGroup, not_to_be_copied
from megatron_eopt.optimizers.loaded_state import check_loaded
from megatron_eopt.optimizers.muon_arguments import check_group
from megatron_eopt.optimizers.muon_driver import MuonDriver
from megatron_eopt.optimizers.planned_groups import PlannedGroups
from megatron_eopt.stores.shard import Shard


class PlannedOptimizer(OrthogonalizedOptimizer):
    """What of Muon is about parameter groups and state, and not about its arithmetic.

    Planning, and what makes plans again, is collective over the groups that cut parameters.

    Attributes:
        driver: What steps; None until all groups are known.
        pg_collection: Process groups, or None.
    """

    driver: MuonDriver | None
    pg_collection: Any

    _planned: PlannedGroups
    _names: list[str]  # of the parameters, in the plan's order
    _shards: list[Shard]  # likewise
    # what a group may have of its own besides ``defaults``
    _group_defaults: Mapping[str, Any] = MappingProxyType({})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters get their state at once. Collective, once all is planned.

        Raises:
            ConfigurationError: If a setting of the group or a parameter cannot be honoured; nothing
                has changed then.
        """
        names = list(self._names)
        if self.driver is not None:
            names = [self._names[number] for _, _, number in self.numbered()]
        super().add_param_group({**self._group_defaults, **param_group})
        try:
            group = self.param_groups[-1]
            check_group(type(self), {*self.defaults, *self._group_defaults}, group)
            for name in group.get("param_names") or [None] * len(group["params"]):
                shown = name or f"parameter {len(names)}"
                names.append(f"{shown}#{len(names)}" if shown in names else shown)
            if self.driver is None:
                self._names = names
            else:
                self.plan(names)
        except Exception:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return groups and state, with momenta that any ``momentum_dtype`` can load."""
        driver = self.prepared()
        result: dict[str, Any] = super().state_dict()
        keys = [key for group in result["param_groups"] for key in group["params"]]
        for key, (_, _, number) in zip(keys, self.numbered(), strict=True):
            result["state"][key] = driver.saved_form(number, result["state"][key])
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over groups and state; collective over the groups that cut parameters.

        Raises:
            ConfigurationError: If what a step needs is missing, or of another shape, with nothing
                changed.
        """
        own = (self.prepared(), self.param_groups, self.state, self._names)
        self._agreed(lambda: check_loaded(*own, state_dict))
        super().load_state_dict(state_dict)
        driver = self.prepared()
        if driver.momentum.is_rounded:
            # torch has made it the parameters' dtype, and what is small is lost in fp16
            keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
            for key, (_, param, _) in zip(keys, self.numbered(), strict=True):
                if (saved := state_dict["state"].get(key, {}).get(MOMENTUM)) is not None:
                    self.state[param][MOMENTUM] = saved.to(param.device)
        driver.pack(self.param_groups, self.state)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be copied or pickled."""
        raise not_to_be_copied(self)

    def plan(self, names: list[str]) -> None:
        """Decide who computes what, and make all state exist; collective.

        Args:
            names: The names of all parameters, in the order of their groups.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        shards = self._agreed(
            lambda: [self.shard(name, p) for name, p in zip(names, params, strict=True)]
        )
        driver = self.driver_for(shards, next((str(p.device) for p in params), "cpu"))
        planned = PlannedGroups(self.param_groups)
        driver.attach(planned.numbers)
        driver.init(self.param_groups, self.state)
        self._names, self._shards, self._planned, self.driver = names, shards, planned, driver

    def shard(self, name: str, param: Tensor) -> Shard:
        """Return what this rank stores of a parameter."""
        raise NotImplementedError

    def driver_for(self, shards: list[Shard], device: str) -> MuonDriver:
        """Return what steps shards whose tensors are on a device."""
        raise NotImplementedError

    def prepared(self) -> MuonDriver:
        """Return what steps, once it knows where every parameter is, and each has its state."""
        assert self.driver is not None
        if self._planned.follow(self.param_groups):
            self.driver.group_of.clear()
            self.driver.attach(self._planned.numbers)
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        if not all(map(self.state.get, params)):
            self.driver.init(self.param_groups, self.state)
        return self.driver

    def numbered(self) -> Iterator[tuple[ParamGroup, Tensor, int]]:
        """Yield every parameter with its group and its number in the plan."""
        return self.prepared().numbered(self.param_groups)

    def _agreed[T](self, function: Callable[[], T]) -> T:
        """Call a function on the ranks of both groups; what one of them refuses, all refuse."""
        dense, experts = (getattr(self.pg_collection, name, None) for name in ("tp", "expt_tp"))
        return agreed_in(dense, lambda: agreed_in(experts, function))
