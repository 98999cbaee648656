"""What update rules step in place of DTensors, 16-bit and complex parameters.

Note [Lent tensors]
    Update rules step plain tensors of at least 32 bits. Where a parameter is another one, a rule
    gets its local part, a float32 copy, or its real and imaginary parts for one step, with state of
    the same kind. What was a copy is written back afterwards. Local tensors are looked up in each
    step, since users and frameworks may replace them, but made only when they have changed.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.base.address import address_of
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.optimizers.update_rule import ParamGroup, State, UpdateRule
from megatron_eopt.storage.local_tensors import local_of, shard_like


@dataclass(eq=False, slots=True)
class _Loan:
    """What is lent for one parameter, and what it was made of."""

    local: Tensor  # this rank's part of the parameter
    address: Any  # of that part's memory
    tensor: Tensor  # what is stepped
    outer: Mapping[str, Any]  # the parameter's state
    seen: dict[str, Any]  # what that had
    given: dict[str, Any]  # the local values of it
    state: dict[str, Any]  # the same, which a step changes


class Lender:
    """Lends one update rule what it steps; see Note [Lent tensors]."""

    def __init__(self, update_rule: UpdateRule) -> None:
        self._rule = update_rule
        self._loans: list[_Loan | None] = [None] * len(update_rule.shards)

    @contextmanager
    def lent(
        self, groups: Sequence[ParamGroup], outer: State
    ) -> Iterator[tuple[list[ParamGroup], State]]:
        """Provide groups and state of lent tensors in a block, and store what it changed."""
        params, host = self._rule.params, self._rule.host
        for param, shard in zip(params, self._rule.shards, strict=True):
            if (grad := param.grad) is not None and grad.layout != torch.strided:
                raise sparse_gradient(f"gradient of {shard.name}", grad.layout)
        # torch accepts gradients of another dtype; kernels do not
        others = any(p.grad is not None and p.grad.dtype != p.dtype for p in params)
        if not (others or any(map(_is_lent, params))):
            yield list(groups), outer
            return
        loans = [self._loan(number, param, outer[param]) for number, param in enumerate(params)]
        tensors = [loan.tensor for loan in loans]
        # keyed by the lent tensors, because update rules look state up by what they step
        state: State = defaultdict(dict, zip(tensors, [loan.state for loan in loans], strict=True))
        pairs = list(zip(params, tensors, strict=True))
        try:
            with _followed(self._rule, pairs):
                with host.stood_in_for() if host else nullcontext():
                    for param, tensor in pairs:
                        tensor.grad = None if param.grad is None else _grad(param, tensor.dtype)
                numbers = self._rule.shard_numbers
                yield (
                    [
                        {**group, "params": [tensors[n] for n in members if n is not None]}
                        for group, members in zip(groups, numbers, strict=True)
                    ],
                    state,
                )
        finally:
            for tensor in tensors:
                # it may be lent again
                tensor.grad = None
        for param, loan in zip(params, loans, strict=True):
            # only what was a copy has to be stored; without a gradient it has not changed
            if _is_rounded(loan.local):
                if param.grad is not None:
                    loan.local.copy_(loan.tensor)
            elif host and param in host.weights:
                # a main weight, which may have moved
                loan.local.data = loan.tensor.data
            if not _same(loan.given, loan.state):
                keep(self._rule, param, outer[param], loan.state)

    def _loan(self, number: int, param: Tensor, outer: dict[str, Any]) -> _Loan:
        """Return what is lent for a parameter, as it was made before if nothing has changed."""
        local, loan = local_of(param), self._loans[number]
        if loan is not None and loan.local is local and loan.address == address_of(local):
            if loan.outer is outer and _same(loan.seen, outer) and _same(loan.given, loan.state):
                return loan
            tensor = loan.tensor
        else:
            tensor = _stepped(local.detach())
        state = {key: _real(local_of(value)) for key, value in outer.items()}
        made = _Loan(local, address_of(local), tensor, outer, dict(outer), dict(state), state)
        # copies, and views of complex numbers, are made anew in each step
        self._loans[number] = made if tensor.dtype == local.dtype else None
        return made


def _same(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    # by their keys, too: a user may give a value another name
    return before.keys() == now.keys() and all(map(is_, before.values(), now.values()))


def keep(
    update_rule: UpdateRule, param: Tensor, param_state: dict[str, Any], state: Mapping[str, Any]
) -> None:
    """Store new state in ``param_state``, as DTensors where it is sharded like the parameter."""
    for key, value in state.items():
        # a tensor that was changed in place is in its DTensor already
        if not (key in param_state and local_of(param_state[key]) is value):
            cut = update_rule.is_sharded_like_param(key, value, param)
            param_state[key] = shard_like(param, _stored(param, value)) if cut else value


@contextmanager
def _followed(update_rule: UpdateRule, pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """In a block, let host memory know parameters by their lent tensors, which exist only there."""
    if update_rule.host is not None:
        update_rule.host.follow(dict(pairs))
    try:
        yield
    finally:
        # the block itself may have off-loaded
        if update_rule.host is not None:
            update_rule.host.follow({tensor: param for param, tensor in pairs})


def sparse_gradient(argument: str, value: object) -> ConfigurationError:
    """Return the error for gradients that no optimizer here can use."""
    rule = "sparse gradients are not supported"
    return ConfigurationError(argument, value, rule, "Use a dense gradient (sparse=False)")


def _grad(param: Tensor, dtype: torch.dtype) -> Tensor:
    grad: Any = param.grad
    if isinstance(grad, DTensor):
        placements = getattr(param, "placements", None)
        if grad.placements != placements:
            # such as gradients that are not reduced yet (Partial); collective, and all ranks have
            # the same placements
            grad = grad.redistribute(placements=placements)
    return _real(local_of(grad)).to(dtype)  # type: ignore[no-any-return]


def _is_lent(param: Tensor) -> bool:
    return isinstance(param, DTensor) or param.dtype not in _STEPPED


_STEPPED = (torch.float32, torch.float64)
"""Dtypes that update rules step themselves."""


def _is_rounded(local: Tensor) -> bool:
    """Whether weights have fewer bits than what a step computes."""
    return local.dtype in (torch.bfloat16, torch.float16)


def _stepped(local: Tensor) -> Tensor:
    """Return what an update rule steps: the same memory, or a float32 copy of 16-bit weights."""
    return local.to(torch.float32) if _is_rounded(local) else _real(local)


def _real(value: Any) -> Any:
    """Return a complex tensor's real and imaginary parts, and any other value unchanged.

    Optimizers update both parts independently, as torch's do.
    """
    is_complex = isinstance(value, Tensor) and value.is_complex()
    return torch.view_as_real(value.resolve_conj()) if is_complex else value


def _stored(param: Tensor, value: Tensor) -> Tensor:
    """Return state in the form that the parameter has, complex or real."""
    return torch.view_as_complex(value) if param.is_complex() else value
