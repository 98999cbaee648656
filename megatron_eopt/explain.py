"""What a checkpoint holds, and where it can be loaded, from its metadata.

No tensor is read, and no process group is needed. Objects are read as data. torch itself unpickles
its ``.metadata``, so explain only folders of a writer that you trust.
"""

import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import MAIN_OF_REPLICATED, MAIN_OF_SHARDED, MOMENT2, STEP
from megatron_eopt.checkpoint.groups import optimizers_of, saved_groups, saved_steps
from megatron_eopt.checkpoint.keys import split_key
from megatron_eopt.routing.groups import GROUP_ID

__all__ = ["Amount", "Contents", "Target", "explain", "show", "to_json"]

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's file that says which iteration to load; it is written last."""

_METADATA = ".metadata"
_COMMON_FILE, _COMMON_KEY = "common.pt", "common_state/shard_0_1"
_RANK_FILE = "model_optim_rng.pt"
_MAINS = {MAIN_OF_SHARDED, MAIN_OF_REPLICATED}
_FRESH = "--checkpoint-fresh-state"
_RECORDED = ("optimizer", STEP, GROUP_ID)
"""Settings of parameter groups that are read where each setting is an object of its own."""

_SIZES = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "CP": "context_parallel_size",
    "DP": "data_parallel_size",
    "EP": "expert_model_parallel_size",
    "ETP": "expert_tensor_parallel_size",
}


@dataclass
class Amount:
    """How much there is of the model, or of one kind of optimizer state."""

    dtypes: list[str] = field(default_factory=list)
    tensors: int = 0
    elements: int = 0
    bytes: int = 0

    def add(self, item: TensorStorageMetadata) -> None:
        """Count one more tensor."""
        dtype = item.properties.dtype
        self.dtypes = sorted({*self.dtypes, str(dtype).removeprefix("torch.")})
        self.tensors += 1
        self.elements += item.size.numel()
        self.bytes += item.size.numel() * dtype.itemsize

    def __str__(self) -> str:
        size = f"{self.elements:,} elements in {self.tensors:,} tensors, {decimal(self.bytes)}"
        return f"{', '.join(self.dtypes)}: {size}"


@dataclass(frozen=True)
class Target:
    """One way to load a checkpoint: into what, whether that works, and how to do it."""

    into: str
    loads: bool
    how: str


@dataclass
class Contents:
    """What a checkpoint holds.

    Attributes:
        folder: The folder that was read.
        format: The trainer's name of its format.
        iteration: None where it is not recorded.
        optimizers: Names of the optimizers, as far as they are recorded.
        step: Number of optimizer steps, 0 where it is not recorded.
        parallelism: Sizes of the run that wrote it, as far as they are recorded.
        model: The model's tensors.
        state: The optimizer's tensors by kind; ``param`` and ``fp32_param`` are main weights.
        by_bucket: Whether these are buckets of many parameters.
        matrix_kinds: Kinds that belong to whole matrices and have shapes of their own.
        slabs: The tensor parallelism that some state is bound to, 0 for none.
        targets: Where it can be loaded.
        notes: What could not be read, and why.
    """

    folder: str
    format: str
    iteration: int | None = None
    optimizers: list[str] = field(default_factory=list)
    step: int = 0
    parallelism: dict[str, int] = field(default_factory=dict)
    model: Amount = field(default_factory=Amount)
    state: dict[str, Amount] = field(default_factory=dict)
    by_bucket: bool = False
    matrix_kinds: list[str] = field(default_factory=list)
    slabs: int = 0
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def count(self, kind: str, item: TensorStorageMetadata) -> None:
        """Count a tensor of optimizer state."""
        self.state.setdefault(kind, Amount()).add(item)


def explain(path: str | Path) -> Contents:
    """Return what a checkpoint holds.

    Args:
        path: Folder of a run, of which the checkpoint is explained that would be loaded; of one
            iteration; or whatever ``dist_checkpointing.save`` has written.

    Raises:
        ConfigurationError: If it holds no checkpoint, or a broken one.
    """
    folder = _folder_in(Path(path))
    contents = Contents(str(folder), "torch_dist")
    if (folder / _METADATA).exists():
        metadata = _metadata(folder)
        read = _read_keys if (folder / "metadata.json").exists() else _read_paths
        common = read(contents, metadata)
    elif places := sorted(folder.glob(f"mp_rank_*/{_RANK_FILE}")):
        contents.format = "torch"
        common = _read_as_data(contents, places[0])
        _note_optimizer(contents, common.get("optimizer") or {})
    else:
        rule = f"is no finished checkpoint: it has neither {_METADATA} nor mp_rank_*/{_RANK_FILE}"
        raise _broken(folder, rule)
    args = common.get("args")
    iteration = common.get("iteration")
    contents.iteration = None if iteration is None else int(iteration)
    sizes = {short: getattr(args, name, None) for short, name in _SIZES.items()}
    contents.parallelism = {short: size for short, size in sizes.items() if size is not None}
    main = getattr(args, "optimizer", None)
    if main and main not in contents.optimizers:
        contents.optimizers.insert(0, main)
    contents.targets = list(_targets(contents))
    return contents


def _broken(folder: Path, rule: str) -> ConfigurationError:
    way_out = "Name the folder of a run (--save), or of one of its iterations"
    return ConfigurationError("checkpoint", str(folder), rule, way_out)


def _folder_in(path: Path) -> Path:
    """Return the folder of the checkpoint that ``path`` means."""
    if not path.is_dir():
        raise _broken(path, "is no folder")
    if (tracker := path / TRACKER).exists():
        text = tracker.read_text(errors="replace").strip()
        name = f"iter_{int(text):07d}" if text.isdecimal() else text
        if not name or not (path / name).is_dir():
            raise _broken(path, f"its {TRACKER} names {name!r}, which does not exist")
        return path / name
    if any(path.glob("iter_*")):
        raise _broken(path, f"lacks {TRACKER}: no save has ever finished there")
    return path


def _metadata(folder: Path) -> Metadata:
    """Return torch's metadata; raise if a file that it names is missing or cut off."""
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except Exception as error:  # whatever a broken file makes the reader raise
        rule = f"its {_METADATA} cannot be read ({type(error).__name__}: {error})"
        raise _broken(folder, rule) from error
    ends: Counter[str] = Counter()
    for stored in metadata.storage_data.values():
        ends[stored.relative_path] = max(ends[stored.relative_path], stored.offset + stored.length)
    for name, end in sorted(ends.items()):
        size = (folder / name).stat().st_size if (folder / name).exists() else 0
        if size < end:
            raise _broken(folder, f"its file {name} has {size} bytes instead of at least {end}")
    return metadata


def _read_as_data(contents: Contents, path: Path) -> Mapping[str, Any]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # type: ignore[no-any-return]
    except Exception as error:  # whatever a broken or foreign file makes the reader raise
        contents.notes.append(f"not read: {path.name} ({_reason(error)})")
        return {}


def _objects(contents: Contents, metadata: Metadata, keys: Iterable[str]) -> dict[str, Any]:
    """Return objects as data; those that are none are noted."""
    found: dict[str, Any] = {}
    unread: dict[str, list[str]] = {}
    for key in keys:
        at = metadata.storage_data[MetadataIndex(key)]
        with (Path(contents.folder) / at.relative_path).open("rb") as file:
            file.seek(at.offset)
            content = io.BytesIO(file.read(at.length))
        try:
            found[key] = torch.load(content, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever a broken or foreign file makes the reader raise
            unread.setdefault(_reason(error), []).append(key)
    for why, its in unread.items():
        contents.notes.append(f"not read: {', '.join(its[:3])} ({why})")
    return found


def _reason(error: BaseException) -> str:
    """Return what an error says first, or what it is that is no data."""
    lines = str(error).splitlines() or [type(error).__name__]
    unsafe = (line for line in lines if "Unsupported" in line)
    return next(unsafe, lines[0]).strip().partition(". ")[0]


def _note_optimizer(contents: Contents, state: Any) -> None:
    """Note the optimizers and steps of a chain's state, or of one group."""
    if isinstance(state, list | tuple):
        state = dict(enumerate(state))
    names = optimizers_of(saved_groups(state)) - {None}
    contents.optimizers = sorted({*contents.optimizers, *map(str, names)})
    contents.step = max(contents.step, saved_steps(state))


def _read_keys(contents: Contents, metadata: Metadata) -> Mapping[str, Any]:
    """Read the format ``torch_dist`` of megatron-core; return the trainer's common state."""
    folder, items = Path(contents.folder), metadata.state_dict_metadata
    buckets, matrix_kinds = [], set()
    for key, item in items.items():
        parts = split_key(key)
        if not isinstance(item, TensorStorageMetadata):
            if parts and parts.kind is None and parts.name.endswith(".optimizer"):
                buckets.append(key)
        elif parts is None:
            contents.model.add(item)
        else:
            contents.by_bucket |= parts.kind is None
            contents.count(parts.kind or parts.name.rpartition(".")[2], item)
            if parts.of_matrix and parts.kind:
                matrix_kinds.add(parts.kind)
                contents.slabs = max(contents.slabs, _slabs(parts.name))
    contents.matrix_kinds = sorted(matrix_kinds)
    if (folder / _COMMON_FILE).exists():
        common = _read_as_data(contents, folder / _COMMON_FILE)
    else:
        read = _objects(contents, metadata, [_COMMON_KEY] if _COMMON_KEY in items else [])
        common = read[_COMMON_KEY][0] if read else {}
    _note_optimizer(contents, common.get("optimizer") or {})
    for value in _objects(contents, metadata, buckets).values():
        _note_optimizer(contents, {"optimizer": value[0]})
    return common


def _slabs(place: str) -> int:
    """Return of how many tensor-parallel slabs the place of a matrix's state names one, or 0."""
    rank, _, size = place.rpartition(".")[2].removeprefix("tp").partition("of")
    return int(size) if rank.isdigit() and size.isdigit() else 0


def _read_paths(contents: Contents, metadata: Metadata) -> Mapping[str, Any]:
    """Read what torch itself has saved: ``fsdp_dtensor`` of the trainer, or ``torch_dcp``."""
    paths = {key: tuple(map(str, path)) for key, path in (metadata.planner_data or {}).items()}
    if not paths:
        raise _broken(Path(contents.folder), "lacks the file metadata.json: it was not finished")
    settings = []
    for key, path in paths.items():
        item = metadata.state_dict_metadata.get(key)
        if path[-1] in _RECORDED and {"param_groups", "param_to_group_meta"} & set(path):
            settings.append(key)
        elif isinstance(item, TensorStorageMetadata):
            if "state" in path[:-2]:
                contents.count(path[-1].rpartition("/")[2], item)
            else:
                contents.model.add(item)
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for key, value in _objects(contents, metadata, settings).items():
        groups.setdefault(paths[key][:-1], {})[paths[key][-1]] = value
    _note_optimizer(contents, {"param_groups": list(groups.values())})
    common = _objects(contents, metadata, [key for key in ("args", "iteration") if key in paths])
    trainers = any("param_to_group_meta" in path for path in paths.values())
    usual = "fsdp_dtensor" if trainers else "torch_dcp"
    contents.format = getattr(common.get("args"), "ckpt_format", usual)
    return common


def _targets(contents: Contents) -> Iterator[Target]:
    """Yield where a checkpoint loads; docs/checkpoints.md has the reasons."""
    if contents.format == "torch":
        yield Target("the layout and optimizers that wrote it", True, "--ckpt-format torch")
        how = "load it here, and save it with --ckpt-format torch_dist"
        yield Target("another layout, storage or optimizer", False, how)
    elif contents.format == "fsdp_dtensor":
        flags = "--use-megatron-fsdp --ckpt-format fsdp_dtensor"
        yield Target("Megatron-FSDP on other numbers of ranks", True, flags)
        yield Target("DDP, torch FSDP2", False, "they take torch_dist")
    elif contents.format != "torch_dist":
        yield Target(
            "torch FSDP2 in your own program, any number of ranks",
            True,
            "set_optimizer_state_dict of torch.distributed.checkpoint.state_dict",
        )
        yield Target("Megatron's trainer", False, "it takes torch_dist")
    elif not contents.state:
        yield Target("any layout", True, "--ckpt-format torch_dist --no-load-optim")
    else:
        yield from _layouts(contents)
        yield Target("Megatron-FSDP", False, "it takes fsdp_dtensor")
        yield from _other_optimizers(contents)


def _layouts(contents: Contents) -> Iterator[Target]:
    if contents.by_bucket:
        yield Target("another data parallelism", True, "--use-distributed-optimizer")
        how = "the model alone: --no-load-optim; or write --dist-ckpt-optim-fully-reshardable"
        yield Target("another TP, PP or EP, or plain storage", False, how)
        return
    anew = f"to start it fresh: {_FRESH} {' '.join(contents.matrix_kinds)}"
    if contents.slabs:
        yield Target("any data, pipeline and expert parallelism", True, "--ckpt-format torch_dist")
        how = f"some state belongs to {contents.slabs} slabs; {anew}"
        yield Target("another tensor parallelism", False, how)
    else:
        into = "any tensor, pipeline, expert and data parallelism"
        yield Target(into, True, "--ckpt-format torch_dist")
    # Muon's statistics are put together for any storage
    loads = not set(contents.matrix_kinds) - {MOMENT2}
    how = "with or without --use-distributed-optimizer" if loads else f"matrices differ; {anew}"
    yield Target("the other storage", loads, how)


def _other_optimizers(contents: Contents) -> Iterator[Target]:
    kinds = ", ".join(sorted(set(contents.state) - _MAINS))
    if kinds:
        how = "it starts fresh; Muon's momentum from Adam's: --checkpoint-momentum-from-adam"
        yield Target(f"an optimizer without {kinds}", True, how)
        yield Target("one with some of these", True, "what it does not use is left out")
        how = f"to start those fresh: {_FRESH} KINDS"
        yield Target("one with some of these and others", False, how)


def show(contents: Contents, console: Console) -> None:
    """Print a table of what a checkpoint holds."""
    sizes = ", ".join(f"{name} {size}" for name, size in contents.parallelism.items())
    rows = {
        "format": contents.format,
        "iteration": contents.iteration,
        "optimizers": ", ".join(contents.optimizers),
        "optimizer steps": contents.step or None,
        "written at": sizes,
        "model": contents.model if contents.model.tensors else None,
        **{f"state {kind}": amount for kind, amount in contents.state.items()},
    }
    table = Table("", "", title=Text(contents.folder), show_header=False)
    for name, value in rows.items():
        table.add_row(name, Text("not recorded" if value in (None, "") else str(value)))
    table.add_section()
    for target in contents.targets:
        verdict = "loads into" if target.loads else "not into"
        table.add_row(verdict, Text(f"{target.into}: {target.how}"))
    for note in contents.notes:
        table.add_row("note", Text(note))
    console.print(table)


def to_json(contents: Contents) -> str:
    """Return what a checkpoint holds as JSON, for programs."""
    return json.dumps(asdict(contents), indent=1)
