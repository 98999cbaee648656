"""What is known while something is in progress, for functions that others call meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager


class Current[T]:
    """Holds what is in progress, the innermost, if there is anything."""

    def __init__(self) -> None:
        self.current: T | None = None

    @contextmanager
    def __call__(self, session: T) -> Iterator[T]:
        """Let ``session`` be in progress in a block."""
        before, self.current = self.current, session
        try:
            yield session
        finally:
            self.current = before
