"""What is found in a checkpoint, whatever its format, before anything is made of it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_eopt.base.errors import ConfigurationError

type Settings = Mapping[str, Any]
"""A parameter group, without its parameters."""


@dataclass(frozen=True)
class Entry:
    """One tensor, or the parts that several files hold of one.

    Attributes:
        parameter: Its parameter, None for a bucket of many.
        kind: Kind of optimizer state, None for a tensor of the model.
        shape: As it was saved.
        dtype: Its data type.
        stacked: Leading dimensions that number layers or experts.
        of_matrix: Whether it has other shapes than the parameter.
    """

    parameter: str | None
    kind: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    stacked: int = 0
    of_matrix: bool = False

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the elements."""
        return self.elements * self.dtype.itemsize


@dataclass
class Saved:
    """All that is found in the folder of a checkpoint.

    Attributes:
        folder: Holds the checkpoint.
        format: The trainer's name of its format.
        form: How optimizer state is laid out, None where nothing tells.
        entries: All tensors.
        groups: All parameter groups.
        group_of: The groups of parameters, where they are recorded.
        main: Name of the run's main optimizer.
        storage: Where its objects lie in files, by torch's index.
        common: What the trainer saved beside: arguments, iteration.
        objects: Bytes of everything that is no tensor.
        writers: How many ranks wrote tensors.
        tensor_parallel: As far as the tensors tell.
        slabs: Whether some state belongs to tensor-parallel slabs.
        notes: What could not be read.
    """

    folder: Path
    format: str
    form: str | None = None
    entries: list[Entry] = field(default_factory=list)
    groups: list[Settings] = field(default_factory=list)
    group_of: dict[str, Settings] = field(default_factory=dict)
    main: str | None = None
    storage: Mapping[Any, Any] = field(default_factory=dict)
    common: Mapping[str, Any] = field(default_factory=dict)
    objects: int = 0
    writers: int = 0
    tensor_parallel: int | None = None
    slabs: bool = False
    notes: list[str] = field(default_factory=list)

    def argument(self, name: str) -> Any:
        """Return one of the trainer's arguments, None if it is not recorded."""
        return getattr(self.common.get("args"), name, None)


def broken(
    folder: Path, rule: str, way_out: str = "Restore it, or name another iteration's folder"
) -> ConfigurationError:
    """Return the error for a folder that cannot be explained."""
    return ConfigurationError("checkpoint", str(folder), rule, way_out)


def inner_name(name: str) -> str:
    """Return a parameter's name without those of the wrappers around the model."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name
