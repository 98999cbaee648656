"""Calls that function modes do not see, and that they see all others."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megatron_eopt.base.function_modes import without_modes
from megatron_eopt.math import orthogonalize


class Seen(TorchFunctionMode):
    """Notes every call."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


@without_modes
def doubled(tensor, *, fails=False):
    """Double a tensor."""
    if fails:
        raise ArithmeticError
    return torch.mul(tensor, 2).reshape(tensor.shape)


def test_calls_inside_pass_by_the_modes():
    one = torch.ones(2)
    with Seen() as mode:
        assert doubled(one).tolist() == [2.0, 2.0]
        assert doubled.__doc__ == "Double a tensor."
    assert mode.calls == [torch.Tensor.tolist]


def test_modes_see_what_comes_after_a_failure():
    one = torch.ones(2)
    with Seen() as mode:
        with pytest.raises(ArithmeticError):
            doubled(one, fails=True)
        torch.neg(one)
    assert mode.calls == [torch.neg]


def test_what_modes_see_of_an_iteration_does_not_grow_with_its_steps():
    x, calls = torch.ones(2, 4, 8), []
    for steps in (5, 50):
        # what is found out once is found out now
        orthogonalize(x, steps=steps, coefficients="simple")
        with Seen() as mode:
            orthogonalize(x, steps=steps, coefficients="simple")
        calls.append(len(mode.calls))
    assert calls[0] == calls[1]
