"""Makes the state exist of optimizers that make it in their first step."""

from typing import Any

import torch

from megatron_eopt.base.errors import ConfigurationError

__all__ = ["dry_step"]


@torch.no_grad()
def dry_step(optimizer: Any) -> None:
    """Let every parameter without state have one of the right shape, whose values do not matter.

    Loading needs places to load to. The optimizer steps with zero gradients; parameters, gradients
    and groups are put back.

    Args:
        optimizer: A torch optimizer.

    Raises:
        ConfigurationError: If it cannot step with zero gradients.
    """
    everything = [param for group in optimizer.param_groups for param in group["params"]]
    bare = [param for param in everything if not optimizer.state[param]]
    if not bare:
        return
    values = [param.detach().clone() for param in bare]
    grads = [param.grad for param in everything]
    groups = [dict(group) for group in optimizer.param_groups]
    for param in everything:
        param.grad = None
    for param in bare:
        param.grad = torch.zeros_like(param)
    try:
        optimizer.step()
    except Exception as error:
        raise ConfigurationError(
            "optimizers",
            type(optimizer).__name__,
            f"makes its state in its first step, which failed with zero gradients: {error}",
            "Give it a function that makes its state exist (init_state_fn)",
        ) from error
    finally:
        for param, value in zip(bare, values, strict=True):
            param.detach().copy_(value)
        for param, grad in zip(everything, grads, strict=True):
            param.grad = grad
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.update(before)
