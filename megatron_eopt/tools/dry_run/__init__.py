"""Runs the real optimizer as one rank of a large job, in one process and on fake tensors.

Whoever changes what is counted reads no other room; new kernels or reads have to be known here.
"""

from megatron_eopt.tools.dry_run.counting import (
    Amount,
    Collective,
    Counts,
    Report,
    report_of,
    schedules_of,
)
from megatron_eopt.tools.dry_run.world import dry_world

__all__ = ["Amount", "Collective", "Counts", "Report", "dry_world", "report_of", "schedules_of"]
