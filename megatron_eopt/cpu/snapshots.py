"""What a process that lives on is handed to write, copied as a GPU's tensors are.

Megatron's persistent worker of asynchronous checkpoints gets tensors by their memory. Those of a
GPU it copies to the host before training goes on; a CPU has nowhere to copy them from, so that it
would write what training changes meanwhile.
"""

import functools
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
from torch.utils._pytree import tree_map_only

from megatron_eopt.cpu.patches import Patch


def snapshot_patches() -> list[Patch]:
    """Return the replacement that hands over copies."""
    plain = PersistentAsyncCaller.schedule_async_call

    @functools.wraps(plain)
    def schedule_async_call(self: Any, async_req: Any) -> None:
        plain(self, of_now(async_req))

    return [Patch(PersistentAsyncCaller, plain.__name__, schedule_async_call)]


def of_now(request: Any) -> Any:
    """Return a request whose tensors are copies."""
    # the arguments and what stages them hold the same
    copies: dict[int, torch.Tensor] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().clone()
        return copies[id(tensor)]

    def copy(arguments: Any) -> Any:
        return tree_map_only(torch.Tensor, copied, arguments)

    stage = request.preload_fn
    if stage is not None:
        stage = functools.partial(stage.func, *copy(stage.args), **copy(stage.keywords))
    return request._replace(async_fn_args=copy(request.async_fn_args), preload_fn=stage)
