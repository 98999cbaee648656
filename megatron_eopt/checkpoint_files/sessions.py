"""What is known while the trainer saves or loads, for the functions that it calls meanwhile."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_eopt.base.current import Current
from megatron_eopt.checkpoint_files.manifest import Manifest, verify


@dataclass
class Saving:
    """A save in progress.

    Attributes:
        written_by: What the manifest says of the run.
        rank_files: Folder in the format ``torch``, whose manifest comes just before the tracker.
    """

    written_by: dict[str, Any]
    rank_files: Path | None = None


@dataclass
class Loading:
    """A load in progress.

    Attributes:
        digests: Whether files are compared by their digests.
        model: The model chunks that are loaded, None while only arguments are.
        root: Folder of the checkpoints.
        step: Iteration of these that was asked for by hand.
        verified: Folders whose files have been verified, with their manifests.
    """

    digests: bool
    model: Any
    root: Path | None = None
    step: int | None = None
    verified: dict[Path, Manifest | None] = field(default_factory=dict)

    def verify(self, folder: Path) -> Manifest | None:
        """Verify the files of ``folder``, once; see :func:`~.manifest.verify`."""
        if folder not in self.verified:
            self.verified[folder] = verify(folder, digests=self.digests)
        return self.verified[folder]


saving: Current[Saving] = Current()
loading: Current[Loading] = Current()
