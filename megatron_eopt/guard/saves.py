"""Replaces a checkpoint as a whole: a kill at any moment leaves the old one or the new one.

A save of ``iter_0000010`` writes to a new folder in ``unfinished.iter_0000010``, beside it. When
all files are written, a list of them follows. Only then the new folder takes the place of the old
one. If a kill has left neither in this place, a load finds the new one by its list.

Meanwhile rank 0 holds a lock, so that no other run saves to the same folder. The system removes
the lock when the process ends. All folders are on file systems: remote storage cannot rename.

A rank that fails alone, such as before its part of a collective save, tells the others by torch's
store and raises its error at once. It joins no collective, since others may be in another one.
Whoever ends its part asks the store whether all ranks have, or one has failed.
"""

import errno
import fcntl
import inspect
import logging
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

from torch import multiprocessing
from torch.distributed.checkpoint.api import CheckpointException

from megatron_eopt.base.agreement import CheckpointError, from_rank_0, is_rank_0
from megatron_eopt.base.peers import ending_together
from megatron_eopt.base.wrapping import Function, around
from megatron_eopt.guard.contents import CONFIG, METADATA
from megatron_eopt.guard.files import (
    LIST,
    fingerprints_of,
    is_part_of_a_checkpoint,
    write_list,
)

logger = logging.getLogger(__name__)

_UNFINISHED, _LOCK = "unfinished.", "lock"

_locks: dict[Path, int] = {}
"""Open lock files of this process, by the folder that it saves to."""

_MOST_LINKS = 40  # Linux follows no more

_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"
_SERIALIZATION = "megatron.core.dist_checkpointing.serialization"

_END_WITH_PARENT = """
import multiprocessing, os, threading
end = lambda: (multiprocessing.parent_process().join(), os._exit(0))
threading.Thread(target=end, daemon=True).start()
"""
"""Lets a process end when the one that started it has ended, even if that was killed."""


def whole(folder: Path) -> Path:
    """Return where the whole content of a checkpoint is; ``folder`` if it is nowhere."""
    folder = absolute(folder)
    # earlier versions put what a save replaces into ``previous.iter_0000010``
    previous = [folder.with_name(f"previous.{folder.name}")] if folder.match("iter_*") else []
    folders = [*previous, folder, *_listed(folder)]
    return next((path for path in folders if path.is_dir() and any(path.iterdir())), folder)


@contextmanager
def replacing(folder: str | Path) -> Iterator[Path]:
    """Save a checkpoint in a block; it replaces the folder when all is written.

    All ranks enter and leave the block together. After an error in it on any rank, all raise one,
    and the folder keeps what it had. Other files in the folder, such as a tokenizer's, are kept.

    Args:
        folder: Folder of the checkpoint, at the same path for all ranks.

    Yields:
        The path to save to, with ``torch.distributed.checkpoint.save`` or megatron-core's
        ``dist_checkpointing.save``. When the block ends, the save must be done.

    Raises:
        CheckpointError: If the disk is full, another run saves to the folder, or files are missing.
    """
    save = begin(folder)
    with collecting_errors(of_the_block=True) as errors:
        yield save.path
    save.finish(errors)


@contextmanager
def collecting_errors(*, of_the_block: bool = False) -> Iterator[list[BaseException]]:
    """In a block, collect errors for :meth:`Save.finish` that would leave other ranks waiting.

    Args:
        of_the_block: Whether to collect also an error that ends the block.
    """
    errors: list[BaseException] = []

    @around
    def collecting(original: Function, *values: Any, **kwargs: Any) -> Any:
        try:
            return original(*values, **kwargs)
        except Exception as error:
            errors.append(error)

    wrappers: list[tuple[Any, str, Callable[[Any], Any]]] = []
    # whoever saves with megatron-core has imported it
    if (writer := sys.modules.get(_WRITER)) is not None:
        # what only rank 0 does, while others wait in a collective
        wrappers.append((writer.FileSystemWriterAsync, "finish", collecting))
        wrappers.append((writer, "get_write_results_queue", _ending_with_this_process(writer)))
    if (serialization := sys.modules.get(_SERIALIZATION)) is not None:
        wrappers.append((serialization, "save_config", collecting))
    with ExitStack() as undo:
        for owner, name, wrapper in wrappers:
            original = getattr(owner, name)
            setattr(owner, name, wrapper(original))
            undo.callback(setattr, owner, name, original)
        try:
            yield errors
        # torch's own error is no Exception
        except (Exception, CheckpointException) as error:
            if not of_the_block:
                raise
            errors.append(error)


def _ending_with_this_process(writer: Any) -> Callable[[Function], Function]:
    """Start the process behind megatron-core's queue, which would stay if this one is killed."""

    @around
    def starting(original: Function, *values: Any, **kwargs: Any) -> Any:
        if writer._results_queue is None:
            call = inspect.signature(original).bind(*values, **kwargs)
            call.apply_defaults()
            manager = SyncManager(ctx=multiprocessing.get_context(call.arguments["mp_mode"]))
            # no function of this package, which that process would have to import
            manager.start(exec, (_END_WITH_PARENT, {}))
            writer._results_queue = manager.Queue()
        return original(*values, **kwargs)

    return starting


@dataclass
class Save:
    """A save in progress: :func:`begin` makes it, and :meth:`finish` ends it."""

    folder: Path
    path: Path  # where to write; files beside it go to the folder above when it is in place
    afterwards: list[Callable[[], Any]] = field(default_factory=list)  # what to do then

    def finish(self, errors: Sequence[BaseException] = ()) -> None:
        """Let what was written replace the folder, unless a rank has errors; collective.

        Raises:
            CheckpointError: If the disk is full, or files are missing.
        """

        def fail() -> None:
            for error in errors:
                raise error

        def complete() -> None:
            _keep_other_files(self.folder, self.path)
            write_list(self.path, fingerprints)

        try:
            with ending_together():
                naming_full_disk(self.folder, fail)
            fingerprints = fingerprints_of(self.path)
            from_rank_0(lambda: naming_full_disk(self.folder, complete))
        except Exception:
            # gives the space back
            if is_rank_0():
                _release(self.folder)
            raise
        from_rank_0(lambda: (_release if self.is_in_place else _put_in_place)(self.folder))
        for call in self.afterwards:
            call()

    def finish_after(self, steps: Iterable[Callable[[], Any]]) -> None:
        """Take the last steps of an asynchronous save, then :meth:`finish` it; collective."""
        with collecting_errors(of_the_block=True) as errors:
            for step in steps:
                step()
        self.finish(errors)

    @property
    def is_in_place(self) -> bool:
        """Whether files are written to the folder itself, which cannot be renamed."""
        return self.path == self.folder


def begin(folder: str | Path) -> Save:
    """Begin a save that will replace a folder; collective.

    Raises:
        CheckpointError: If another process saves to this folder now, or the disk is full.
    """
    folder = absolute(folder)
    # one rank; the others wait, since they write there next
    return Save(folder, from_rank_0(lambda: naming_full_disk(folder, lambda: _begin(folder))))


def naming_full_disk[T](folder: Path, call: Callable[[], T]) -> T:
    """Call a function; if it fails because the disk of a folder is full, say so.

    torch and megatron-core hide the error of the system, so this tries to write, too.
    """
    try:
        return call()
    except CheckpointError:
        raise
    # torch's own error is no Exception
    except (Exception, CheckpointException) as error:
        codes: set[int | None] = set()
        cause: BaseException | None = error
        while cause is not None:
            codes.add(getattr(cause, "errno", None))
            cause = cause.__cause__ or cause.__context__
        for path in filter(Path.is_dir, (folder, folder.parent)):
            try:
                with tempfile.TemporaryFile(dir=path) as file:
                    os.posix_fallocate(file.fileno(), 0, 1 << 20)
            except OSError as failed:
                codes.add(failed.errno)
        if codes & {errno.ENOSPC, errno.EDQUOT}:
            rule = "cannot be saved, because its disk has no space left"
            hint = "Free some space. What the folder had before is unchanged"
            if _is_fixed(folder):
                hint = (
                    "Free some space. The folder cannot be renamed, so what it had before is gone"
                )
            raise CheckpointError("save", str(folder), rule, hint) from error
        if isinstance(error, CheckpointException):
            raise RuntimeError(str(error)) from error
        raise


def _begin(folder: Path) -> Path:
    _check_place(folder)
    run = folder.parent
    if _is_fixed(folder):
        text = "%s cannot be renamed, so a kill in this save may leave no checkpoint"
        logger.warning(text, folder)
        _lock(folder)
        # a mixture of both saves must not load: the first of these makes it loadable, the second is
        # of the files that follow
        for name in (METADATA, LIST, CONFIG):
            (folder / name).unlink(missing_ok=True)
        return folder
    run.mkdir(parents=True, exist_ok=True)
    _lock(folder)
    _exchange(folder)
    for work in run.glob(f"{_UNFINISHED}*"):
        other = run / work.name.removeprefix(_UNFINISHED)
        # what another process is saving is locked, where there are locks
        if other not in _locks and (work / _LOCK).exists():
            with suppress(CheckpointError):
                if _lock(other):
                    _put_in_place(other)
                else:
                    os.close(_locks.pop(other))
    for previous in run.glob("previous.iter_*"):
        if any(previous.iterdir()):
            replaced = run / previous.name.removeprefix("previous.")
            _remove(replaced)
            previous.rename(replaced)
        else:
            previous.rmdir()
    # a name of its own: a writer process may outlive the rank that was killed
    new = _work_of(folder) / f"new.{uuid.uuid4().hex}"
    new.mkdir()
    return new


def _check_place(folder: Path) -> None:
    """Raise a CheckpointError for a folder that no save can replace."""
    rule = hint = ""
    if folder.is_file():
        rule, hint = "is a file, not a folder", "Name another folder, or remove the file"
    elif Path.cwd().is_relative_to(folder) and not _is_fixed(folder):
        rule = "is the working folder of this process or above it, and a save would replace it"
        hint = "Name a folder in it, such as ./checkpoint"
    elif folder.is_dir() and not os.access(folder, os.W_OK, effective_ids=True):
        rule, hint = "cannot be written", "Change its mode or owner, or name another folder"
    if rule:
        raise CheckpointError("save", str(folder), rule, hint)


def _is_fixed(folder: Path) -> bool:
    """Return whether a folder cannot be renamed: a mount point, or in a folder of others."""
    run = folder.parent
    return os.path.ismount(folder) or (
        run.is_dir() and not os.access(run, os.W_OK, effective_ids=True)
    )


def _put_in_place(folder: Path) -> None:
    _exchange(folder)
    _release(folder)


def _exchange(folder: Path) -> None:
    """If a save has written all, put it in place; files beside it go to the folder above."""
    work = _work_of(folder)
    for new in _listed(folder):
        for path in work.iterdir():
            if path.is_file() and path.name != _LOCK:
                path.replace(folder.with_name(path.name))
        if os.path.lexists(folder):
            folder.rename(work / f"old.{uuid.uuid4().hex}")
        new.rename(folder)
    for path in work.iterdir():
        if path.name != _LOCK:
            _remove(path)


def _keep_other_files(folder: Path, new: Path) -> None:
    """Bring what belongs to no checkpoint from the folder that will be replaced to the new one.

    Links to the same files, so that a log that is open stays the one in the folder.
    """
    for path in folder.iterdir() if folder.is_dir() and folder != new else ():
        if os.path.lexists(new / path.name) or is_part_of_a_checkpoint(path):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, new / path.name, symlinks=True, copy_function=_link)
        else:
            _link(path, new / path.name)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        # some file systems have no links
        shutil.copy2(source, target, follow_symlinks=False)


def _listed(folder: Path) -> list[Path]:
    return [path for path in _work_of(folder).glob("new.*") if (path / LIST).exists()]


def _lock(folder: Path) -> bool:
    """Lock a folder, if its file system has locks; return whether it has."""
    work, has_locks = _work_of(folder), True
    while folder not in _locks:
        work.mkdir(exist_ok=True)
        handle = os.open(work / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            # not inherited by processes that this one starts
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            rule = f"is a folder to which another process is saving {folder.name}"
            hint = "Stop the other run, or give each run a folder of its own"
            raise CheckpointError("save", str(folder.parent), rule, hint) from error
        except OSError as error:
            has_locks = False
            logger.debug("%s cannot be locked: %s", folder, error)
        # who had the lock before may have removed this file
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(work / _LOCK)):
                _locks[folder] = handle
                continue
        os.close(handle)
    return has_locks


def _release(folder: Path) -> None:
    _remove(_work_of(folder))
    if folder in _locks:
        os.close(_locks.pop(folder))


def _work_of(folder: Path) -> Path:
    work = folder.with_name(f"{_UNFINISHED}{folder.name}")
    # a folder that cannot be renamed may be in one that cannot be written
    return (
        work
        if os.access(work.parent, os.W_OK, effective_ids=True)
        else folder / f"{_UNFINISHED}save"
    )


def absolute(folder: str | Path) -> Path:
    """Return an absolute path; of what it leads to if it is a link, perhaps to another disk."""
    # a relative path may be only a dot, and a working directory may change
    path = os.path.abspath(folder)
    for _ in range(_MOST_LINKS):
        if not os.path.islink(path):
            break
        path = os.path.abspath(os.path.join(os.path.dirname(path), os.readlink(path)))
    return Path(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
