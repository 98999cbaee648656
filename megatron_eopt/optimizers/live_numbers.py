"""Rates and decays on the device, so that a captured step computes with those of its replay."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_eopt.base import gpu

type NumbersOf = Callable[[Any], Sequence[float]]
"""Returns what a pass computes with, from present settings, such as a parameter group's."""


class LiveNumbers:
    """Keeps the numbers of each pass and parameter group in a tensor that stays where it is.

    See Note [Live numbers] of :mod:`megatron_eopt.math.passes`.
    """

    def __init__(self) -> None:
        # by pass and the id of settings: settings, function and tensor
        self._kept: dict[tuple[str, int], tuple[Any, NumbersOf, Tensor]] = {}

    def of(self, name: str, settings: Any, device: torch.device, numbers: NumbersOf) -> Tensor:
        """Return the tensor of a pass with these settings, float64 ``(numbers,)``."""
        key = name, id(settings)
        if key not in self._kept:
            values = np.array(numbers(settings), np.float64)
            self._kept[key] = settings, numbers, gpu.uploaded(values, device)
        return self._kept[key][2]

    def refresh(self) -> None:
        """Write the present settings of all groups to the tensors, without waiting."""
        if not self._kept:
            return
        found = [numbers(settings) for settings, numbers, _ in self._kept.values()]
        tensors = [tensor for *_, tensor in self._kept.values()]
        values = np.array(list(chain.from_iterable(found)), np.float64)
        fresh = gpu.uploaded(values, tensors[0].device)
        torch._foreach_copy_(tensors, torch.split(fresh, [len(one) for one in found]))
