"""Gathers what a checkpoint holds."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_eopt.explain import distributed, rank_files
from megatron_eopt.explain.routes import UNKNOWN, Parameter, name_of, parameters_of
from megatron_eopt.explain.saved import Entry, Saved, Settings, broken
from megatron_eopt.explain.targets import Target, targets_of
from megatron_eopt.routing.groups import GROUP_ID

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's file that names the newest whole checkpoint of a run, written last."""

_SIZES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "data": "data_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
}


@dataclass(frozen=True)
class Amount:
    """How much there is of something."""

    tensors: int
    elements: int
    bytes: int


@dataclass(frozen=True)
class State:
    """One kind of state that an optimizer keeps.

    Attributes:
        kind: Its name; ``param`` and ``fp32_param`` are main weights.
        dtypes: Data types of its tensors.
        amount: How much there is of it.
    """

    kind: str
    dtypes: tuple[str, ...]
    amount: Amount


@dataclass(frozen=True)
class Group:
    """A parameter group as it was saved."""

    identity: str | None
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Optimizer:
    """One optimizer of the run.

    Attributes:
        name: Its name; several with "or" where their state looks the same.
        parameters: How many parameters it steps.
        elements: How many numbers these have.
        states: Kinds of state.
        groups: Its parameter groups.
    """

    name: str
    parameters: int
    elements: int
    states: tuple[State, ...]
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Route:
    """Parameters that differ in numbers of layers and experts only.

    Attributes:
        name: Their name, with ``*`` for these numbers.
        count: How many parameters.
        shape: Of each.
        elements: Of all together.
        optimizer: Who steps them.
        group: Identity of their group, None where it is not recorded.
        kinds: Kinds of state.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    elements: int
    optimizer: str
    group: str | None
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """Sizes of parallelism, None for those that nothing tells.

    ``writers`` are the ranks that wrote files, of which there may have been more.
    """

    tensor: int | None = None
    pipeline: int | None = None
    context: int | None = None
    data: int | None = None
    expert: int | None = None
    expert_tensor: int | None = None
    writers: int = 0


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds.

    Attributes:
        folder: The folder that was read.
        format: The trainer's name of its format.
        form: How optimizer state is laid out, None where nothing tells.
        iteration: None where it is not recorded.
        model: The model's tensors.
        state: The optimizers' tensors.
        other_bytes: Of everything that is no tensor, the files' own structure included.
        optimizers: All optimizers, and what each keeps.
        routes: Which parameter goes to which optimizer.
        layout: The layout that wrote it.
        targets: Where it can be loaded.
        notes: What could not be read, and why.
    """

    folder: str
    format: str
    form: str | None
    iteration: int | None
    model: Amount
    state: Amount
    other_bytes: int
    optimizers: tuple[Optimizer, ...]
    routes: tuple[Route, ...]
    layout: Layout
    targets: tuple[Target, ...]
    notes: tuple[str, ...] = field(default=())


def explain(path: str | Path) -> Contents:
    """Return what a checkpoint holds, from its metadata alone.

    Args:
        path: Folder of a run, of which the checkpoint is explained that would be loaded; of one
            iteration; or whatever ``dist_checkpointing.save`` has written.

    Raises:
        ConfigurationError: If it holds no checkpoint, or a broken one; what is missing is named.
    """
    folder = _folder_in(Path(path))
    saved = _read(folder)
    saved.main = saved.argument("optimizer")
    parameters = parameters_of(saved)
    iteration = saved.common.get("iteration")
    return Contents(
        folder=str(folder),
        format=saved.format,
        form=saved.form,
        iteration=None if iteration is None else int(iteration),
        model=_amount(entry for entry in saved.entries if entry.kind is None),
        state=_amount(entry for entry in saved.entries if entry.kind is not None),
        other_bytes=saved.objects,
        optimizers=tuple(_optimizers(saved, parameters)),
        routes=tuple(_routes(parameters)),
        layout=_layout(saved),
        targets=targets_of(saved),
        notes=tuple(saved.notes),
    )


def _folder_in(path: Path) -> Path:
    """Return the folder of the checkpoint that ``path`` means."""
    way_out = "Name the folder of a run (--save), or of one of its iterations"
    if not path.is_dir():
        rule = "is a file, and a checkpoint is a folder" if path.exists() else "does not exist"
        raise broken(path, rule, way_out)
    if (tracker := path / TRACKER).exists():
        text = tracker.read_text(errors="replace").strip()
        folder = path / (f"iter_{int(text):07d}" if text.isdecimal() else text)
        if folder == path or not folder.is_dir():
            raise broken(
                path, f"its {TRACKER} names {text!r}, and there is no such folder", way_out
            )
        return folder
    if any(path.glob("iter_*")):
        raise broken(path, f"lacks {TRACKER}: no save has ever finished there", way_out)
    if not any(path.iterdir()):
        raise broken(path, "is empty", way_out)
    return path


def _read(folder: Path) -> Saved:
    names = [path.name for path in folder.iterdir()]
    if {distributed.MARK, distributed.METADATA} & set(names):
        return distributed.read(folder)
    if any(folder.glob(rank_files.FOLDERS)):
        return rank_files.read(folder)
    if any(folder.glob("*.distcp")):
        raise broken(folder, f"lacks the file {distributed.METADATA}: it was not finished")
    raise broken(
        folder,
        f"is no checkpoint: it has neither {TRACKER} nor {distributed.METADATA} nor folders "
        f"{rank_files.FOLDERS}",
        "Name the folder of a run (--save), or of one of its iterations",
    )


def _amount(entries: Iterable[Entry]) -> Amount:
    found = list(entries)
    sums = sum(entry.elements for entry in found), sum(entry.bytes for entry in found)
    return Amount(len(found), *sums)


def _optimizers(saved: Saved, parameters: list[Parameter]) -> Iterable[Optimizer]:
    owner = {item.name: item.optimizer for item in parameters}
    groups: dict[str, list[Settings]] = {}
    for group in saved.groups:
        groups.setdefault(name_of(group, saved), []).append(group)
    # buckets have one optimizer, or nothing says whose they are
    of_buckets = next(iter(groups)) if len(groups) == 1 else UNKNOWN
    entries: dict[str, list[Entry]] = {}
    for entry in saved.entries:
        if entry.kind is not None:
            entries.setdefault(owner.get(str(entry.parameter), of_buckets), []).append(entry)
    named = {name for label in entries for name in label.split(" or ")}
    for label in [*entries, *(name for name in groups if name not in named)]:
        own = [item for item in parameters if item.optimizer == label]
        yield Optimizer(
            name=label,
            parameters=sum(item.count for item in own),
            elements=sum(item.elements for item in own),
            states=tuple(_states(entries.get(label, []))),
            groups=tuple(
                Group(group.get(GROUP_ID), dict(group))
                for name in label.split(" or ")
                for group in groups.get(name, ())
            ),
        )


def _states(entries: list[Entry]) -> Iterable[State]:
    for kind in dict.fromkeys(str(entry.kind) for entry in entries):
        its = [entry for entry in entries if entry.kind == kind]
        dtypes = sorted({str(entry.dtype).removeprefix("torch.") for entry in its})
        yield State(kind, tuple(dtypes), _amount(its))


def _routes(parameters: list[Parameter]) -> Iterable[Route]:
    elements: Counter[tuple[Any, ...]] = Counter()
    counts: Counter[tuple[Any, ...]] = Counter()
    for item in parameters:
        kinds = tuple(sorted(item.kinds))
        line = (_pattern(item.name), item.shape, item.optimizer, item.group, kinds)
        elements[line] += item.elements
        counts[line] += item.count
    for (name, shape, optimizer, group, kinds), count in counts.items():
        total = elements[name, shape, optimizer, group, kinds]
        yield Route(name, count, shape, total, optimizer, group, kinds)


def _pattern(name: str) -> str:
    """Return a name with ``*`` for numbers; grouped experts have them after ``weight``."""
    *words, last = ("*" if word.isdigit() else word for word in name.split("."))
    bare = last.rstrip("0123456789")
    return ".".join([*words, last if bare == last else f"{bare}*"])


def _layout(saved: Saved) -> Layout:
    sizes = {field: saved.argument(name) for field, name in _SIZES.items()}
    if sizes["tensor"] is None:
        sizes["tensor"] = saved.tensor_parallel
    return Layout(**sizes, writers=saved.writers)
