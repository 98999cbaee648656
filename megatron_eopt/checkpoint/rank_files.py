"""One file per rank, for checkpoints of format ``torch``; loads only at the same parallel layout.

It has the content of a distributed checkpoint in which this rank's parameters are unsharded.
"""

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor, distributed

from megatron_eopt.base.agreement import gather_objects, gather_unique, raise_together
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.checkpoint.catalogue import Catalogue, by_key
from megatron_eopt.checkpoint.contents import Piece, key_of
from megatron_eopt.checkpoint.continuation import Policy, log_notes
from megatron_eopt.checkpoint.keys import split_key
from megatron_eopt.checkpoint.optimizer_state import (
    PARAM_STATE,
    REQUESTS,
    load,
    pack_loaded,
    requested,
)
from megatron_eopt.optimizers.storage import Storage
from megatron_eopt.routing.plain_names import bare


def save_rank_file(filename: str, storages: Sequence[Storage], names: Mapping[Tensor, str]) -> None:
    """Write this rank's state; collective over the world.

    If ranks pass the same file name, each adds its rank to the name.
    """
    path = own_path(filename)
    state = requested(storages, _model_of(names), is_loading=False, policy=Policy())
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
        # copies, because torch.save would write the whole storage of a view
        "pieces": {
            _name_of(piece): piece.data.detach().to("cpu", copy=True)
            if isinstance(piece.data, Tensor)
            else piece.data
            for piece in pieces
        },
    }
    # a run that is killed while it writes must not leave a broken file under this name
    unfinished = path.with_name(f"{path.name}.unfinished")
    torch.save(content, unfinished)
    os.replace(unfinished, path)


def load_rank_file(
    filename: str, storages: Sequence[Storage], names: Mapping[Tensor, str], policy: Policy
) -> None:
    """Load this rank's file of :func:`save_rank_file`; collective over the world.

    Raises:
        ConfigurationError: On every rank, if a file is missing, broken or of another layout, or
            lacks state that the policy does not name.
    """
    path = own_path(filename)
    state = requested(storages, _model_of(names), is_loading=True, policy=policy)
    # no ``dist_checkpointing.load`` unwraps it here
    requests = state[REQUESTS] = state[REQUESTS].obj
    catalogue, pieces = raise_together(lambda: _content(path))
    notes = raise_together(lambda: requests.adapt(catalogue, policy))
    values = raise_together(
        lambda: _taken(path, state[PARAM_STATE]["values"], pieces, {*names.values()})
    )
    log_notes(gather_unique(notes))
    loaded = {**catalogue.common, REQUESTS: requests, PARAM_STATE: {"values": values}}
    raise_together(lambda: load(storages, loaded))
    pack_loaded(storages)


def _content(path: Path) -> tuple[Catalogue, dict[str, Any]]:
    """Return what a file has, and the pieces in it."""
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
        values = {k: by_key(k, shape) for k, shape in _unwrapped(content["shapes"]).items()}
        return Catalogue("torch", values, content["common"]), _unwrapped(content["pieces"])
    except Exception as error:  # a broken file can raise anything
        raise _other(path, f"cannot be read: {error!r}") from error


def _taken(
    path: Path,
    wanted: Mapping[str, Mapping[str, Piece]],
    pieces: Mapping[str, Any],
    names: Collection[str],
) -> dict[str, dict[str, Any]]:
    """Return what a file has for the pieces of all values."""
    asked = {_name_of(piece) for values in wanted.values() for piece in values.values()}
    if lacking := asked - pieces.keys():
        raise _other(path, f"lacks {min(lacking)}")
    # state of an optimizer that a parameter had before may be left, of no other layout or model
    read = {name.partition(" (")[0] for name in asked}
    for name in sorted(pieces.keys() - asked):
        key = name.partition(" (")[0]
        parts = split_key(key)
        if key in read or parts is None or parts.name not in names:
            raise _other(path, f"has state that this rank does not need: {name}")
    return {
        index: {number: pieces[_name_of(piece)] for number, piece in values.items()}
        for index, values in wanted.items()
    }


def _other(path: Path, problem: str) -> ConfigurationError:
    return ConfigurationError(
        "load",
        f"{path} {problem}",
        "the file must be what this rank wrote at this layout, of the same model",
        "Resume at the layout that wrote it, use --ckpt-format torch_dist, which loads at any "
        "layout, or load no optimizer state (--no-load-optim)",
    )


def _model_of(names: Mapping[Tensor, str]) -> dict[str, ShardedTensor]:
    """Return a model state in which this rank's parameters are unsharded."""
    params = _unwrapped({name: param for param, name in names.items()})
    return {
        name: ShardedTensor.from_rank_offsets(name, param, replica_id=(0, 0, 0))
        for name, param in params.items()
    }


def _unwrapped(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by keys without wrappers, unless these are ambiguous."""
    counts = Counter(map(bare, named))
    return {bare(k) if counts[bare(k)] == 1 else k: value for k, value in named.items()}


def _name_of(piece: Piece) -> str:
    """Return the name of a piece in the file."""
    if isinstance(piece, ShardedTensor):
        return f"{piece.key} {tuple(piece.local_shape)} from {tuple(piece.global_offset)}"
    return key_of(piece)


def own_path(filename: str) -> Path:
    """Return a path that no other rank uses."""
    path = Path(filename).absolute()
    if gather_objects(str(path)).count(str(path)) == 1:
        return path
    return path.with_name(f"{path.stem}_rank{distributed.get_rank():05d}{path.suffix}")
