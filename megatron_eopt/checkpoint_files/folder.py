"""Saving to a folder and loading from it, verified; the public pair of functions."""

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import serialization

from megatron_eopt.base.agreement import from_rank_0
from megatron_eopt.checkpoint.loading import load as load_matched
from megatron_eopt.checkpoint_files.content import describe
from megatron_eopt.checkpoint_files.folders import clear
from megatron_eopt.checkpoint_files.manifest import verify, write_manifest


def load(
    sharded_state_dict: dict[str, Any], folder: str | Path, *, digests: bool = True, **kwargs: Any
) -> Any:
    """Verify the files of a checkpoint, then do :func:`megatron_eopt.checkpoints.load`.

    All ranks call this together.

    Args:
        sharded_state_dict: What is asked for; optimizers' requests in it are adapted in place.
        folder: Holds the checkpoint.
        digests: Whether to read all files and compare their digests with the manifest; sizes are
            compared in any case.
        kwargs: Further arguments of :func:`megatron_eopt.checkpoints.load`.

    Returns:
        What ``dist_checkpointing.load`` returns.

    Raises:
        CheckpointError: On every rank, if a file is missing or damaged, or the checkpoint does not
            fit what is asked for.
        ConfigurationError: On every rank, if an optimizer's state is missing.
    """
    verify(Path(folder), digests=digests)
    return load_matched(sharded_state_dict, folder, **kwargs)


def save(sharded_state_dict: dict[str, Any], folder: str | Path, **kwargs: Any) -> Any:
    """Save a checkpoint as ``dist_checkpointing.save`` does, with a manifest of its files.

    What an earlier save, finished or killed, has left in ``folder`` is removed before. All ranks
    call this together.

    Args:
        sharded_state_dict: What to save.
        folder: Where; made if it does not exist.
        kwargs: Further arguments of ``dist_checkpointing.save``.

    Returns:
        What ``dist_checkpointing.save`` returns: with ``async_sharded_save`` the request to
        schedule. The manifest is then written when the request is finalized.
    """
    return save_with(serialization.save, {}, sharded_state_dict, folder, **kwargs)


def save_with(
    save_sharded: Any,
    written_by: dict[str, Any],
    sharded_state_dict: dict[str, Any],
    folder: str | Path,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Do :func:`save` with another function in place of ``dist_checkpointing.save``.

    Args:
        save_sharded: That function.
        written_by: What the manifest says of the run besides its model.
        sharded_state_dict: What to save.
        folder: Where.
        args: Further arguments of ``save_sharded``.
        kwargs: Further arguments of ``save_sharded``.
    """
    path = Path(folder)
    from_rank_0(lambda: _prepare(path))
    description = {**written_by, **describe(sharded_state_dict)}
    request = save_sharded(sharded_state_dict, str(path), *args, **kwargs)
    if request is None:
        write_manifest(path, description)
    else:
        request.add_finalize_fn(lambda: write_manifest(path, description))
    return request


def _prepare(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    clear(folder)
