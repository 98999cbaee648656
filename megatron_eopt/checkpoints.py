"""Save checkpoints so that none is lost or mixed, and load them at any parallel layout.

All files are checked before a load. :func:`checked` and :func:`replacing` are for any training
loop; ``save`` and ``load`` replace megatron-core's functions of these names, and need it.
"""

import importlib
from typing import Any

from megatron_eopt.base.quiet import importing_quietly

with importing_quietly():
    from megatron_eopt.base.agreement import CheckpointError
    from megatron_eopt.guard.reads import checked
    from megatron_eopt.guard.saves import replacing

__all__ = ["CheckpointError", "checked", "load", "replacing", "save"]  # noqa: F822  the last two late


def __getattr__(name: str) -> Any:
    if name not in ("load", "save"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with importing_quietly():
        module = importlib.import_module("megatron_eopt.checkpoint.whole_saves")
    return getattr(module, name)
