"""Read from a checkpoint's metadata what it contains and where it can be loaded.

No tensor is read, but all files are checked. torch unpickles ``.metadata`` unchecked, so the
checkpoint must be trusted.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import MOMENT2
from megatron_eopt.checkpoint.catalogue import Catalogue, read_catalogue
from megatron_eopt.checkpoint.keys import Saved
from megatron_eopt.guard.contents import TRACKER, folder_name, read_tracker
from megatron_eopt.guard.files import check
from megatron_eopt.guard.saves import whole
from megatron_eopt.state.groups import saved_steps
from megatron_eopt.state.rule import optimizer_of

_LOADS = {
    "torch": "at the same layout (--ckpt-format torch); to change it, load it there first and save "
    "it with --ckpt-format torch_dist",
    "fsdp_dtensor": "into Megatron-FSDP on any number of ranks (--use-megatron-fsdp --ckpt-format "
    "fsdp_dtensor); not into DDP or torch FSDP2",
    "torch_dcp": "into torch FSDP2 in your own training loop, on any number of ranks "
    "(set_optimizer_state_dict); not into Megatron's trainer",
}
"""Where checkpoints load, by format, except ``torch_dist``; see docs/how_to/checkpoints.md."""

_SIZES = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "CP": "context_parallel_size",
    "DP": "data_parallel_size",
    "EP": "expert_model_parallel_size",
    "ETP": "expert_tensor_parallel_size",
}


@dataclass
class SavedAmount:
    """Size of the model, or of one kind of optimizer state."""

    dtypes: list[str] = field(default_factory=list)
    tensors: int = 0
    elements: int = 0
    bytes: int = 0

    def add(self, item: Saved) -> None:
        """Count a tensor."""
        assert item.shape is not None
        assert item.dtype is not None
        elements = math.prod(item.shape)
        self.dtypes = sorted({*self.dtypes, str(item.dtype).removeprefix("torch.")})
        self.tensors += 1
        self.elements += elements
        self.bytes += elements * item.dtype.itemsize

    def __str__(self) -> str:
        size = f"{self.elements:,} elements in {self.tensors:,} tensors, {decimal(self.bytes)}"
        return f"{', '.join(self.dtypes)}: {size}"


@dataclass
class CheckpointSummary:
    """What a checkpoint contains, as far as its metadata says."""

    folder: str  # the folder that was read
    format: str  # the value of ``--ckpt-format``, or ``torch_dcp`` for your own training loop
    iteration: int | None = None  # None if it is not recorded
    optimizers: list[str] = field(default_factory=list)  # names of the optimizers
    step: int = 0  # number of optimizer steps, 0 if it is not recorded
    parallelism: dict[str, int] = field(default_factory=dict)  # parallel sizes, as {"TP": 2, ...}
    model: SavedAmount = field(default_factory=SavedAmount)  # the model's tensors
    # the optimizer's tensors by kind; ``param`` and ``fp32_param`` are main weights
    state: dict[str, SavedAmount] = field(default_factory=dict)
    loads: list[str] = field(default_factory=list)  # where it can be loaded, one sentence each


def explain(path: str | Path) -> CheckpointSummary:
    """Return what a checkpoint contains and where it can be loaded.

    Args:
        path: A run's folder (its latest checkpoint is read), the folder of one iteration, or one
            that ``dist_checkpointing.save`` or ``torch.distributed.checkpoint`` has written.

    Raises:
        ConfigurationError: If the folder has no complete checkpoint, or a file is damaged.
    """
    folder = _folder_in(Path(path))
    check(folder)
    catalogue = read_catalogue(folder)
    summary, common = CheckpointSummary(str(folder), catalogue.form), catalogue.common
    _note_values(summary, catalogue)
    state = common.get("optimizer") or {}
    summary.optimizers = sorted(set(filter(None, map(optimizer_of, catalogue.groups))))
    summary.step = saved_steps(state)
    args = common.get("args")
    iteration = common.get("iteration")
    summary.iteration = None if iteration is None else int(iteration)
    sizes = {short: getattr(args, name, None) for short, name in _SIZES.items()}
    summary.parallelism = {short: size for short, size in sizes.items() if size is not None}
    summary.loads = summary.loads or [_LOADS[summary.format]]
    return summary


def _broken(folder: Path, rule: str) -> ConfigurationError:
    hint = "Pass the folder of a run (its --save), or of one of its iterations"
    return ConfigurationError("checkpoint", str(folder), rule, hint)


def _folder_in(path: Path) -> Path:
    """Return the checkpoint's folder: ``path``, or its latest iteration, where it is complete."""
    if not path.is_dir():
        raise _broken(path, "is not a folder")
    if (tracker := path / TRACKER).exists():
        name = folder_name(read_tracker(tracker))
        path = path / name
        if not whole(path).is_dir():
            raise _broken(path.parent, f"its {TRACKER} names {name}, which does not exist")
    elif any(path.glob("iter_*")):
        raise _broken(path, f"lacks {TRACKER}, so no save to this folder has finished")
    return whole(path)


def _note_values(summary: CheckpointSummary, catalogue: Catalogue) -> None:
    """Add a checkpoint's tensors, and where they can be loaded."""
    tensors = [value for value in catalogue.values.values() if value.shape is not None]
    for value in tensors:
        kind = value.kind or ""
        if catalogue.form != "torch_dist":
            # the matrix's name is first
            kind = kind.rpartition("/")[2]
        amount = summary.state.setdefault(kind, SavedAmount()) if kind else summary.model
        amount.add(value)
    if catalogue.form == "torch_dist":
        of_matrices = sorted({value.kind or "" for value in tensors if value.of_matrix})
        slabs = max((value.slabs for value in tensors), default=0)
        by_bucket = bool(catalogue.in_buckets)
        summary.loads = list(_where_it_loads(of_matrices, slabs, by_bucket=by_bucket))


def _where_it_loads(of_matrices: Sequence[str], slabs: int, *, by_bucket: bool) -> Iterator[str]:
    if by_bucket:
        yield "at any data parallelism, and the same TP, PP and EP; save it once to change them"
        return
    yield "at any tensor, pipeline, expert and data parallelism; not into Megatron-FSDP"
    kinds = " ".join(of_matrices)
    hint = "unless you reset them: --no-load-optim"
    if slabs:
        yield f"but {kinds} of tensor-parallel weights only at TP {slabs}, {hint}"
    # adaptive Muon's second moments load with either setting
    if set(of_matrices) - {MOMENT2}:
        yield f"but {kinds} only with the same --use-distributed-optimizer setting, {hint}"


def show(summary: CheckpointSummary, console: Console) -> None:
    """Print what a checkpoint contains as a table."""
    sizes = ", ".join(f"{name} {size}" for name, size in summary.parallelism.items())
    rows = {
        "format": summary.format,
        "iteration": summary.iteration,
        "optimizers": ", ".join(summary.optimizers),
        "optimizer steps": summary.step or None,
        "written at": sizes,
        "model": summary.model if summary.model.tensors else None,
        **{f"state {kind}": amount for kind, amount in summary.state.items()},
    }
    table = Table("", "", title=Text(summary.folder), show_header=False)
    for name, value in rows.items():
        table.add_row(name, Text("not recorded" if value in (None, "") else str(value)))
    table.add_section()
    for text in summary.loads:
        table.add_row("loads", Text(text))
    console.print(table)
