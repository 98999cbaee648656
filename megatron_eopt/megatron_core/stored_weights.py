"""What a rank stores of the weights, and what updates it: one member of a chain."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    param_is_not_gtp_duplicate,
    param_is_not_tensor_parallel_duplicate,
)
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor
from torch.distributed import get_world_size
from torch.distributed.tensor import DTensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import COPY_ATTRIBUTE, MAIN_KINDS, MAIN_OF_REPLICATED
from megatron_eopt.math.precision import matmul_precision
from megatron_eopt.megatron_core.buckets import gather_buckets
from megatron_eopt.optimizers.assigned_rule import AssignedRule
from megatron_eopt.optimizers.sharded_optimizer import ShardedOptimizer
from megatron_eopt.optimizers.update_rule import UpdateRule
from megatron_eopt.storage.local_tensors import local_of, parts_of
from megatron_eopt.storage.model_copies import model_copies_of
from megatron_eopt.storage.shard import ParamShard
from megatron_eopt.storage.uneven import is_uneven


class StoredWeights:
    """Stores weights; a mixin for megatron-core's wrappers of a torch optimizer."""

    optimizer: Any
    """The torch optimizer, with groups and state of the stepped tensors."""

    steps: int = 0
    """Number of steps done, the same on every rank."""

    loaded_groups: Sequence[Mapping[str, Any]] = ()
    """Parameter groups of the last checkpoint that was, or is being, loaded."""

    fresh: Collection[str] | None = None
    """What starts fresh in a load in progress, if it was matched (``fsdp_dtensor``)."""

    twins: Sequence[Mapping[str, Any] | None] = ()
    """For each parameter group, the one of the last loaded checkpoint that it continues from."""

    in_buffers = False
    """Whether weights and state are fragments of Megatron's flat buffers."""

    params_of_groups: Sequence[Sequence[Tensor]] = ()
    """If so, each group's model parameters, also those that other ranks hold."""

    is_stub_optimizer: bool
    """Whether it has no parameters."""

    grad_scaler: Any = None
    """The chain's loss scale, if any."""

    assigned: Sequence[AssignedRule] = ()
    """What updates the stored tensors."""

    shards: Sequence[ParamShard] = ()
    """What this rank stores of the parameters, update rule by update rule."""

    main_kind = MAIN_OF_REPLICATED
    """The kind of main weights in saved state."""

    _model_copies: Sequence[Tensor] | None = None  # main weights with a copy to write in this step

    def count_in(self, stats: Any, collection: Any) -> None:
        """Let megatron-core count every gradient once when it sums statistics over ``stats``."""
        # attributes that megatron-core's norm and its count of zeros read (optimizer/optimizer.py)
        self.grad_stats_parallel_group = stats
        self.tp_group = collection.tp
        self.expert_tp_group = getattr(collection, "expt_tp", None) or collection.tp

    @property
    def update_rules(self) -> list[UpdateRule]:
        """The update rules of :attr:`assigned`."""
        return [item.rule for item in self.assigned]

    def set_assigned(self, assigned: Sequence[AssignedRule]) -> None:
        """Set what updates the stored tensors, once the wrapper has put them into the groups."""
        self.assigned = assigned
        self.shards = self.set_stepped(shard for item in assigned for shard in item.rule.shards)
        for item in [self.optimizer] if isinstance(self.optimizer, ShardedOptimizer) else assigned:
            item.attach()

    def set_stepped(self, shards: Iterable[ParamShard]) -> list[ParamShard]:
        """Set the tensors that are stepped, and return the shards of which this rank has some."""
        mains, stored = self.mains(), []
        for shard in shards:
            shard.main = mains.get(shard.param, shard.param)
            if shard.main is not None:
                stored.append(shard)
        return stored

    def mains(self) -> Mapping[Tensor, Tensor | None]:
        """Return what is stepped in place of parameters; None for what only other ranks store."""
        return {}

    def tensors_of(self, shard: ParamShard) -> dict[str, Any]:
        """Return this rank's main weights, unless they are the model's, and state, by kind.

        Raises:
            ConfigurationError: If state is called like main weights.
        """
        main = {} if shard.main is shard.param else {self.main_kind: shard.main.detach()}
        state = self.optimizer.state[shard.main]
        if taken := MAIN_KINDS & state.keys():
            rule = "is the name of main weights in checkpoints"
            raise ConfigurationError("state", min(taken), rule, "Give this state another name")
        tensors = {**main, **state}
        return {kind: local_of(value) for kind, value in tensors.items()}

    def common_state(self, steps: Sequence[int], main_optimizer: str | None) -> dict[str, Any]:
        """Return what checkpoints store once for all ranks: groups, steps and loss scale.

        ``steps`` are the step counts of each parameter group's state, or -1. For whole parameters,
        megatron-core names all optimizers but the ``main_optimizer`` in groups, and matches
        groups by name.
        """
        raise NotImplementedError

    def collect_gradients(self) -> None:
        """Hand this step's gradients to the stepped tensors, in their dtype."""
        if not self.is_stub_optimizer:
            # a method of megatron-core's mixed-precision wrappers; other storages override this one
            self._copy_model_grads_to_main_grads()  # type: ignore[attr-defined]

    def share_of(self, shard: ParamShard) -> float:
        """Return how much a shard counts in sums over all ranks, so that each element counts once.

        The ranks over which the gradient norm is summed count each element once. If several sets of
        these ranks have replicas, each counts by its share.
        """
        # the same conditions as in megatron-core's ``_filter_grads_for_norm``
        groups = {"tp_group": self.tp_group, "expert_tp_group": self.expert_tp_group}
        is_first = param_is_not_tensor_parallel_duplicate(shard.param, **groups)
        is_first = is_first and param_is_not_gtp_duplicate(shard.param)
        if not (is_first and param_is_not_shared(shard.param)):
            return 0.0
        counted = get_world_size(self.grad_stats_parallel_group)
        # for these DTensors, megatron-core also sums the gradient norm over the mesh
        if isinstance(shard.main, DTensor) and not is_uneven(shard.main):
            counted *= parts_of(shard.main)
        return counted / get_world_size()

    def gather_params(self, *, now: bool = False) -> None:
        """Gather the stepped weights to all ranks; without ``now``, unless DDP or hooks do."""

    @torch.no_grad()
    def quantize_and_sync_model_params_from_main_params(self) -> None:
        """Copy main weights to the model's weights on all ranks; collective.

        megatron-core 0.20 calls this on chains and their members after every load.
        """
        self._stage_model_params_from_main_params()
        for chunk in getattr(self, "model_chunks", ()):
            gather_buckets(chunk, now=True)
        self.gather_params(now=True)

    @torch.no_grad()
    def _stage_model_params_from_main_params(self) -> None:
        """Copy main weights to this rank's part of the model's weights, without a gather.

        Float32 weights are their own main weights, so there is nothing to copy.
        """
        if not self.is_stub_optimizer and hasattr(self, "_copy_main_params_to_model_params"):
            self._copy_main_params_to_model_params()

    def step_in_chain(self) -> bool:
        """Step as a member of a chain, which gathers the stepped weights afterwards."""
        return self.step_with_ready_grads()

    def step_with_ready_grads(self) -> bool:
        """Step, and count the step unless it was skipped."""
        # the torch optimizer may read torch's setting for matrix products
        with self.writing_model_copies(), matmul_precision():
            # A class that steps has megatron-core's wrapper next in its order of methods. That
            # calls `self.optimizer.step()`, then `_copy_main_params_to_model_params`.
            done = bool(super().step_with_ready_grads())  # type: ignore[misc]
        self.steps += done
        return done

    @contextmanager
    def writing_model_copies(self) -> Iterator[None]:
        """In a block, let the code that steps a main weight also write the model's weight."""
        copies = self.copies()
        for main, copy in copies:
            # who steps a main weight pops this mark and writes the copy while the values are at
            # hand; ``copy_mains`` writes the rest
            setattr(main, COPY_ATTRIBUTE, copy)
        self._model_copies = [main for main, _ in copies]
        try:
            yield
        finally:
            self._model_copies = None

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of main weights and the model's weights, where these are separate tensors.

        The code that steps the first may also write the second, see :func:`model_copies_of`.
        """
        return []

    @torch.no_grad()
    def copy_mains(self, mains: Iterable[Tensor] | None = None) -> None:
        """Copy main weights to the model's; in a step, only those (of ``mains``) still missing."""
        # outside of a step nobody has written a copy yet
        if self._model_copies is None:
            pairs = self.copies()
        else:
            # megatron-core's step copies all main weights at its end; most have been copied by then
            wanted = list(self._model_copies if mains is None else mains)
            left = zip(wanted, model_copies_of(wanted), strict=True)
            pairs = [(main, copy) for main, copy in left if copy is not None]
        if pairs:
            mains, copies = zip(*pairs, strict=True)
            torch._foreach_copy_(copies, mains)

    def replica_of(self, param: Tensor, replica: Any) -> tuple[int, ...]:
        """Return the replica id of stored state of a model's parameter, given the parameter's."""
        return replica if isinstance(replica, tuple) else (replica,)

    def replica_of_matrix(self, param: Tensor, replica: Any) -> tuple[int, ...]:
        """Return the replica id of state that is not sharded like the parameter."""
        return self.replica_of(param, replica)


def rules_of(storages: Iterable[StoredWeights]) -> Iterator[UpdateRule]:
    """Yield the update rules of storages, in the order in which they step."""
    for storage in storages:
        for item in storage.assigned:
            yield item.rule


def named_gradients(storage: StoredWeights) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each model parameter with this rank's part of the gradient that it steps with."""
    for shard in storage.shards:
        if (grad := local_of(shard.main.grad)) is not None:
            yield shard.param, grad
