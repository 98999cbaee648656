"""The format ``torch``: one file per model-parallel rank, which only the same layout can load."""

from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from megatron_eopt.base.agreement import CheckpointError, agreed, everyones
from megatron_eopt.checkpoint.rank_files import own_path
from megatron_eopt.checkpoint_files.content import describe
from megatron_eopt.checkpoint_files.manifest import Manifest

_COMPARED = ("parameters", "tensors", "digest")


def describe_model(model: Any) -> dict[str, Any]:
    """Return what a manifest says of ``model``, a list of chunks; all ranks call this together.

    That is nothing if the model is none of megatron-core's.
    """
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    chunks = unwrap_model(model)
    if not all(hasattr(chunk, "sharded_state_dict") for chunk in chunks):
        return {}
    described = describe([chunk.sharded_state_dict(metadata=metadata) for chunk in chunks])
    return {key: described[key] for key in _COMPARED}


def check_rank_files(folder: Path, manifest: Manifest | None, model: Any, args: Any) -> None:
    """Raise on every rank unless the files that the ranks are about to read are there and fit.

    Args:
        folder: Of the checkpoint.
        manifest: Its manifest, if it has one.
        model: List of model chunks.
        args: The trainer's.

    Raises:
        CheckpointError: If a rank has no file, or another model wrote the checkpoint.
    """
    missing = everyones(
        agreed(lambda: [name for name in _files(folder, args) if not (folder / name).exists()])
    )
    if missing:
        way_out = (
            "Load it with the optimizer, and at the tensor, pipeline, expert and data parallelism, "
            "that wrote it; only --ckpt-format torch_dist can change these"
        )
        if _model_file().name not in {Path(name).name for name in missing}:
            way_out += ". Or begin without its optimizer state: --no-load-optim"
        rule = f"has no file {', '.join(sorted(missing))}, which this layout reads"
        raise CheckpointError("checkpoint", str(folder), rule, way_out)
    if manifest is None or args.finetune or "digest" not in manifest.written_by:
        return
    present = describe_model(model)
    if present and present["digest"] != manifest.written_by["digest"]:
        raise CheckpointError(
            "checkpoint",
            str(folder),
            f"was written by another model, of {manifest.written_by['parameters']} parameters in "
            f"{manifest.written_by['tensors']} tensors; this one has {present['parameters']} in "
            f"{present['tensors']}, or other names and shapes",
            "Load it with the model's flags of the run that wrote it, or with --finetune",
        )


def _model_file() -> Path:
    from megatron.training.checkpointing import get_checkpoint_name

    return Path(get_checkpoint_name("", 0))


def _files(folder: Path, args: Any) -> list[str]:
    """Return the files that this rank reads, relative to ``folder``."""
    model_file = _model_file()
    found = [model_file]
    load_state = not (args.no_load_optim or args.finetune)
    layer_wise = getattr(args, "use_layer_wise_distributed_optimizer", False)
    if load_state and layer_wise and args.ckpt_format == "torch":
        rank = parallel_state.get_data_parallel_rank()
        name = own_path(str(folder / model_file.with_name(f"layer_wise_optimizer_{rank}.pt"))).name
        found.append(model_file.with_name(name))
    elif load_state and args.use_distributed_optimizer and _is_first_data_parallel_rank():
        found.append(model_file.with_name("distrib_optim.pt"))
    # without the folder of the iteration, which get_checkpoint_name puts first
    return [Path(*path.parts[1:]).as_posix() for path in found]


def _is_first_data_parallel_rank() -> bool:
    return bool(parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0)
