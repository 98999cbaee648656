"""megatron-core's optimizer wrappers, whose parameter groups keep their identity over a resume."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

from megatron_eopt.assembly.plain.checkpoint import PlainCheckpoint
from megatron_eopt.assembly.plain.groups import resumed_settings
from megatron_eopt.routing.groups import GROUP_ID
from megatron_eopt.storage.non_finite import WatchedGradients


def adopt_present_settings(
    saved: Sequence[Mapping[str, Any]], present: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return saved parameter groups with the present run's settings.

    megatron-core matches groups by their numbers, learning rates among them, and so refuses to
    resume with another learning rate. Here groups match by identity, and the numbers by which
    megatron-core would compare them become those of the present run. Groups without an identity,
    from a checkpoint of megatron-core's own optimizers, only get the name of their optimizer.

    Args:
        saved: Groups of a checkpoint.
        present: Groups of the optimizer that is about to load them.
    """
    by_identity = {group[GROUP_ID]: group for group in present if GROUP_ID in group}
    result = []
    for group in saved:
        settings = dict(group)
        twin = by_identity.get(group.get(GROUP_ID))
        if twin is not None:
            settings = {**resumed_settings(group, twin), "params": group["params"]}
        elif GROUP_ID not in group and by_identity:
            optimizers = {item["optimizer"] for item in present}
            if len(optimizers) == 1:
                settings.setdefault("optimizer", optimizers.pop())
        result.append(settings)
    return result


class _StableGroups:
    """Matches saved parameter groups by identity; stands before a wrapper in its bases."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load ``state_dict``, which is not changed; see :func:`adopt_present_settings`."""
        wrapper: Any = self
        inner = state_dict.get("optimizer", state_dict)
        if "param_groups" in inner and not wrapper.is_stub_optimizer:
            present = wrapper.optimizer.param_groups
            groups = adopt_present_settings(inner["param_groups"], present)
            inner = {**inner, "param_groups": groups}
            state_dict = {**state_dict, "optimizer": inner} if "optimizer" in state_dict else inner
        super().load_state_dict(state_dict)  # type: ignore[misc]


class MainParamsOptimizer(PlainCheckpoint, WatchedGradients, Float16OptimizerWithFloat16Params):
    """For bf16 and fp16: steps on float32 copies of the parameters."""


class Float32Optimizer(PlainCheckpoint, WatchedGradients, FP32Optimizer):
    """For float32: steps on the parameters themselves."""


class OffloadedOptimizer(_StableGroups, WatchedGradients, DistributedOptimizer):
    """Steps on fragments of the parameters, whose state is partly in the host's memory."""
