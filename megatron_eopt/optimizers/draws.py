"""Random numbers of steps, the same on all ranks that hold copies of what is stepped."""

import zlib
from typing import Any

import torch

from megatron_eopt.base.names import STEP


def draw_alike(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer step one parameter after another, drawing by its shape and count of steps.

    Copies have those in common on all ranks, at any layout, and in a run that goes on from a
    checkpoint; parameters of one shape draw the same. Nobody else's random numbers change. Steps
    are counted here if the class does not (PSGD's stay 0 in emerging-optimizers 0.3).
    """
    step = optimizer.step

    def step_one(param: torch.Tensor) -> None:
        state: dict[str, Any] = optimizer.state[param]
        steps = int(state.get(STEP, 0))
        torch.manual_seed(zlib.crc32(repr((steps, tuple(param.shape))).encode()))
        step()
        if state.setdefault(STEP, 0) == steps:
            state[STEP] += 1

    def step_all() -> None:
        groups = list(optimizer.param_groups)
        gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(gpus):
            try:
                for group in groups:
                    stepped: dict[str, Any] = {}
                    for param in group["params"]:
                        if param.grad is not None:
                            stepped = {**group, "params": [param]}
                            optimizer.param_groups = [stepped]
                            step_one(param)
                    # what a step writes to its group, a count of steps, it writes once
                    group |= {**stepped, "params": group["params"]}
            finally:
                optimizer.param_groups = groups

    optimizer.step = step_all  # type: ignore[assignment, method-assign]
