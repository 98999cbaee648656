"""Finds missing and damaged files of a checkpoint before anything is loaded from it.

Small files are read. Of files with tensors, the length is checked, and the start of the first and
the end of the last tensor. Fingerprints tell whether all files are of the same save.
"""

import functools
import io
import json
import logging
import operator
import pickle
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import load_common_state_dict
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from megatron_eopt.base.agreement import (
    CheckpointError,
    from_rank_0,
    gather_objects,
    gather_unique,
    raise_together,
)
from megatron_eopt.checkpoint.fingerprints import (
    FINGERPRINTS,
    ZIP_START,
    Slice,
    fingerprint,
    read_fingerprints,
    write_fingerprints,
)
from megatron_eopt.checkpoint.unfinished import TRACKER, complete_folder, mend_tracker
from megatron_eopt.optimizers.saved_groups import groups_in

logger = logging.getLogger(__name__)

METADATA = ".metadata"
"""torch's file that says which tensors are in which files."""

CONFIG = "metadata.json"
"""megatron-core's file, which it writes last; only format ``torch_dist`` has it."""

_COMMON_STATE = "common_state/shard_0_1"
"""megatron-core's key of what all ranks share."""

RANK_FILE = "model_optim_rng.pt"
"""The trainer's file of a model-parallel rank in format ``torch``."""

_COMMON = "common.pt"
_ZIP_END, _ZIP_END_BYTES = b"PK\x05\x06", 22


@dataclass(frozen=True)
class Files:
    """What a checkpoint consists of."""

    form: str  # ``torch_dist``, ``torch`` or ``dcp`` (``fsdp_dtensor`` and ``torch_dcp``)
    # files with tensors, with the slices of all tensors in each, in order
    tensors: Mapping[Path, tuple[Slice, ...]] = field(default_factory=dict)
    ranks: tuple[Path, ...] = ()  # folders of model-parallel ranks
    small: tuple[Path, ...] = ()  # files that say what the others contain


def check_all(folder: Path) -> Files:
    """Check all files of a checkpoint; collective over the world, whose ranks share the work.

    Raises:
        CheckpointError: If a file is missing, damaged or of another save; names it.
    """
    files, wanted = from_rank_0(lambda: (_complete_files_in(folder), _noted_in(folder)))
    raise_together(lambda: _check_share(files))
    found = raise_together(lambda: _fingerprints_of_share(folder, files) if wanted else {})
    now = dict(gather_unique(found.items()))
    foreign = sorted(name for name in now.keys() & wanted.keys() if now[name] != wanted[name])
    # all saves write the same configuration
    old, new = ({each[name] for name in each if name != CONFIG} for each in (wanted, now))
    if len(foreign) > 1 and not old & new:
        text = "all files are of a later save, by a program without this package"
        from_rank_0(lambda: logger.warning("%s: %s", folder / FINGERPRINTS, text))
    elif foreign:
        others = f", and so are {len(foreign) - 1} other files" if foreign[1:] else ""
        rule = f"is not the file that the save of this checkpoint wrote{others}"
        hint = (
            "Restore it, or load another iteration with --ckpt-step. If you have changed files on "
            f"purpose, remove {FINGERPRINTS}"
        )
        raise CheckpointError("checkpoint", str(folder / foreign[0]), rule, hint)
    return files


def note_fingerprints(folder: Path) -> None:
    """Write down which files a save has written, when all are there; collective over the world.

    Raises:
        CheckpointError: If a file is missing or damaged.
    """
    # one rank lists the folder, which on a shared file system may look different to others
    files = from_rank_0(lambda: _files_in(folder))
    mine = raise_together(lambda: _fingerprints_of_share(folder, files))
    found = functools.reduce(operator.or_, gather_objects(mine))
    from_rank_0(lambda: write_fingerprints(folder, found))


def check_tracked(folder: Path) -> None:
    """Check that a run's folder says which of its checkpoints is the latest.

    Raises:
        CheckpointError: If it has a complete checkpoint, but no tracker file.
    """
    mend_tracker(folder)
    tracker = folder / TRACKER
    if tracker.exists():
        return
    found = (complete_folder(path) for path in sorted(folder.glob("iter_*"), reverse=True))
    latest = next((path for path in found if path is not None and _is_readable(path)), None)
    if latest is not None:
        rule = f"does not exist, but {latest.name} is a complete checkpoint"
        hint = "Write its number into this file, pass --ckpt-step, or load from another folder"
        raise CheckpointError("checkpoint", str(tracker), rule, hint)


def check_rank_has_file(folder: Path) -> None:
    """Check that a model-parallel rank has a file in a checkpoint of format ``torch``.

    Raises:
        CheckpointError: If it has none.
    """
    if not (folder / RANK_FILE).exists():
        rule = "does not exist, and format torch loads only at the layout that wrote it"
        hint = "Load at that layout, then save with --ckpt-format torch_dist"
        raise CheckpointError("checkpoint", str(folder / RANK_FILE), rule, hint)


def read_metadata(folder: Path) -> Metadata:
    """Return what torch's metadata file says.

    Raises:
        CheckpointError: If the file cannot be read.
    """
    path = folder / METADATA
    try:
        stat = path.stat()
        # as long as the file is the same; a load asks for it more than once
        metadata = _unpickled_metadata(path, (stat.st_ino, stat.st_mtime_ns, stat.st_size))
    except Exception as error:  # a damaged file can raise anything
        raise damaged(path, f"cannot be read ({_text(error)})") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise damaged(path, "is no metadata of torch")
    return metadata


@functools.lru_cache(maxsize=1)
def _unpickled_metadata(path: Path, version: tuple[int, ...]) -> Any:
    with path.open("rb") as file:
        return pickle.load(file)


def forget_metadata() -> None:
    """Release the memory of what :func:`read_metadata` has read last."""
    _unpickled_metadata.cache_clear()


def object_at(folder: Path, metadata: Metadata, key: str) -> Any:
    """Return an object of a checkpoint, which ``torch.save`` has written somewhere in a file.

    Raises:
        CheckpointError: If it cannot be read.
    """
    at = metadata.storage_data[MetadataIndex(key)]
    path = folder / at.relative_path
    try:
        with path.open("rb") as file:
            file.seek(at.offset)
            content = io.BytesIO(file.read(at.length))
        return torch.load(content, weights_only=True)
    except Exception as error:  # a damaged file can raise anything
        raise damaged(path, f"cannot be read ({type(error).__name__})") from error


def read_rank_file(path: Path) -> dict[str, Any]:
    """Return the state of a model-parallel rank; its tensors are read when they are used.

    Raises:
        CheckpointError: If the file is missing or damaged.
    """
    content = _unpickled(path)
    if not isinstance(content, dict):
        raise damaged(path, f"contains a {type(content).__name__}, not a state dict")
    return content


def read_common_state(folder: Path) -> Mapping[str, Any]:
    """Return the state that all ranks of a ``torch_dist`` checkpoint share.

    Raises:
        CheckpointError: If it cannot be read.
    """
    if (folder / METADATA).exists():
        metadata = read_metadata(folder)
        if MetadataIndex(_COMMON_STATE) in metadata.storage_data:
            (common,) = object_at(folder, metadata, _COMMON_STATE)
            return common  # type: ignore[no-any-return]
    try:
        # a file beside it, as older versions wrote
        return load_common_state_dict(folder)  # type: ignore[no-any-return]
    # torch's own error is no Exception
    except (Exception, CheckpointException) as error:
        raise damaged(folder, f"its common state cannot be read ({_text(error)})") from error


def damaged(path: Path | str, rule: str) -> CheckpointError:
    """Return the error about a file or folder of a checkpoint."""
    hint = "Restore it, or load another iteration with --ckpt-step"
    return CheckpointError("checkpoint", str(path), rule, hint)


def _text(error: BaseException) -> str:
    # the first line of torch's errors; others advise to turn safety off
    return f"{type(error).__name__}: {str(error).strip().partition('\n')[0]}"


def _unpickled(path: Path) -> Any:
    if not path.exists():
        raise damaged(path, "does not exist")
    try:
        # torch cannot map files of its old format
        return torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path))
    except Exception as error:  # a damaged file can raise anything
        raise damaged(path, f"cannot be read ({_text(error)})") from error


def _complete_files_in(folder: Path) -> Files:
    """Return the files that a complete checkpoint has, reading only small ones."""
    if not folder.is_dir():
        raise damaged(folder, "does not exist")
    if complete_folder(folder) is None:
        raise damaged(folder, "is no complete checkpoint: a save to this folder has not finished")
    return _files_in(folder)


def _files_in(folder: Path) -> Files:
    """Return the files that a save writes to a folder."""
    metadata_file, config = folder / METADATA, folder / CONFIG
    if config.exists():
        # other back ends have files of their own, which are not checked
        if _backend_of(config) != "torch_dist":
            return Files("torch_dist")
        tensors = _tensors_in(folder, read_metadata(folder))
        return Files("torch_dist", tensors, small=(metadata_file, config))
    if ranks := tuple(sorted(path for path in folder.glob("mp_rank_*") if path.is_dir())):
        return Files("torch", ranks=ranks)
    if not metadata_file.exists():
        rule = f"is no complete checkpoint: it has neither {METADATA} nor mp_rank_*/{RANK_FILE}"
        raise damaged(folder, rule)
    metadata = read_metadata(folder)
    # torch notes how to nest the keys, megatron-core does not
    if not metadata.planner_data:
        raise damaged(folder, f"lacks the file {CONFIG}, which a save of torch_dist writes last")
    return Files("dcp", _tensors_in(folder, metadata), small=(metadata_file,))


def _is_readable(folder: Path) -> bool:
    try:
        _complete_files_in(folder)
    except CheckpointError:
        return False
    return True


def _backend_of(path: Path) -> str:
    try:
        return str(json.loads(path.read_text())["sharded_backend"])
    except Exception as error:  # a damaged file can raise anything
        raise damaged(path, f"cannot be read ({_text(error)})") from error


def _noted_in(folder: Path) -> dict[str, str]:
    try:
        return read_fingerprints(folder)
    except Exception as error:  # a damaged file can raise anything
        raise damaged(folder / FINGERPRINTS, f"cannot be read ({_text(error)})") from error


def _tensors_in(folder: Path, metadata: Metadata) -> dict[Path, tuple[Slice, ...]]:
    """Return the files with tensors, with the slices of all tensors in each."""
    found: dict[Path, list[Slice]] = {}
    for item in metadata.storage_data.values():
        # a compressed tensor does not start and end as torch writes it
        if not getattr(item, "transform_descriptors", None):
            found.setdefault(folder / item.relative_path, []).append((item.offset, item.length))
    # tensors are written one after another, so the last one ends where the file does
    return {path: tuple(sorted(slices)) for path, slices in found.items()}


def _share(paths: Collection[Path]) -> list[Path]:
    """Return this rank's share of paths."""
    alone = not distributed.is_initialized()
    rank, world = (0, 1) if alone else (distributed.get_rank(), distributed.get_world_size())
    return sorted(paths)[rank::world]


def _check_share(files: Files) -> None:
    """Check this rank's share of a checkpoint's files."""
    for path in _share(files.tensors):
        _check_tensors(path, files.tensors[path][0], files.tensors[path][-1])
    for folder in _share(files.ranks):
        _check_rank_folder(folder, [path.name for path in files.ranks])


def _fingerprints_of_share(folder: Path, files: Files) -> dict[str, str]:
    """Return fingerprints of this rank's share of a checkpoint's files, by relative path."""
    paths = [*files.small, *files.tensors, *(p for rank in files.ranks for p in rank.glob("*.pt"))]
    share = [(path, str(path.relative_to(folder))) for path in _share(paths)]
    return {name: fingerprint(path, files.tensors.get(path, ())) for path, name in share}


def _check_tensors(path: Path, first: Slice, last: Slice) -> None:
    if not path.exists():
        raise damaged(path, "does not exist")
    # offset plus length of the last tensor
    size, wanted = path.stat().st_size, sum(last)
    if size < wanted:
        raise damaged(path, f"has {size:,} of {wanted:,} bytes")
    with path.open("rb") as file:
        file.seek(first[0])
        start = file.read(len(ZIP_START))
        # torch saves each tensor as a zip archive, which ends with a record of this size
        file.seek(wanted - _ZIP_END_BYTES, io.SEEK_SET)
        end = file.read(len(_ZIP_END))
    if (start, end) != (ZIP_START, _ZIP_END):
        raise damaged(path, "does not contain the tensors that the metadata names")


def _check_rank_folder(folder: Path, present: Collection[str]) -> None:
    """Check the files of a model-parallel rank in format ``torch``."""
    content = read_rank_file(folder / RANK_FILE)
    for path in folder.glob("*.pt"):
        _unpickled(path)
    args = content.get("args")
    for name in _rank_folders(args):
        if not any(_begins(other, name) for other in present):
            raise damaged(folder.with_name(name), "does not exist")
    # a rank without trained parameters saves no groups, and so no further files
    if not groups_in(content.get("optimizer")):
        return
    if getattr(args, "use_layer_wise_distributed_optimizer", False):
        _check_layer_wise(folder, args)
    elif getattr(args, "use_distributed_optimizer", False):
        _unpickled(folder / "distrib_optim.pt")


def _check_layer_wise(folder: Path, args: Any) -> None:
    """Check that each data-parallel rank has a file, among the folders of all expert ranks."""
    name = next((name for name in _rank_folders(args) if _begins(folder.name, name)), folder.name)
    for rank in range(getattr(args, "data_parallel_size", 1)):
        file = f"layer_wise_optimizer_{rank}"
        # context-parallel ranks add their number to a common name
        names = (f"{name}*/{file}.pt", f"{name}*/{file}_rank*.pt")
        found = [path for pattern in names for path in folder.parent.glob(pattern)]
        if len(found) < getattr(args, "context_parallel_size", 1):
            raise damaged(folder / f"{file}.pt", "does not exist")


def _rank_folders(args: Any) -> Iterator[str]:
    """Yield how the folders of tensor- and pipeline-parallel ranks begin."""
    stages = getattr(args, "pipeline_model_parallel_size", 1)
    for tensor in range(getattr(args, "tensor_model_parallel_size", 1)):
        for stage in range(stages):
            yield f"mp_rank_{tensor:02d}" + (f"_{stage:03d}" if stages > 1 else "")


def _begins(folder: str, name: str) -> bool:
    return folder == name or folder.startswith(f"{name}_")
