"""Reads the files of a checkpoint that are not tensors."""

import functools
import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from megatron_eopt.base.agreement import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's file with the iteration to load, which is written after the checkpoint."""

METADATA = ".metadata"
"""torch's file that says which tensors are in which files."""

CONFIG = "metadata.json"
"""megatron-core's file, which it writes last; only format ``torch_dist`` has it."""

RANK_FILE = "model_optim_rng.pt"
"""The trainer's file of a model-parallel rank in format ``torch``."""

_OF_OTHERS = {
    "trainer_state.json": (
        "is a checkpoint of Hugging Face's Trainer",
        "Pass it to the train() of a MuonTrainer as resume_from_checkpoint",
    ),
    "*.safetensors": (
        "has weights of Hugging Face alone, without optimizer state",
        "Convert them to Megatron's format, for example with Megatron-Bridge",
    ),
    "zero_to_fp32.py": (
        "is a checkpoint of DeepSpeed",
        "Convert its weights to Megatron's format; optimizer state starts fresh",
    ),
}
"""Files that only other programs write, with what a folder is that has one, and what to do."""


def form_of(folder: Path) -> str:
    """Return the format of a checkpoint: ``torch_dist``, ``torch`` or ``dcp``.

    ``dcp`` is what torch writes, also as ``fsdp_dtensor`` and ``torch_dcp``. megatron-core's other
    back ends have names of their own.

    Raises:
        CheckpointError: If it has none.
    """
    config = folder / CONFIG
    if config.exists():
        try:
            return str(json.loads(config.read_text())["sharded_backend"])
        except Exception as error:  # a damaged file can raise anything
            raise damaged(config, f"cannot be read ({text_of(error)})") from error
    if any(path.is_dir() for path in folder.glob("mp_rank_*")):
        return "torch"
    if (folder / METADATA).exists():
        return "dcp"
    for pattern, said in _OF_OTHERS.items():
        if next(folder.glob(pattern), None) is not None:
            raise CheckpointError("checkpoint", str(folder), *said)
    rule = f"is no complete checkpoint: it has neither {METADATA} nor mp_rank_*/{RANK_FILE}"
    raise damaged(folder, rule)


def read_tracker(tracker: Path) -> int | Literal["release"]:
    """Return the iteration that a tracker file names, or ``"release"``.

    Raises:
        CheckpointError: If the file says something else.
    """
    text = tracker.read_text(errors="replace").strip()
    if text == "release":
        return "release"
    if text.isdecimal() and text.isascii():
        return int(text)
    rule = f"must hold the number of an iteration, but holds {text[:40]!r}"
    hint = "Write the number of a complete iteration into this file, or pass --ckpt-step"
    raise CheckpointError("checkpoint", str(tracker), rule, hint)


def folder_name(iteration: int | Literal["release"]) -> str:
    """Return the name of an iteration's folder."""
    return iteration if iteration == "release" else f"iter_{iteration:07d}"


def read_metadata(folder: Path) -> Metadata:
    """Return what torch's metadata file says.

    Raises:
        CheckpointError: If the file cannot be read.
    """
    path = folder / METADATA
    try:
        _, metadata = content_of_metadata(folder)
    except Exception as error:  # a damaged file can raise anything
        raise damaged(path, f"cannot be read ({text_of(error)})") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise damaged(path, "is no metadata of torch")
    return metadata


def content_of_metadata(folder: Path) -> tuple[bytes, Any]:
    """Return the bytes of torch's metadata file, and what they are, read once in a load."""
    path = folder / METADATA
    stat = path.stat()
    return _content_of(path, (stat.st_ino, stat.st_mtime_ns, stat.st_size))


@functools.lru_cache(maxsize=1)
def _content_of(path: Path, version: tuple[int, ...]) -> tuple[bytes, Any]:
    content = path.read_bytes()
    return content, pickle.loads(content)


def forget_metadata() -> None:
    """Release the memory of what :func:`content_of_metadata` has read last."""
    _content_of.cache_clear()


def object_at(folder: Path, metadata: Metadata, key: str) -> Any:
    """Return an object of a checkpoint, which ``torch.save`` has written somewhere in a file.

    Raises:
        CheckpointError: If it cannot be read.
    """
    stored = metadata.storage_data[MetadataIndex(key)]
    path = folder / stored.relative_path
    try:
        with path.open("rb") as file:
            file.seek(stored.offset)
            content = io.BytesIO(file.read(stored.length))
        return torch.load(content, weights_only=True)
    except Exception as error:  # a damaged file can raise anything
        raise damaged(path, f"cannot be read ({type(error).__name__})") from error


def read_rank_file(path: Path) -> dict[str, Any]:
    """Return the state of a model-parallel rank; its tensors are read when they are used.

    Raises:
        CheckpointError: If the file is missing or damaged.
    """
    content = read_pt(path)
    if not isinstance(content, dict):
        raise damaged(path, f"contains a {type(content).__name__}, not a state dict")
    return content


def damaged(path: Path | str, rule: str) -> CheckpointError:
    """Return the error about a file or folder of a checkpoint."""
    hint = "Restore it, or load another iteration with --ckpt-step"
    return CheckpointError("checkpoint", str(path), rule, hint)


def text_of(error: BaseException) -> str:
    """Return an error for a message: its class, and the first line of what it says."""
    # the first line of torch's errors; others advise to turn safety off
    return f"{type(error).__name__}: {str(error).strip().partition('\n')[0]}"


def read_pt(path: Path) -> Any:
    """Return what ``torch.save`` has written; its tensors are read when they are used.

    Raises:
        CheckpointError: If the file is missing or damaged.
    """
    if not path.exists():
        raise damaged(path, "does not exist")
    try:
        # torch cannot map files of its old format
        return torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path))
    except Exception as error:  # a damaged file can raise anything
        raise damaged(path, f"cannot be read ({text_of(error)})") from error
