"""Megatron's distributed optimizer for one optimizer that updates each number by itself."""

from collections.abc import Mapping
from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_eopt.storage.checkpoint.dry_step import dry_step
from megatron_eopt.storage.checkpoint.mixin import CheckpointMixin
from megatron_eopt.storage.element_wise import complete_state, set_steps
from megatron_eopt.storage.non_finite import WatchedGradients

__all__ = ["FragmentOptimizer"]

_BY_BUCKET = "dp_reshardable"
"""Megatron's name for state bucket by bucket."""


class FragmentOptimizer(CheckpointMixin, WatchedGradients, DistributedOptimizer):
    """Steps Adam, or an optimizer like it, on fragments of the parameters.

    What it saves bucket by bucket (``dp_reshardable``) megatron-core's own optimizer can load, and
    the other way round; all other forms are saved in the parameters' shapes. Arguments are those of
    ``DistributedOptimizer``.
    """

    optimizer: Any
    init_state_fn: Any

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
            sharding_type: Megatron's form; ``metadata["distrib_optim_sharding_type"]`` by default.
            metadata: The trainer's choices.
        """
        form = sharding_type or (metadata or {}).get("distrib_optim_sharding_type")
        if form == _BY_BUCKET and not is_loading:
            self.make_state_exist()
            saved: dict[str, Any] = DistributedOptimizer.sharded_state_dict(
                self, model_sharded_state_dict, metadata={"distrib_optim_sharding_type": form}
            )
            return saved
        state = super().sharded_state_dict(model_sharded_state_dict, is_loading)
        if form == _BY_BUCKET and self._requests is not None:
            self._requests.ask_by_bucket()
        return state

    def get_parameter_state_dp_reshardable(self) -> Any:
        """Return the fragments bucket by bucket.

        Megatron refuses an empty bucket, which a rank has whose shard is nothing but padding.
        """
        state = super().get_parameter_state_dp_reshardable()
        for number in range(len(self.buffers)):
            for buckets in state[number].values():
                for fragments in buckets:
                    if not fragments:
                        nothing = {"gbuf_local_start": 0, "gbuf_local_end": 0, "padding": True}
                        fragments.append(nothing)
        return state

    def make_state_exist(self) -> None:
        """Let every fragment have the state that it is about to load."""
        complete_state(self.optimizer, self.init_state_fn, self.config)
        dry_step(self.optimizer)

    def _set_steps(self, steps: int) -> None:
        set_steps(self.optimizer, steps)
