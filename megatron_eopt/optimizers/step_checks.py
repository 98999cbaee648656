"""Where a check of updates takes part in steps: around a step, and in what waves compute.

A check may compute updates before the step. Then it sets ``insert_checked`` and ``skipped`` of each
MatrixExchange, which does not compute them again.
"""

import importlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import torch.distributed as dist

from megatron_eopt.config.settings import RunSettings
from megatron_eopt.optimizers.assigned_rule import AssignedRule

type PartT = tuple[AssignedRule, dist.ProcessGroup | None]
"""An update rule, and ranks that compute the same."""


class StepChecks(Protocol):
    """Checks some steps."""

    def due(self, step: int) -> AbstractContextManager[None] | None:
        """Return what checks a step before it runs in a block; None in other steps."""


def step_checks(settings: RunSettings, parts: Iterable[PartT]) -> StepChecks | None:
    """Return the checks that the settings ask for; None if they ask for none."""
    fraction = settings.config.muon_check_fraction
    if not fraction:
        return None
    # by its name, since nothing here knows what is outside
    module = importlib.import_module("megatron_eopt.contrib.spot_checks")
    checks: StepChecks = module.SpotChecks(list(parts), fraction)
    return checks
