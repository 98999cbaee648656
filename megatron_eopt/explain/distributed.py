"""Checkpoints with torch's ``.metadata``: torch_dist, fsdp_dtensor, torch_dcp."""

import io
import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron_eopt.base.names import ELEMENT_WISE_STATE
from megatron_eopt.checkpoint import fsdp_dtensor
from megatron_eopt.checkpoint.groups import saved_groups
from megatron_eopt.checkpoint.keys import split_key
from megatron_eopt.explain.saved import Entry, Saved, Settings, broken, inner_name
from megatron_eopt.routing.groups import GROUP_ID

METADATA = ".metadata"
MARK = "metadata.json"
TORCH_DIST = "torch_dist"
BY_BUCKET = "dp_reshardable"
_COMMON = "common_state/shard_0_1"
_COMMON_FILE = "common.pt"
_IDENTITY = ("optimizer", "wd_mult", "lr_mult", "is_expert_parallel")
_EXPERTS = ".experts."


def read(folder: Path) -> Saved:
    """Return what the metadata of a distributed checkpoint says.

    Raises:
        ConfigurationError: If a file is missing, cut off or not to be understood.
    """
    backend = _backend(folder)
    if backend not in (None, TORCH_DIST):
        rule = f"its {MARK} names the format {backend!r}, which cannot be read"
        raise broken(folder, rule, f"Convert it to {TORCH_DIST} with the release that wrote it")
    metadata = _metadata(folder)
    if backend is None and not metadata.planner_data:
        raise broken(folder, f"lacks the file {MARK}: it was not finished")
    writers = _check_files(folder, metadata)
    items = metadata.state_dict_metadata
    tensors = {key: i for key, i in items.items() if isinstance(i, TensorStorageMetadata)}
    saved = Saved(folder, TORCH_DIST, writers=writers, storage=metadata.storage_data)
    saved.objects = sum(
        stored.length for at, stored in metadata.storage_data.items() if at.fqn not in tensors
    )
    if backend is None:
        _read_paths(saved, metadata.planner_data, tensors)
    else:
        _read_keys(saved, items, tensors)
    return saved


def _backend(folder: Path) -> Any:
    path = folder / MARK
    if not path.exists():
        return None
    try:
        return json.loads(path.read_bytes())["sharded_backend"]
    except (ValueError, KeyError, TypeError) as error:
        raise broken(folder, f"its {MARK} is damaged ({error})") from error


def _metadata(folder: Path) -> Metadata:
    if not (folder / METADATA).exists():
        raise broken(folder, f"lacks the file {METADATA}: it was not finished")
    try:
        return FileSystemReader(folder).read_metadata()
    except Exception as error:  # whatever a broken file makes the reader raise
        rule = f"its {METADATA} cannot be read ({type(error).__name__}: {error})"
        raise broken(folder, rule) from error


def _check_files(folder: Path, metadata: Metadata) -> int:
    """Return how many ranks wrote files; raise if one of these is missing or cut off."""
    ends: Counter[str] = Counter()
    for stored in metadata.storage_data.values():
        ends[stored.relative_path] = max(ends[stored.relative_path], stored.offset + stored.length)
    for name, end in sorted(ends.items()):
        path = folder / name
        if not path.exists():
            raise broken(folder, f"lacks the file {name}")
        if (size := path.stat().st_size) < end:
            raise broken(folder, f"its file {name} has {size} bytes instead of at least {end}")
    # __{rank}_{number}.distcp
    return len({name.rpartition("_")[0] for name in ends})


def _objects(saved: Saved, keys: Iterable[str]) -> dict[str, Any]:
    """Return objects as data; those that are none are noted."""
    found: dict[str, Any] = {}
    unread: dict[str, list[str]] = {}
    for key in keys:
        at = saved.storage[MetadataIndex(key)]
        with (saved.folder / at.relative_path).open("rb") as file:
            file.seek(at.offset)
            content = io.BytesIO(file.read(at.length))
        try:
            found[key] = torch.load(content, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever a broken or foreign file makes the reader raise
            unread.setdefault(_reason(error), []).append(key)
    saved.notes += [f"not read: {', '.join(its[:3])} ({why})" for why, its in unread.items()]
    return found


def _reason(error: BaseException) -> str:
    """Return what an error says first, or what it is that is no data."""
    lines = str(error).splitlines() or [type(error).__name__]
    unsafe = (line for line in lines if "Unsupported" in line)
    return next(unsafe, lines[0]).strip().partition(". ")[0]


# torch_dist: keys of megatron-core's


def _read_keys(saved: Saved, items: Collection[str], tensors: Mapping[str, Any]) -> None:
    for key, item in tensors.items():
        if split_key(key) is None:
            saved.entries.append(Entry(key, None, *_form_of(item), _stacked(item)))
    known = {str(entry.parameter): entry.stacked for entry in saved.entries}
    slabs = set()
    # matrices last: their parameters are known then, those apart from stacks of layers, too
    parted = [(parts, item) for key, item in tensors.items() if (parts := split_key(key))]
    for parts, item in sorted(parted, key=lambda pair: pair[0].of_matrix):
        name, kind = parts.name, parts.kind
        if kind is None:
            saved.entries.append(Entry(None, name.rpartition(".")[2], *_form_of(item)))
            continue
        if parts.of_matrix:
            slabs.add(_slabs(name))
        owner = _owner(name, known)
        if parts.of_matrix:
            name = owner
        # what is apart from a stack of layers has its dimensions, of one each
        stacked = 0 if parts.of_matrix else known.setdefault(name, known.get(owner, 0))
        saved.entries.append(Entry(name, kind, *_form_of(item), stacked, parts.of_matrix))
    saved.slabs = any(slabs)
    saved.tensor_parallel = max(slabs, default=0) or _cut(tensors)
    saved.common = _common(saved, items)
    state = saved.common.get("optimizer", {})
    groups = saved_groups(state)
    buckets = [key for key in items if _has_groups(key)] if not groups else []
    for value in _objects(saved, buckets).values():
        groups += saved_groups({"optimizer": value[0]})
    saved.groups = groups
    saved.form = _form(saved, state)


def _common(saved: Saved, items: Collection[str]) -> Mapping[str, Any]:
    path = saved.folder / _COMMON_FILE
    if not path.exists():
        found = _objects(saved, [_COMMON] if _COMMON in items else [])
        return found[_COMMON][0] if found else {}  # type: ignore[no-any-return]
    try:
        return torch.load(path, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    except Exception as error:  # whatever a broken or foreign file makes the reader raise
        saved.notes.append(f"not read: {_COMMON_FILE} ({_reason(error)})")
        return {}


def _has_groups(key: str) -> bool:
    parts = split_key(key)
    return parts is not None and parts.kind is None and parts.name.endswith(".optimizer")


def _form(saved: Saved, state: Mapping[Any, Any]) -> str | None:
    named = [state, *(part for part in state.values() if isinstance(part, Mapping))]
    forms = {part.get("param_state_sharding_type") for part in named} - {None}
    if any(entry.parameter is None for entry in saved.entries):
        forms.add(BY_BUCKET)
    if not forms and any(entry.kind is not None for entry in saved.entries):
        forms = {"by parameter"}
    return ", ".join(sorted(map(str, forms))) or None


def _form_of(item: Any) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(item.size), item.properties.dtype


def _stacked(item: Any) -> int:
    """Return the leading dimensions that number layers or experts: they are saved one by one."""
    sizes = zip(*(chunk.sizes for chunk in item.chunks), strict=True)
    wide = [at for at, extents in enumerate(sizes) if set(extents) != {1}]
    return min([*wide, max(len(item.size) - 1, 0)])


def _cut(tensors: Mapping[str, Any]) -> int | None:
    """Return into how many parts matrices are cut by columns: row-parallel layers alone are."""
    parts = [
        len({chunk.offsets[-1] for chunk in item.chunks})
        for key, item in tensors.items()
        if split_key(key) is None and _EXPERTS not in key and len(item.size) - _stacked(item) > 1
    ]
    return max(parts, default=None)


def _slabs(place: str) -> int:
    """Return of how many tensor-parallel slabs the place of a matrix's state names one, or 0."""
    rank, _, size = place.rpartition(".")[2].removeprefix("tp").partition("of")
    return int(size) if rank.isdigit() and size.isdigit() else 0


def _owner(place: str, known: Collection[str]) -> str:
    """Return the parameter whose matrix lies at ``place``."""
    words = place.split(".")
    for end in range(len(words), 0, -1):
        if (name := ".".join(words[:end])) in known:
            return name
    while words[1:] and (words[-1].isdigit() or _slabs(words[-1])):
        words.pop()
    name = ".".join(words)
    # some weights are saved in parts
    return next((part for part in known if part.startswith(f"{name}.")), name)


# fsdp_dtensor, torch_dcp: paths in nested state


def _read_paths(saved: Saved, paths: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    state: dict[tuple[str, ...], Any] = {}
    model: dict[str, Any] = {}
    named = any(_is_model(path) for path in paths.values())
    for key, item in tensors.items():
        place = _after("state", paths[key])
        if place is not None:
            state[place] = item
        elif _is_model(paths[key]) or not named:
            model[_model_name(paths[key])] = item
        else:
            saved.objects += math.prod(item.size) * item.properties.dtype.itemsize
    for name, item in model.items():
        saved.entries.append(Entry(name, None, *_form_of(item)))
    shapes = {name: tuple(item.size) for name, item in model.items()}
    for (name, *rest), item in state.items():
        kind = rest[-1].rpartition("/")[2]
        shape = tuple(item.size)
        other = kind not in ELEMENT_WISE_STATE and shape != shapes.get(inner_name(name))
        saved.entries.append(Entry(inner_name(name), kind, *_form_of(item), of_matrix=other))
    _read_settings(saved, paths)
    _read_lists(saved, paths)
    saved.common = _objects(saved, [key for key in ("args", "iteration") if key in paths])
    trainers = any(fsdp_dtensor.GROUPS in path for path in paths.values())
    saved.format = saved.argument("ckpt_format") or (
        fsdp_dtensor.FORMAT if trainers else "torch_dcp"
    )
    saved.form = saved.format if state else None


def _after(word: str, path: tuple[Any, ...]) -> tuple[str, ...] | None:
    """Return what follows a word in a path, if that are at least two."""
    if word not in path[:-2]:
        return None
    return tuple(map(str, path[path.index(word) + 1 :]))


def _is_model(path: tuple[Any, ...]) -> bool:
    return bool(path[0] == "model")


def _model_name(path: tuple[Any, ...]) -> str:
    return inner_name(".".join(map(str, path[1:] if _is_model(path) else path)))


def _read_settings(saved: Saved, paths: Mapping[str, Any]) -> None:
    """Read the group of every parameter, the settings of each group once."""
    fields: dict[str, dict[str, str]] = {}
    for key, path in paths.items():
        if (found := _after(fsdp_dtensor.GROUPS, path)) is not None:
            fields.setdefault(found[0], {})[found[1]] = key
    wanted = {
        name: [keys[f] for f in ((GROUP_ID,) if GROUP_ID in keys else _IDENTITY) if f in keys]
        for name, keys in fields.items()
    }
    values = _objects(saved, (key for keys in wanted.values() for key in keys))
    groups: dict[str, Settings] = {}
    for name, keys in wanted.items():
        identity = str([values.get(key) for key in keys])
        if identity not in groups:
            read = _objects(saved, fields[name].values())
            groups[identity] = {f: read[key] for f, key in fields[name].items() if key in read}
        # some weights are saved in two parts
        saved.group_of |= {inner_name(name) + half: groups[identity] for half in ("", "_w", "_v")}
    saved.groups += groups.values()


def _read_lists(saved: Saved, paths: Mapping[str, Any]) -> None:
    """Read the groups that torch's ``get_optimizer_state_dict`` returns."""
    places = {
        key: found
        for key, path in paths.items()
        if (found := _after("param_groups", path)) is not None
    }
    groups: dict[str, dict[str, Any]] = {}
    for key, value in _objects(saved, places).items():
        number, setting, *_ = places[key]
        groups.setdefault(number, {})[setting] = value
    for group in groups.values():
        names = group.pop("params", ())
        saved.groups.append(group)
        saved.group_of |= {inner_name(str(name)): group for name in names}
