"""Write files that stay intact if a benchmark is interrupted."""

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: readers see all of it, or none."""
    draft = path.with_name(f"{path.name}.part")
    draft.write_text(text)
    draft.replace(path)
