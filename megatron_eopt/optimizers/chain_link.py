"""One optimizer of a chain: a storage, and the update rules that update what it stores."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.optimizers.sharded_optimizer import ShardedOptimizer
from megatron_eopt.optimizers.update_rule import ParamGroup, State, UpdateRule
from megatron_eopt.storage.interface import Storage


@dataclass(frozen=True, eq=False)
class ChainLink:
    """A storage with its update rules."""

    storage: Storage
    update_rules: Sequence[UpdateRule] = ()
    params: Sequence[Sequence[Tensor]] = ()  # each update rule's model parameters, in shard order
    replicas: ProcessGroup | None = None  # ranks that store and compute the same as this one

    def groups_of(self, update_rule: UpdateRule) -> list[ParamGroup]:
        """Return the parameter groups that an update rule updates, as schedulers see them."""
        optimizer = self.storage.optimizer
        # any other optimizer has one update rule, for all of its groups
        if isinstance(optimizer, ShardedOptimizer):
            return optimizer.groups_of(update_rule)
        groups: list[ParamGroup] = optimizer.param_groups
        return groups

    def groups_and_state(
        self, update_rule: UpdateRule
    ) -> AbstractContextManager[tuple[list[ParamGroup], State]]:
        """Provide what an update rule works on: groups of this rank's tensors, and their state."""
        optimizer = self.storage.optimizer
        if isinstance(optimizer, ShardedOptimizer):
            return optimizer.groups_and_state(update_rule)
        return nullcontext((optimizer.param_groups, optimizer.state))

    def stepped(self) -> Iterator[tuple[UpdateRule, int, Tensor]]:
        """Yield every tensor of the parameter groups, with its update rule and shard index."""
        for update_rule in self.update_rules:
            for _, main, number in update_rule.numbered(self.groups_of(update_rule)):
                yield update_rule, number, main
