"""What all ranks must agree on before optimizers are built."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_eopt.assembly.meaning import Meaning
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.routing.groups import Group, GroupSummary, build_groups, summarize
from megatron_eopt.routing.overrides import Overrides, unmatched
from megatron_eopt.routing.parameters import ModelParameter
from megatron_eopt.routing.routes import Route

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Report:
    """What one rank tells the others.

    Attributes:
        groups: Its groups.
        unmatched: Descriptions of overrides that match none of its parameters.
    """

    groups: list[GroupSummary]
    unmatched: frozenset[str]


def gather_groups(
    routes: Sequence[Route],
    parameters: Sequence[ModelParameter],
    overrides: Overrides,
    meaning: Meaning,
) -> list[Group]:
    """Return this rank's groups, aligned with those of all other ranks.

    Args:
        routes: The routes of this rank's parameters.
        parameters: These parameters.
        overrides: The user's overrides; one that matches nothing anywhere is warned about.
        meaning: The configuration.

    Raises:
        ConfigurationError: If there are parameters, but none anywhere for the main optimizer.
    """
    report = _Report(summarize(routes), frozenset(unmatched(parameters, overrides)))
    reports = _all_gather(report)
    nowhere = frozenset.intersection(*(item.unmatched for item in reports))
    summaries = [summary for item in reports for summary in item.groups]
    if summaries:
        for description in sorted(nowhere):
            logger.warning("config_overrides: no parameter matches %s", description)
    groups = build_groups(routes, summaries)
    names = {group.key.optimizer for group in groups}
    if groups and not meaning.is_standard and meaning.optimizer not in names:
        raise ConfigurationError(
            "optimizer",
            meaning.optimizer,
            f"got no parameter on any rank, all went to {', '.join(sorted(names))}",
            "Name one of these, or route a parameter to it with config_overrides",
        )
    return groups


def _all_gather(report: _Report) -> list[_Report]:
    if not torch.distributed.is_initialized():
        return [report]
    reports: list[_Report | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(reports, report)
    return [item for item in reports if item is not None]
