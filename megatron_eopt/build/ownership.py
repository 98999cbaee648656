"""Which optimizer steps which parameter, where several are built over one model.

An optimizer owns the parameters that require gradients when it is built; the others rest. One that
is built later over the same parameters takes them over.
"""

import itertools
from collections.abc import Iterable

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from megatron_eopt.base.agreement import everyones
from megatron_eopt.base.errors import ConfigurationError

_numbers = itertools.count()
_owners = WeakIdKeyDictionary()  # the number of the optimizer that owns a parameter
_superseded: set[int] = set()


def take_over(params: Iterable[Tensor]) -> int:
    """Return the number of a new owner of parameters; collective over the world."""
    number, mine = next(_numbers), list(params)
    before = {_owners[param] for param in mine if param in _owners}
    for param in mine:
        _owners[param] = number
    _superseded.update(everyones(sorted(before)))
    return number


def check_still_owner(number: int | None) -> None:
    """Raise a ConfigurationError if a later optimizer owns some of an optimizer's parameters."""
    if number in _superseded:
        rule = "an optimizer that was built later owns some of its parameters, and both would step"
        way_out = "Step the later one, or freeze what the other owns while each is built"
        raise ConfigurationError("optimizer.step", f"optimizer {number}", rule, way_out)
