"""One file a rank, for checkpoints of format ``torch``: loads at the layout that wrote it."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from megatron_eopt.base.agreement import of_every_rank
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import STEP
from megatron_eopt.checkpoint.optimizer_state import (
    adopt_common,
    common_state,
    counts_of,
    prepare,
    set_all_steps,
    settle,
)
from megatron_eopt.checkpoint.saved_state import cut_like_weights, kept_of
from megatron_eopt.optimizers.driver import OF_GROUPS, Kept, set_step
from megatron_eopt.optimizers.member import Member
from megatron_eopt.stores.interface import Stored


def save_rank_file(filename: str, members: Sequence[Member], names: Mapping[Tensor, str]) -> None:
    """Write this rank's state; collective over the world.

    Ranks that were given the same file name write files of their own beside it.
    """
    path = own_path(filename)
    content = {
        "rank": distributed.get_rank(),
        "ranks": distributed.get_world_size(),
        "optimizers": [_to_host(_content(member, names)) for member in members],
    }
    # a run that is killed while it writes leaves no broken file of this name
    unfinished = path.with_name(f"{path.name}.unfinished")
    torch.save(content, unfinished)
    os.replace(unfinished, path)
    settle(members)


@torch.no_grad()
def load_rank_file(filename: str, members: Sequence[Member], names: Mapping[Tensor, str]) -> None:
    """Read what :func:`save_rank_file` wrote of this rank's state; collective over the world.

    Raises:
        ConfigurationError: On every rank, if any rank's file is missing, broken or of another
            layout; nothing has been changed then.
    """
    path = own_path(filename)
    mine = [_content(member, names) for member in members]
    content: Any = {}
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
        problem = _mismatch(content, mine)
    except Exception as error:  # whatever a broken file makes the reader raise
        problem = f"cannot be read: {error}"
    if problems := [text for text in of_every_rank(problem and f"{path} {problem}") if text]:
        raise ConfigurationError(
            "load",
            "; ".join(problems),
            "the file must be what this rank wrote at this layout",
            "Resume at the layout that wrote it, use checkpoints of format torch_dist, which load "
            "at any layout, or load no optimizer state (--no-load-optim)",
        )
    saved = content["optimizers"]
    for member, its in zip(members, saved, strict=True):
        for item, tensors in _stored(member):
            for kind, value in tensors.items():
                value.copy_(its["fragments"][names[item.param]]["state"][kind])
        for _, param, kept in kept_of(member):
            name, part, path_there = _place(names[param], kept)
            kept.replace(its["matrices"][name][part][path_there])
    common = dict(enumerate(item["common"] for item in saved))
    adopt_common(members, common)
    set_all_steps(members, common)
    for member, its in zip(members, saved, strict=True):
        for found, steps in zip(_counting(member), its["steps"], strict=True):
            set_step(found, steps)
    settle(members)


def _content(member: Member, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """Return what a file has of one optimizer; tensors are the ones that are stepped."""
    prepare([member], is_loading=True)
    matrices: dict[str, Any] = {}
    for _, param, item in kept_of(member):
        name, part, path = _place(names[param], item)
        matrices.setdefault(name, {"state": {}, "group": {}})[part][path] = item.value
    return {
        "common": common_state([member], counts=counts_of([member])),
        "steps": [int(found[STEP]) for found in _counting(member)],
        "fragments": {
            names[item.param]: {"range": [item.start, item.stop], "state": tensors}
            for item, tensors in _stored(member)
        },
        "matrices": matrices,
    }


def _counting(member: Member) -> Iterator[dict[str, Any]]:
    """Yield what has a count of steps, in an order that depends on the layout alone."""
    for driver in member.drivers:
        with member.scene(driver) as (groups, state):
            yield from driver.counting(groups, state)


def _stored(member: Member) -> Iterator[tuple[Stored, dict[str, Tensor]]]:
    """Yield what this rank stores, with all that is cut like the weights."""
    stepped = {id(main): (driver, number) for driver, number, main in member.stepped()}
    for item in member.storage.stored():
        driver, number = stepped[id(item.main)]
        yield item, cut_like_weights(member, item, driver, number)


def _place(param: str, item: Kept) -> tuple[str, str, tuple[str, ...]]:
    """Return where a file has a value: the matrix, the part of its entry, the path there."""
    name = f"{param}[{item.matrix}]"
    of_group = item.path[0] == OF_GROUPS
    return (name, "group", item.path[1:]) if of_group else (name, "state", item.path)


def _mismatch(content: Any, mine: Sequence[Mapping[str, Any]]) -> str:
    """Return what is wrong with a file; nothing if it is this rank's."""
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
            {
                key: tuple(value.shape) if isinstance(value, Tensor) else None
                for key, value in entry["state"].items()
                # steps are counted for all together
                if key not in (STEP, (STEP,))
            },
        )
        for name, entry in entries.items()
    }


def own_path(filename: str) -> Path:
    """Return a path that no other rank has."""
    path = Path(filename).absolute()
    if of_every_rank(str(path)).count(str(path)) == 1:
        return path
    return path.with_name(f"{path.stem}_rank{distributed.get_rank():05d}{path.suffix}")


def _to_host(value: Any) -> Any:
    """Return nested values with tensors copied to the host, as tensors of nothing else."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _to_host(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_to_host(item) for item in value)
    return value
