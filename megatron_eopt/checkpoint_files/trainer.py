"""Files of Megatron-LM's checkpoints: functions of its ``checkpointing``, wrapped.

Saving: the folder is cleared, the trainer writes, the manifest follows, then the tracker file.
Loading: a folder is chosen, its files are verified, and only then the trainer reads, as data.
"""

import functools
from pathlib import Path
from typing import Any

from megatron.core.msc_utils import MaybeMultiStorageClient, MultiStorageClientFeature

from megatron_eopt.base.agreement import CheckpointError, from_rank_0
from megatron_eopt.base.upstream import needed, owner_of
from megatron_eopt.checkpoint.trainer import Function, Rebindings, folder_asked_for, wrapped
from megatron_eopt.checkpoint_files.folder import save_with
from megatron_eopt.checkpoint_files.folders import (
    TRACKER,
    announce,
    choose,
    clear,
    forget_garbled_tracker,
    has_checkpoints,
    replace_tracker,
)
from megatron_eopt.checkpoint_files.manifest import write_manifest
from megatron_eopt.checkpoint_files.rank_files import check_rank_files, describe_model
from megatron_eopt.checkpoint_files.sessions import Loading, Saving, loading, saving
from megatron_eopt.checkpoint_files.weights_only import CachedWeightsOnlyReader, WeightsOnlyReader


def trainer_rebindings() -> Rebindings:
    """Return which names of Megatron's modules to replace, as (module, name, replacement).

    The replacements do what Megatron's objects do, between checks. An object has to be replaced in
    every module that imported it.

    Raises:
        ImportError: If this release of Megatron-LM lacks one of the names.
    """
    found = wrapped(
        {
            "save_checkpoint": _saving,
            "load_checkpoint": _loading,
            "_load_base_checkpoint": _choosing,
            "read_metadata": _reading_the_tracker,
            "checkpoint_exists": _looking_for_folders,
            "_get_checkpoint_format": _verifying_a_folder,
            "_load_global_dist_base_checkpoint": _verifying_a_distributed_folder,
        }
    )
    for name, replacement in (
        ("maybe_msc", _AtomicTracker()),
        ("save", _writing_the_manifest(needed("save"))),
        ("FileSystemReader", WeightsOnlyReader),
        ("CachedMetadataFileSystemReader", CachedWeightsOnlyReader),
    ):
        needed(name)
        found.append((owner_of(name), name, replacement))
    return found


def _args() -> Any:
    from megatron.training.global_vars import get_args

    return get_args()


# Saving


def _saving(original: Function) -> Function:
    @functools.wraps(original)
    def save_checkpoint(
        iteration: int, model: Any, optimizer: Any, *rest: Any, **kwargs: Any
    ) -> None:
        args = _args()
        if args.save is None:
            raise CheckpointError(
                "--save",
                None,
                f"the trainer wants to save iteration {iteration}, for instance because a loss is "
                "not a number, and has no folder for it",
                "Give --save FOLDER, or let it stop at once with --rerun-mode disabled",
            )
        session = Saving({"iteration": int(iteration), "optimizer": args.optimizer})
        if not kwargs.get("non_persistent_ckpt"):
            name = "release" if kwargs.get("release") else f"iter_{int(iteration):07d}"
            from_rank_0(lambda: _begin(Path(args.save), name))
            if not args.use_dist_ckpt:
                session.rank_files = Path(args.save, name)
                session.written_by |= describe_model(model)
                from_rank_0(lambda: clear(Path(args.save, name)))
        with saving(session):
            original(iteration, model, optimizer, *rest, **kwargs)

    return save_checkpoint


def _begin(root: Path, name: str) -> None:
    if not MultiStorageClientFeature.is_enabled():
        forget_garbled_tracker(root)
        announce(root, name)


def _writing_the_manifest(original: Function) -> Function:
    @functools.wraps(original)
    def save(sharded_state_dict: Any, checkpoint_dir: Any, *rest: Any, **kwargs: Any) -> Any:
        session = saving.current
        if session is None or MultiStorageClientFeature.is_enabled():
            return original(sharded_state_dict, checkpoint_dir, *rest, **kwargs)
        return save_with(
            original, session.written_by, sharded_state_dict, checkpoint_dir, *rest, **kwargs
        )

    return save


class _AtomicTracker(MaybeMultiStorageClient):
    """Files as Megatron opens them, but for the tracker: it is replaced at once or not at all."""

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if name != "open" or MultiStorageClientFeature.is_enabled():
            return found
        return functools.partial(_open, found)


def _open(original: Function, path: Any, mode: str = "r", *rest: Any, **kwargs: Any) -> Any:
    if mode == "w" and Path(path).name == TRACKER:
        return _TrackerWriter(Path(path))
    return original(path, mode, *rest, **kwargs)


class _TrackerWriter:
    """What rank 0 writes the tracker file to; the folder that it names gets its manifest before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._text = ""

    def __enter__(self) -> "_TrackerWriter":
        return self

    def write(self, text: str) -> None:
        """Take the file's contents."""
        self._text += text

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None:
            return
        session = saving.current
        if session is not None and session.rank_files is not None:
            # the other ranks have written their files, and wait
            write_manifest(session.rank_files, session.written_by, alone=True)
        replace_tracker(self._path, self._text)


# Loading


def _loading(original: Function) -> Function:
    @functools.wraps(original)
    def load_checkpoint(ddp_model: Any, *rest: Any, **kwargs: Any) -> Any:
        with loading(Loading(digests=True, model=ddp_model)):
            return original(ddp_model, *rest, **kwargs)

    return load_checkpoint


def _choosing(original: Function) -> Function:
    """Let the trainer find checkpoints that no tracker file names, too."""

    @functools.wraps(original)
    def _load_base_checkpoint(load_dir: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
        session = loading.current or Loading(digests=False, model=None)
        session.root = None if load_dir is None else Path(load_dir)
        session.step = getattr(args, "ckpt_step", None) or None
        with loading(session):
            if load_dir is None or MultiStorageClientFeature.is_enabled() or session.step:
                return original(load_dir, args, *rest, **kwargs)
            choice = from_rank_0(lambda: choose(Path(load_dir)))
            if choice is None or Path(load_dir, TRACKER).exists():
                return original(load_dir, args, *rest, **kwargs)
            if choice.iteration == 0:
                raise CheckpointError(
                    "checkpoint",
                    str(load_dir),
                    f"has no {TRACKER}, without which iteration 0 cannot be chosen",
                    f"Write 0 to {TRACKER}",
                )
            try:
                args.ckpt_step = choice.iteration
                return original(load_dir, args, *rest, **kwargs)
            finally:
                args.ckpt_step = None

    return _load_base_checkpoint


def _reading_the_tracker(original: Function) -> Function:
    @functools.wraps(original)
    def read_metadata(tracker_filename: Any) -> tuple[int, bool]:
        if MultiStorageClientFeature.is_enabled():
            return original(tracker_filename)  # type: ignore[no-any-return]
        root = Path(tracker_filename).parent
        session = loading.current
        if session is not None and session.step is not None and session.root == root:
            return session.step, False
        choice = from_rank_0(lambda: choose(root))
        assert choice is not None, "the tracker file exists"
        return choice.iteration, choice.release

    return read_metadata


def _looking_for_folders(original: Function) -> Function:
    @functools.wraps(original)
    def checkpoint_exists(checkpoints_path: Any) -> bool:
        if original(checkpoints_path):
            return True
        if checkpoints_path is None or MultiStorageClientFeature.is_enabled():
            return False
        return has_checkpoints(Path(checkpoints_path))

    return checkpoint_exists


def _verifying_a_folder(original: Function) -> Function:
    @functools.wraps(original)
    def _get_checkpoint_format(checkpoint_name: Any, args: Any) -> Any:
        session = loading.current
        if session is None or MultiStorageClientFeature.is_enabled():
            return original(checkpoint_name, args)
        manifest = session.verify(Path(checkpoint_name))
        form = original(checkpoint_name, args)
        if form == "torch" and session.model is not None:
            check_rank_files(Path(checkpoint_name), manifest, session.model, args)
        return form

    return _get_checkpoint_format


def _verifying_a_distributed_folder(original: Function) -> Function:
    @functools.wraps(original)
    def _load_global_dist_base_checkpoint(*args: Any, **kwargs: Any) -> Any:
        session = loading.current
        if session is not None and not MultiStorageClientFeature.is_enabled():
            session.verify(folder_asked_for(original, *args, **kwargs))
        return original(*args, **kwargs)

    return _load_global_dist_base_checkpoint
