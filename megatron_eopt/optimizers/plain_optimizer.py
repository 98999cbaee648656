"""torch's optimizers without its compiler.

torch turns its compiler off for some methods of an optimizer, and imports it for that, which takes
about 110 MB of memory and 2 s. A process that has not imported it has nothing to turn off.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

_COMPILER = "torch._dynamo"


def _undecorated(name: str) -> Callable[..., Any]:
    decorated = getattr(torch.optim.Optimizer, name)
    plain = getattr(decorated, "__wrapped__", decorated)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (decorated if _COMPILER in sys.modules else plain)(self, *args, **kwargs)

    method.__name__, method.__doc__ = name, f"Work as torch's method ``{name}``."
    return method


class PlainOptimizer(torch.optim.Optimizer):
    """A base class, before torch's own, whose methods do not import torch's compiler."""

    add_param_group = _undecorated("add_param_group")
    zero_grad = _undecorated("zero_grad")
    state_dict = _undecorated("state_dict")
    load_state_dict = _undecorated("load_state_dict")
