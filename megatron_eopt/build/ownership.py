"""Which optimizer steps which parameter, where several are built over one model.

An optimizer owns the parameters that require gradients when it is built; the others rest. One that
is built later over the same parameters takes them over, and the earlier one may not step again.
"""

import itertools
from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from megatron_eopt.base.agreement import everyones

_numbers = itertools.count()
_owners = WeakIdKeyDictionary()  # the number of the optimizer that owns a parameter
_optimizers: WeakValueDictionary[int, Any] = WeakValueDictionary()


def take_over(optimizer: Any, params: Iterable[Tensor]) -> None:
    """Let an optimizer own parameters from now on; collective over the world.

    It gets a ``number``, by which later ones sort. Who owned any of them is ``superseded``.
    """
    number, mine = next(_numbers), list(params)
    before = {_owners[param] for param in mine if param in _owners}
    for param in mine:
        _owners[param] = number
    for earlier in everyones(sorted(before)):
        if earlier in _optimizers:
            _optimizers[earlier].superseded = True
    _optimizers[number] = optimizer
    optimizer.number = number
