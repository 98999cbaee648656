"""Wrappers of Megatron-LM's saving functions: what a save replaces stays until it has finished."""

import inspect
import os
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from megatron.core.msc_utils import MultiStorageClientFeature

from megatron_eopt.base.agreement import from_rank_0
from megatron_eopt.base.upstream import owner_of, require_upstream
from megatron_eopt.base.wrapping import Function, around
from megatron_eopt.checkpoint.files import note_fingerprints
from megatron_eopt.checkpoint.unfinished import begin, finish

_saving: ContextVar[Path | None] = ContextVar("_saving", default=None)
"""The folder that the trainer is about to write."""

_unfinished: set[Path] = set()
"""Folders of asynchronous saves in progress."""


@around
def replacing_a_folder(original: Function, *values: Any, **kwargs: Any) -> Any:
    """Save to a new folder, and replace the old one of this iteration when all is written."""
    asked = inspect.signature(original).bind(*values, **kwargs)
    asked.apply_defaults()
    folder = _folder_of(asked.arguments)
    if folder is None:
        return original(*values, **kwargs)
    # an asynchronous save still writes to the folder that is about to be set aside
    if folder in _unfinished:
        require_upstream("maybe_finalize_async_save")(blocking=True)
        _unfinished.discard(folder)
    # one rank renames; the others wait, since they write to the folder next
    from_rank_0(lambda: begin(folder))
    token = _saving.set(folder)
    try:
        result = original(*values, **kwargs)
    finally:
        _saving.reset(token)
    # a synchronous save; an asynchronous one has registered ``_finish``
    if folder not in _unfinished:
        _finish(folder)
    return result


def _folder_of(asked: dict[str, Any]) -> Path | None:
    """Return the folder that the trainer will write; None if it is not on a file system."""
    module = owner_of("save_checkpoint")
    args = module.get_args()
    place = args.save
    if asked["non_persistent_ckpt"]:
        # local checkpoints have a manager of their own, with other folders
        if args.non_persistent_ckpt_type != "global":
            return None
        own = args.non_persistent_global_ckpt_dir
        place = own or os.path.join(place, module._NON_PERSISTENT_CKPT_SUBDIR)
    if MultiStorageClientFeature.is_enabled():
        return None
    name = require_upstream("get_checkpoint_name")
    return Path(name(place, asked["iteration"], asked["release"], return_base_dir=True))


@around
def finishing_later(original: Function, request: Any) -> Any:
    """Let an asynchronous save replace the old folder when all ranks have written their files."""
    folder = _saving.get()
    # a request for something else that is written meanwhile has passed its functions on
    if folder is not None and request.finalize_fns:
        _unfinished.add(folder)
        # the last function of the request, after that which writes the tracker file
        request.add_finalize_fn(lambda: _finish(folder))
    return original(request)


def _finish(folder: Path) -> None:
    _unfinished.discard(folder)
    note_fingerprints(folder)
    from_rank_0(lambda: finish(folder))
