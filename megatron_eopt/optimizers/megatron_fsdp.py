"""A torch optimizer of the shards that Megatron-FSDP's ``fully_shard_model`` has made."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from megatron_eopt.base.upstream import needed
from megatron_eopt.optimizers.sharded import ShardedOptimizer
from megatron_eopt.stores.megatron_fsdp import complete_gradients, compute_with_main_weights


class MegatronFSDPOptimizer(ShardedOptimizer):
    """Does by itself what ``fully_shard_optimizer`` makes other optimizers do; it is not for that.

    Args:
        managing: The modules that manage the parameters.
        args: As for any other optimizer of shards.
    """

    def __init__(self, managing: Sequence[Any], *args: Any) -> None:
        self._managing = list(managing)
        super().__init__(*args)

    def clip_grad_norm(self, max_norm: float, **options: Any) -> Tensor:
        """Clip as torch's ``clip_grad_norm_`` would, which hangs on shards that are empty.

        Returns:
            The norm before, on all ranks.
        """
        self._collect_gradients()
        norm: Any = clip_grad_norm_(self.names, max_norm, **options)
        return norm.full_tensor()  # type: ignore[no-any-return]

    def _collect_gradients(self) -> None:
        for module in self._managing:
            # backward passes since the last time; what is reduced twice is wrong
            if module.microbatch_count:
                module.finish_grad_sync()
        complete_gradients(self.names)

    def _step(self) -> None:
        """Wait for the gradients, step, and write the weights to the model."""
        self._collect_gradients()
        super()._step()
        for module in self._managing:
            module.install_optimized_model_weights()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, also where the model accumulates them."""
        super().zero_grad(set_to_none)
        for module in self._managing:
            module.zero_grad_buffer()

    def state_dict(self) -> dict[str, Any]:
        """Return groups and state, which torch's distributed checkpoint saves; collective."""
        prepared = needed("preprocess_state_dict_for_uneven_dtensor")
        state: dict[str, Any] = prepared(super().state_dict())
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over groups and state, and let the model compute with its weights; collective.

        Raises:
            ConfigurationError: If state of a parameter is missing.
        """
        super().load_state_dict(state_dict)
        for module in self._managing:
            compute_with_main_weights(module)
