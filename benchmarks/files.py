"""Files that somebody may read at any time, or that an interruption may leave."""

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all."""
    draft = path.with_name(f"{path.name}.part")
    draft.write_text(text)
    draft.replace(path)
