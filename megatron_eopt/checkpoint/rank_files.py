"""One file a rank, for checkpoints of format ``torch``: loads at the layout that wrote it.

It holds what a distributed checkpoint would, of a model in which this rank's parameters are whole.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor, distributed

from megatron_eopt.base.agreement import agreed, of_every_rank
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.checkpoint.contents import Contents, Piece, key_of
from megatron_eopt.checkpoint.migration import Policy
from megatron_eopt.checkpoint.optimizer_state import (
    PARAM_STATE,
    REQUESTS,
    load,
    requested,
    settle,
)
from megatron_eopt.optimizers.stepper import Stepper


def save_rank_file(filename: str, steppers: Sequence[Stepper], names: Mapping[Tensor, str]) -> None:
    """Write this rank's state; collective over the world.

    Ranks that were given the same file name write files of their own beside it.
    """
    path = own_path(filename)
    state = requested(steppers, _model_of(names), is_loading=False, policy=Policy())
    pieces = [
        piece
        for by_number in state.pop(PARAM_STATE)["values"].values()
        for piece in by_number.values()
    ]
    content = {
        "common": state,
        "shapes": {
            key_of(piece): tuple(piece.global_shape) if isinstance(piece, ShardedTensor) else None
            for piece in pieces
        },
        # as tensors of nothing else
        "pieces": {
            _place(piece): piece.data.detach().to("cpu", copy=True)
            if isinstance(piece.data, Tensor)
            else piece.data
            for piece in pieces
        },
    }
    # a run that is killed while it writes leaves no broken file of this name
    unfinished = path.with_name(f"{path.name}.unfinished")
    torch.save(content, unfinished)
    os.replace(unfinished, path)


def load_rank_file(filename: str, steppers: Sequence[Stepper], names: Mapping[Tensor, str]) -> None:
    """Read what :func:`save_rank_file` wrote of this rank's state; collective over the world.

    Raises:
        ConfigurationError: On every rank, if any rank's file is missing, broken or of another
            layout.
    """
    path = own_path(filename)
    state = requested(steppers, _model_of(names), is_loading=True, policy=Policy())
    state[REQUESTS] = state[REQUESTS].obj
    loaded = agreed(lambda: _read(path, state))
    agreed(lambda: load(steppers, loaded))
    settle(steppers)


def _read(path: Path, state: Mapping[str, Any]) -> dict[Any, Any]:
    """Return what a file has of what is asked for."""
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
        state[REQUESTS].adapt(Contents(content["shapes"]), Policy())
        wanted, there = state[PARAM_STATE]["values"], content["pieces"]
        values = {
            place: {number: there.pop(_place(piece)) for number, piece in pieces.items()}
            for place, pieces in wanted.items()
        }
        problem = f"has what this rank does not ask for: {next(iter(there), '')}" if there else ""
    except Exception as error:  # whatever a broken file makes the reader raise
        problem = f"cannot be read: {error!r}"
    if problem:
        raise ConfigurationError(
            "load",
            f"{path} {problem}",
            "the file must be what this rank wrote at this layout, of the same model and optimizer",
            "Resume at the layout that wrote it, use checkpoints of format torch_dist, which load "
            "at any layout, or load no optimizer state (--no-load-optim)",
        )
    return {**content["common"], REQUESTS: state[REQUESTS], PARAM_STATE: {"values": values}}


def _model_of(names: Mapping[Tensor, str]) -> dict[str, ShardedTensor]:
    """Return the state of a model in which this rank's parameters are whole."""
    return {
        name: ShardedTensor.from_rank_offsets(name, param, replica_id=(0, 0, 0))
        for param, name in names.items()
    }


def _place(piece: Piece) -> str:
    """Return the name of a box of a tensor, or of an object."""
    if isinstance(piece, ShardedTensor):
        return f"{piece.key} {tuple(piece.local_shape)} from {tuple(piece.global_offset)}"
    return key_of(piece)


def own_path(filename: str) -> Path:
    """Return a path that no other rank has."""
    path = Path(filename).absolute()
    if of_every_rank(str(path)).count(str(path)) == 1:
        return path
    return path.with_name(f"{path.stem}_rank{distributed.get_rank():05d}{path.suffix}")
