"""Reads a checkpoint while other jobs may save to its folder."""

from pathlib import Path, PosixPath
from types import TracebackType
from typing import Any

from megatron_eopt.base.agreement import from_rank_0, raise_together
from megatron_eopt.guard.files import check, check_unchanged
from megatron_eopt.guard.saves import whole


class CheckedPath(PosixPath):
    """The path of a checkpoint whose files are checked.

    At the end of a ``with`` block, an error is raised on all ranks if another save has replaced
    these files meanwhile, or if a rank has raised an error.
    """

    identity: object = None

    def __enter__(self) -> "CheckedPath":  # type: ignore[override]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # torch's own errors, which are no Exceptions, are on all ranks
        ends = error is not None and isinstance(error, Exception)

        def compare() -> None:
            check_unchanged(self, self.identity)
            if ends and error is not None:
                raise error

        raise_together(compare)


def checked(folder: str | Path, *, every_byte: bool = False) -> CheckedPath:
    """Return the path to load a checkpoint from, when its files are checked; collective.

    Read from it in a ``with`` block. Then another job that saves to the folder meanwhile is
    noticed; otherwise a slow rank may read its values, and others those of before.

    Args:
        folder: Folder of the checkpoint, as passed to :func:`replacing`.
        every_byte: Whether to read all tensors and compare them with the checksums that torch has
            saved; otherwise changed values in a large file are not noticed.

    Returns:
        ``folder``, or where its content is if a kill has left a save unfinished.

    Raises:
        CheckpointError: If a file is missing, damaged or of another save.
    """
    place: Any = CheckedPath(from_rank_0(lambda: str(whole(Path(folder)))))
    place.identity = check(Path(place), every_byte=every_byte)
    return place  # type: ignore[no-any-return]
