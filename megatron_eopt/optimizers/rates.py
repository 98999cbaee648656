"""Notices schedules that give parameter groups one learning rate although they had several."""

import logging
from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor

from megatron_eopt.base.agreement import is_rank_0
from megatron_eopt.optimizers.update_rule import ParamGroup

logger = logging.getLogger(__name__)

_TEXT = (
    "The schedule sets lr=%g for groups whose rates the configuration sets apart (%s). If that is "
    "not what you want, pass the schedule a list with one rate for each group, for example "
    "[group['lr'] for group in optimizer.param_groups]."
)


class RatesApart:
    """The learning rates of groups as the configuration sets them apart, such as ``muon_lr``."""

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self._rates = [group["lr"] for group in groups]
        numbers = {rate for rate in self._rates if not isinstance(rate, Tensor)}
        self._watches = len(numbers) > 1 and is_rank_0()

    def warn(self, groups: Sequence[ParamGroup]) -> None:
        """Log one warning once groups that had several rates have one, other than 0."""
        if not self._watches:
            return
        before = defaultdict(set)
        for group, rate in zip(groups, self._rates, strict=True):
            # a number on a GPU would have to be waited for
            if not isinstance(group["lr"], Tensor) and group["lr"]:
                before[group["lr"]].add(rate)
        for rate, rates in before.items():
            if len(rates) > 1 and self._watches:
                self._watches = False
                text = " and ".join(f"{one:g}" for one in sorted(rates))
                logger.warning(_TEXT, rate, text)
