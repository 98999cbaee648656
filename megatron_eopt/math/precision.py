"""Sets the precision of float32 matrix products in a block, and restores the caller's settings.

Note [Two settings]
    torch has an old setting (``set_float32_matmul_precision``, ``allow_tf32``) and a new one for
    each back end and operation (``fp32_precision``). Setting the old one also sets the new ones of
    matrix products; setting a new one leaves the old one alone, and reading the old one then raises
    RuntimeError. A new setting that is "none" follows its parent, and reading it returns the
    parent's value. So parents are changed for a moment to learn what a setting itself says.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

_get: Any = torch._C._get_fp32_precision_getter
_set: Any = torch._C._set_fp32_precision_setter

_BACKENDS = ("cuda", "mkldnn")
_ALL, _PRODUCTS = "all", "matmul"
_ROOT = ("generic", _ALL)


@contextmanager
def matmul_precision(
    precision: Literal["highest", "high", "medium"] | None = None,
) -> Iterator[None]:
    """Set the precision of float32 matrix products in a block; see Note [Two settings].

    Code in the block may use torch's old setting, as emerging-optimizers does. With None, products
    have the precision that the caller has set. Products of float16 numbers are summed in float32.
    """
    cuda: Any = torch.backends.cuda.matmul
    sums_in_half = cuda.allow_fp16_reduced_precision_reduction
    effective = {backend: _get(backend, _PRODUCTS) for backend in _BACKENDS}
    own = _own_values()
    for backend in _BACKENDS:
        # with these, the old setting can be read whatever it is
        _set(backend, _PRODUCTS, "ieee")
    old = torch.get_float32_matmul_precision()
    try:
        cuda.allow_fp16_reduced_precision_reduction = False
        # the old setting that torch accepts together with the new ones
        same = "high" if "tf32" in effective.values() else "highest"
        same = "medium" if "bf16" in effective.values() else same
        torch.set_float32_matmul_precision(precision or same)
        if precision is None:
            # the old setting has just overwritten these
            for backend, value in effective.items():
                _set(backend, _PRODUCTS, value)
        yield
    finally:
        # the old setting first, because it also sets the new ones
        torch.set_float32_matmul_precision(old)
        cuda.allow_fp16_reduced_precision_reduction = sums_in_half
        for backend, value in own.items():
            _set(backend, _PRODUCTS, value)


def _own_values() -> dict[str, str]:
    """Return each back end's own setting for products, which may be "none"."""
    before = {_ROOT: _get(*_ROOT)}
    own: dict[str, str] = {}
    for operation in (_ALL, _PRODUCTS):
        # what changes with the parents is not the setting's own
        readings = []
        for value in ("ieee", "tf32"):
            for parent in before:
                _set(*parent, value)
            readings.append([_get(backend, operation) for backend in _BACKENDS])
        pairs = zip(_BACKENDS, *readings, strict=True)
        own = {backend: one if one == other else "none" for backend, one, other in pairs}
        for parent, value in before.items():
            _set(*parent, value)
        before = {(backend, operation): value for backend, value in own.items()}
    return own
