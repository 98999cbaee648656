"""Random numbers of steps, the same on all ranks that hold copies of what is stepped."""

import zlib
from typing import Any

import torch

from megatron_eopt.base.names import STEP


def draw_alike(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer draw what follows from its first parameter's steps and from all shapes.

    Ranks with copies have those in common, whatever else they draw, and so has a run that goes on
    from a checkpoint. Nobody else's random numbers change.
    """
    forks = []

    def begin(bound: torch.optim.Optimizer, *_: Any) -> None:
        params = [param for group in bound.param_groups for param in group["params"]]
        steps = [int(bound.state[param].get(STEP, 0)) for param in params[:1]]
        seed = zlib.crc32(repr((steps, [tuple(param.shape) for param in params])).encode())
        gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        forks.append(torch.random.fork_rng(gpus))
        forks[-1].__enter__()
        torch.manual_seed(seed)

    def end(*_: Any) -> None:
        forks.pop().__exit__(None, None, None)

    optimizer.register_step_pre_hook(begin)
    optimizer.register_step_post_hook(end)
