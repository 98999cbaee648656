"""One file a rank, for checkpoints of format ``torch``: loads at the layout that wrote it."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.storage.checkpoint.leaves import leaves, put
from megatron_eopt.storage.checkpoint.mixin import CheckpointMixin

__all__ = ["load_rank_file", "save_rank_file"]


def save_rank_file(
    filename: str, children: Sequence[CheckpointMixin], names: Mapping[Tensor, str]
) -> None:
    """Write this rank's state; collective over the world.

    Args:
        filename: Where to. Ranks that were given the same one write files of their own beside it.
        children: The optimizers of a chain.
        names: Names of the model's parameters.
    """
    path = _own_path(filename)
    content = {
        "rank": distributed.get_rank(),
        "ranks": distributed.get_world_size(),
        "optimizers": [_to_host(_content(child, names)) for child in children],
    }
    # a run that is killed while it writes leaves no broken file of this name
    unfinished = path.with_name(f"{path.name}.unfinished")
    torch.save(content, unfinished)
    os.replace(unfinished, path)


def load_rank_file(
    filename: str, children: Sequence[CheckpointMixin], names: Mapping[Tensor, str]
) -> None:
    """Read this rank's state; collective over the world.

    Args:
        filename: What was given to :func:`save_rank_file`.
        children: The optimizers of a chain.
        names: Names of the model's parameters.

    Raises:
        ConfigurationError: On every rank, if any rank's file is missing, broken or of another
            layout; nothing has been changed then.
    """
    path = _own_path(filename)
    content: Any = {}
    problem = ""
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
        problem = _mismatch(content, children, names)
    except Exception as error:  # whatever a broken file makes the reader raise
        problem = f"cannot be read: {error}"
    _agree(f"{path} {problem}" if problem else "")
    for child, saved in zip(children, content["optimizers"], strict=True):
        _take(child, saved, names)


def _content(child: CheckpointMixin, names: Mapping[Tensor, str]) -> dict[str, Any]:
    child.make_state_exist()
    return {
        "common": child.state_dict(),
        "fragments": {
            names[param]: {"range": list(child.held(param)), "state": child.tensors_of(param)}
            for param in child.params()
        },
        "matrices": {
            f"{names[item.param]}[{item.index}]": {
                "state": dict(leaves(item.state)),
                "group": dict(leaves({name: item.group[name] for name in item.counters})),
            }
            for item in child.owned_matrices()
        },
    }


def _mismatch(content: Any, children: Sequence[CheckpointMixin], names: Any) -> str:
    """Return what is wrong with a file; nothing if it is this rank's."""
    mine = [_content(child, names) for child in children]
    if len(content["optimizers"]) != len(mine):
        return f"holds {len(content['optimizers'])} optimizers and not {len(mine)}"
    for saved, own in zip(content["optimizers"], mine, strict=True):
        for kind in ("fragments", "matrices"):
            if _signature(saved[kind]) != _signature(own[kind]):
                return (
                    f"was written by rank {content['rank']} of {content['ranks']} at another "
                    f"layout, or by another model or optimizer: its {kind} differ"
                )
    return ""


def _signature(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: (
            entry.get("range"),
            sorted(
                (key, tuple(value.shape) if isinstance(value, Tensor) else None)
                for key, value in entry["state"].items()
            ),
        )
        for name, entry in entries.items()
    }


@torch.no_grad()
def _take(child: CheckpointMixin, saved: Mapping[str, Any], names: Mapping[Tensor, str]) -> None:
    for param in child.params():
        tensors = child.tensors_of(param)
        for kind, value in saved["fragments"][names[param]]["state"].items():
            tensors[kind].copy_(value)
        child.put_tensors(param, tensors)
    for item in child.owned_matrices():
        entry = saved["matrices"][f"{names[item.param]}[{item.index}]"]
        for target, values in ((item.state, entry["state"]), (item.group, entry["group"])):
            present = dict(leaves(target))
            for path, value in values.items():
                if isinstance(value, Tensor) and isinstance(present.get(path), Tensor):
                    present[path].copy_(value)
                else:
                    put(target, path, value)
    child.load_state_dict(saved["common"])


def _own_path(filename: str) -> Path:
    """Return a path that no other rank has."""
    path = Path(filename).absolute()
    everyones: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyones, str(path))
    if everyones.count(str(path)) == 1:
        return path
    return path.with_name(f"{path.stem}_rank{distributed.get_rank():05d}{path.suffix}")


def _agree(problem: str) -> None:
    everyones: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyones, problem)
    if any(everyones):
        raise ConfigurationError(
            "load",
            "; ".join(text for text in everyones if text),
            "the file must be what this rank wrote at this layout",
            "Resume at the layout that wrote it, use checkpoints of format torch_dist, which load "
            "at any layout, or load no optimizer state (--no-load-optim)",
        )


def _to_host(value: Any) -> Any:
    """Return nested values with tensors copied to the host, as tensors of nothing else."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _to_host(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_to_host(item) for item in value)
    return value
