"""Learning rates and weight decays of parameter groups: the checkpoint's, or this run's.

By default a run keeps its own. With ``--use-checkpoint-opt_param-scheduler`` each group takes all
of its rates from the checkpoint, as megatron-core's scheduler does for the run's rates.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from megatron.core.utils import log_single_rank

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.routing.groups import GROUP_ID

logger = logging.getLogger(__name__)

RATES = ("max_lr", "min_lr")
"""Settings of parameter groups, and attributes of megatron-core's scheduler."""

_OWN = {*RATES, "start_wd", "end_wd"}
_SCHEDULE = {*_OWN, "wd_mult", "lr_mult"}

_from_checkpoint: ContextVar[bool] = ContextVar("_from_checkpoint", default=False)


@contextmanager
def taken_from_checkpoint(*, asked: bool) -> Iterator[None]:
    """In a block, let parameter groups take their rates from the checkpoint if asked."""
    token = _from_checkpoint.set(asked)
    try:
        yield
    finally:
        _from_checkpoint.reset(token)


def adopt_rates(group: dict[str, Any], twin: Mapping[str, Any]) -> None:
    """Take the rates of the matching group of a checkpoint, if the run asks for them.

    Without a match, or where that group has none, megatron-core's scheduler uses the run's rates.
    """
    if not _from_checkpoint.get():
        return
    for key in _OWN:
        group.pop(key, None)
    group.update({key: twin[key] for key in _SCHEDULE & twin.keys()})


def check_rates(
    alone: Sequence[Mapping[str, Any]],
    gone: Sequence[Mapping[str, Any]],
    optimizers: Collection[str | None],
) -> None:
    """Check that rates of single groups exist both here and in the checkpoint.

    Args:
        alone: Groups of this run that the checkpoint lacks.
        gone: Groups of the checkpoint that this run lacks.
        optimizers: Names of this run's optimizers.

    Raises:
        ConfigurationError: If one of them has rates of its own, and the run asks for those of the
            checkpoint.
    """
    if not _from_checkpoint.get():
        return
    new = [group for group in alone if _has_own(group)]
    # rates of an optimizer that no longer runs are not needed
    lost = [g for g in gone if _has_own(g) and _optimizer_of(g) in {*optimizers, None}]
    if lost or new:
        said = [f"has {_told(lost)}, which this run lacks"] if lost else []
        said += [f"lacks {_told(new)} of this run"] if new else []
        rule = f"cannot give each parameter group its rates: the checkpoint {' and '.join(said)}"
        way_out = (
            "Pass the rate flags and overrides of the run that wrote it, or use this run's rates "
            "with --override-opt_param-scheduler"
        )
        raise ConfigurationError("--use-checkpoint-opt_param-scheduler", True, rule, way_out)
    for group in alone:
        text = f"rates: {_told([group])} is new and gets the checkpoint's --lr and --min-lr"
        log_single_rank(logger, logging.WARNING, text)
    for group in gone:
        text = f"rates: those of {_told([group])} in the checkpoint are not used"
        log_single_rank(logger, logging.WARNING, text)


def _has_own(group: Mapping[str, Any]) -> bool:
    """Return whether a group's rates differ from those of its run."""
    if GROUP_ID in group:
        names = (*str(group[GROUP_ID]).split("/"), "", "")[2]
        return not _OWN.isdisjoint(names.split("+"))
    return not group.get("default_config", True) or bool({"start_wd", "end_wd"} & group.keys())


def _optimizer_of(group: Mapping[str, Any]) -> str | None:
    """Return the name of a group's optimizer; the main one's is not saved with the group."""
    return group.get("optimizer") or str(group.get(GROUP_ID, "")).partition("/")[0] or None


def _told(groups: Sequence[Mapping[str, Any]]) -> str:
    """Return the names and rates of groups."""
    found = []
    for group in groups:
        rates = ", ".join(f"{key}={group[key]:g}" for key in sorted(_OWN & group.keys()))
        found.append(f"{group.get(GROUP_ID, _optimizer_of(group))} ({rates})")
    return ", ".join(dict.fromkeys(found))
