"""Wrappers of Megatron-LM's saving functions: a checkpoint is replaced when all is written."""

import inspect
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.msc_utils import MultiStorageClientFeature

from megatron_eopt.base.agreement import from_rank_0
from megatron_eopt.base.peers import ending_together
from megatron_eopt.base.wrapping import Function, around
from megatron_eopt.guard.contents import TRACKER
from megatron_eopt.guard.saves import (
    Save,
    absolute,
    begin,
    collecting_errors,
    naming_full_disk,
)
from megatron_eopt.megatron_core.upstream import owner_of, require_upstream

_saving: ContextVar[Save | None] = ContextVar("_saving", default=None)
"""The save in the trainer's saving function, or in the last steps of an asynchronous one."""

_later: dict[Path, Save] = {}
"""Asynchronous saves in progress, by folder."""


@around
def replacing_a_folder(original: Function, *values: Any, **kwargs: Any) -> Any:
    """Save to a new folder, and replace the one of this iteration when all is written."""
    asked = inspect.signature(original).bind(*values, **kwargs)
    asked.apply_defaults()
    folder = _folder_of(asked.arguments)
    if folder is None:
        return original(*values, **kwargs)
    # its folder is locked by this process, which would not notice
    if folder in _later:
        require_upstream("maybe_finalize_async_save")(blocking=True)
    save = begin(folder)
    # an error may be on this rank alone, so that no collective may follow
    with _during(save), collecting_errors() as errors, ending_together():
        result = naming_full_disk(folder, lambda: original(*values, **kwargs))
    # a synchronous save; an asynchronous one has registered ``_finish_later``
    if folder not in _later:
        save.finish(errors)
    return result


@contextmanager
def _during(save: Save) -> Iterator[None]:
    """In a block, let the trainer write a copy of its tracker file: a full disk empties it."""
    from_rank_0(lambda: naming_full_disk(save.folder, lambda: _copy_tracker(save)))
    token = _saving.set(save)
    try:
        yield
    finally:
        _saving.reset(token)


def _copy_tracker(save: Save) -> None:
    tracker = save.folder.with_name(TRACKER)
    # the trainer also reads it, to delete the iteration before
    if tracker.exists() and not save.is_in_place:
        shutil.copy(tracker, save.path.with_name(TRACKER))


def _folder_of(asked: dict[str, Any]) -> Path | None:
    """Return the folder that the trainer will write; None if it is not on a file system."""
    module = owner_of("save_checkpoint")
    args = module.get_args()
    run_folder = args.save
    if asked["non_persistent_ckpt"]:
        # local checkpoints have a manager of their own, with other folders
        if args.non_persistent_ckpt_type != "global":
            return None
        run_folder = args.non_persistent_global_ckpt_dir or os.path.join(
            run_folder, module._NON_PERSISTENT_CKPT_SUBDIR
        )
    if MultiStorageClientFeature.is_enabled():
        return None
    name = require_upstream("get_checkpoint_name")
    return absolute(name(run_folder, asked["iteration"], asked["release"], return_base_dir=True))


@around
def finishing_later(original: Function, request: Any) -> Any:
    """Let an asynchronous save replace the folder when all ranks have written their files."""
    save = _saving.get()
    # a request for something else that is written meanwhile has passed its functions on
    if save is not None and request.finalize_fns:
        _later[save.folder] = save
        request.finalize_fns[:] = [partial(_finish_later, save, list(request.finalize_fns))]
    return original(request)


def _finish_later(save: Save, steps: Sequence[Callable[[], Any]]) -> None:
    del _later[save.folder]
    with _during(save):
        save.finish_after(steps)


def written_to(folder: str) -> str:
    """Return where the trainer must write what belongs into a folder."""
    save = _saving.get()
    return str(save.path) if save is not None and absolute(folder) == save.folder else folder


@around
def with_a_copy_of_the_tracker(original: Function, checkpoints_path: str) -> str:
    """In a save, name the copy of the tracker file, which is put in place with the checkpoint."""
    name: str = original(checkpoints_path)
    save = _saving.get()
    if save is None or absolute(name) != save.folder.with_name(TRACKER):
        return name
    return str(save.path.with_name(TRACKER))


@around
def when_it_is_in_place(original: Function, folder: str, tracker: str, *rest: Any) -> Any:
    """Tell W&B of a checkpoint when it is in its folder."""
    save = _saving.get()
    if save is None:
        return original(folder, tracker, *rest)
    names = str(save.folder), str(save.folder.with_name(TRACKER))
    save.afterwards.append(lambda: original(*names, *rest))
    return None
