"""Reads checkpoints as data: nothing that a file names is called, whatever pickle would allow.

torch's reader of distributed checkpoints unpickles the file ``.metadata`` and every object in the
shards without restriction. The readers here allow in ``.metadata`` what torch itself writes there,
and in objects what ``torch.load(weights_only=True)`` allows, megatron-core's additions included.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

_OF_METADATA = frozenset(
    [
        *(
            ("torch.distributed.checkpoint.planner", name)
            for name in (
                "BytesIOWriteData",
                "SavePlan",
                "TensorWriteData",
                "WriteItem",
                "WriteItemType",
            )
        ),
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("pathlib", "Path"),
        ("pathlib", "PosixPath"),
    ]
)
"""Classes and functions that the pickle of torch's metadata names, data types apart."""


class UnsafeCheckpointError(pickle.UnpicklingError):
    """A checkpoint holds something that is no data; nothing of it was called.

    Args:
        place: What part of which checkpoint.
        reason: What was found.
    """

    def __init__(self, place: str, reason: object) -> None:
        super().__init__(
            f"{place} was not loaded: {reason}. Nothing that it names was called. Load checkpoints "
            "of this project or of megatron-core, from a place that only you can write to."
        )


class WeightsOnlyReader(FileSystemReader):
    """Takes the place of torch's ``FileSystemReader``; its arguments are the same."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the file ``.metadata`` says.

        Raises:
            UnsafeCheckpointError: If it names anything that torch does not write there.
        """
        path = Path(str(self._get_metadata_path(kwargs.get("rank"))))
        with self.fs.create_stream(path, "rb") as file:
            metadata = _MetadataUnpickler(file, str(path)).load()
        if not isinstance(metadata, Metadata):
            raise UnsafeCheckpointError(str(path), f"it holds a {type(metadata).__name__}")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what ``plan`` asks for, objects as data only.

        Raises:
            UnsafeCheckpointError: If an object names anything that is not allowed.
        """
        return super().read_data(plan, _DataOnly(planner, str(self.path)))  # type: ignore[arg-type]


class CachedWeightsOnlyReader(CachedMetadataFileSystemReader, WeightsOnlyReader):  # type: ignore[misc]
    """Takes the place of megatron-core's reader that remembers the metadata."""


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: Any, place: str) -> None:
        super().__init__(file)
        self._place = place

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if is_dtype or (module, name) in _OF_METADATA:
            return super().find_class(module, name)
        raise UnsafeCheckpointError(self._place, f"it names {module}.{name}")


class _DataOnly:
    """A planner that gets only objects which this process has serialized itself."""

    def __init__(self, planner: LoadPlanner, place: str) -> None:
        self._planner = planner
        self._place = place

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            data = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            place = f"the object {read_item.storage_index.fqn!r} of {self._place}"
            raise UnsafeCheckpointError(place, error) from error
        # the planner unpickles what it gets, so it gets a pickle that was made here
        own = io.BytesIO()
        torch.save(data, own)
        own.seek(0)
        self._planner.load_bytes(read_item, own)
