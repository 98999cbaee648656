"""Which planned number each parameter of an optimizer has, wherever it is now.

Who holds an optimizer may change its groups in place: Megatron puts float32 main copies where
16-bit weights stood, others sort parameters or take some out.
"""

from collections.abc import Sequence
from operator import is_
from typing import Any

from torch import Tensor

from megatron_eopt.base.errors import ConfigurationError

type _Groups = Sequence[dict[str, Any]]


class PlannedGroups:
    """The parameters that a plan was made for, numbered in the order of their groups.

    Args:
        groups: Parameter groups as they are when the plan is made.
    """

    def __init__(self, groups: _Groups) -> None:
        self._seen: list[list[Tensor]] = [list(group["params"]) for group in groups]
        params = [param for seen in self._seen for param in seen]
        self._numbers = {param: number for number, param in enumerate(params)}

    @property
    def numbers(self) -> list[list[int]]:
        """The numbers of the parameters of each group, as they were seen last."""
        return [[self._numbers[param] for param in seen] for seen in self._seen]

    def follow(self, groups: _Groups) -> bool:
        """Look at the groups again; return whether any parameter is another or elsewhere.

        Raises:
            ConfigurationError: If there is a parameter which no plan was made for, and which is not
                in the place of one of the same shape.
        """
        now = [group["params"] for group in groups]
        if len(now) == len(self._seen) and all(map(_same, now, self._seen)):
            return False
        present = {param for params in now for param in params}
        numbers = dict(self._numbers)
        for place, params in enumerate(now):
            for index, param in enumerate(params):
                if param not in numbers:
                    numbers[param] = numbers[self._replaced(place, index, param, present)]
        self._seen = [list(params) for params in now]
        # those who were taken out may come back, those whose place was taken do not
        taken = {numbers[param] for param in present}
        self._numbers = {p: n for p, n in numbers.items() if p in present or n not in taken}
        return True

    def _replaced(self, place: int, index: int, param: Tensor, present: set[Tensor]) -> Tensor:
        seen = self._seen[place] if place < len(self._seen) else []
        before = seen[index] if index < len(seen) else None
        if before is None or before in present or before.shape != param.shape:
            shown = f"{place}, parameter {index}, of shape {tuple(param.shape)}"
            rule = "is none of the parameters that the optimizer was made for"
            way_out = "Add it by add_param_group, or build the optimizer again"
            raise ConfigurationError("group", shown, rule, way_out)
        return before


def _same(now: Sequence[Tensor], seen: Sequence[Tensor]) -> bool:
    return len(now) == len(seen) and all(map(is_, now, seen))
