"""Counts the kernels that torch launches on a GPU for an operator, and the bytes they move.

It follows torch's rules, so that fake and CPU tensors are counted as on a GPU:

* Views, allocations, host reads and operators on empty tensors launch no kernel.
* Any other operator launches one. Operators on lists (``_foreach``, ``_fused``) are divided into
  launches as in torch's ``MultiTensorApply``, or launch one kernel per tensor if dtypes or strides
  differ.
* Each distinct input is read once and each output written once; overwritten tensors are not read.
* A matrix product with an addend first copies it to its output, unless that is the addend itself.

Traffic between the kernels of one operator is not counted.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, _prims_common
from torch.utils._pytree import tree_iter

CHUNK, BLOCKS = 65_536, 320
"""Elements of a tensor per block, and most blocks per launch."""

TENSORS = (110, 64, 48, 36, 30)
"""Most tensors per launch for one to five tensor lists."""

_WITH_ADDEND = {torch.ops.aten.addmm, torch.ops.aten.baddbmm}
_NOTHING = {"_unsafe_view", "detach_", "resize_", "set_", "squeeze_", "t_", "unsqueeze_"}
_OVERWRITING = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"}
_COUNTS = torch.ops.aten._foreach_add_.Tensor
_REDUCING = {"_foreach_norm", "_foreach_max"}


def moved_by(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> tuple[int, int]:
    """Return the number of kernels and the bytes they move for an operator except matrix products.

    The operator's schema says what it writes. A custom operator of this package is one kernel.
    """
    name, schema = func.overloadpacket.__name__, func._schema
    aliases = [value.alias_info for value in schema.returns if value.alias_info is not None]
    if any(not alias.is_write for alias in aliases) or "empty" in name or name in _NOTHING:
        return 0, 0
    names = (argument.name for argument in schema.arguments)
    given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    read: list[Tensor] = []
    written = [] if aliases else _tensors(result)
    for argument in schema.arguments:
        tensors = _tensors(given.get(argument.name))
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        # fused optimizers write gradients only when they unscale them
        if is_written and (argument.name != "grads" or given.get("grad_scale") is not None):
            written += tensors
        if not (is_written and (argument.name.startswith("out") or name in _OVERWRITING)):
            read += tensors
    if name.endswith("_like") or name.startswith("new_"):
        read = []
    # step counters on the host are incremented by a tensor, those on a device by a number
    on_host = func is _COUNTS and not any(tensor.dim() for tensor in written)
    if on_host or not any(tensor.numel() for tensor in written):
        return 0, 0
    distinct = {
        (t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride()): t for t in read
    }
    moved = sum(tensor.nbytes for tensor in (*distinct.values(), *written))
    is_of_lists = func.namespace == "aten" and ("_foreach_" in name or "_fused_" in name)
    return (_kernels(func, given, result) if is_of_lists else 1), moved


def copied_addend(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> tuple[int, int]:
    """Return the number of kernels and the bytes of the addend's copy in a matrix product."""
    if func.overloadpacket not in _WITH_ADDEND or not kwargs.get("beta", 1):
        return 0, 0
    add, is_empty = args[0], not result.numel()
    in_place = result.untyped_storage()._cdata == add.untyped_storage()._cdata
    return (0, 0) if is_empty or in_place else (1, add.nbytes + result.nbytes)


def _tensors(value: Any) -> list[Tensor]:
    return [item for item in tree_iter(value) if isinstance(item, Tensor)]


def _kernels(func: Any, given: Mapping[str, Any], result: Any) -> int:
    """Return the number of kernels of an operator on lists of tensors."""
    name = func.overloadpacket.__name__
    values = [value for key, value in given.items() if key != "state_steps"]
    if result and name not in _REDUCING:
        values.append(result)
    lists = [v for v in values if isinstance(v, list | tuple) and _tensors(v)]
    sizes = [tensor.numel() for tensor in lists[0]]
    if not (name.startswith("_fused_") or _is_together(lists, name)):
        return sum(size > 0 for size in sizes)
    most = TENSORS[len(lists) - 1]
    if func._overloadname == "ScalarList":
        most = min(most, 96)  # a launch also carries one scalar per tensor
    # reductions first zero partial results and finally combine them
    return launches(sizes, most) + 2 * (name in _REDUCING)


def _is_together(lists: Sequence[Sequence[Tensor]], name: str) -> bool:
    """Return whether one kernel can process several tensors of these lists."""
    dtypes = [{tensor.dtype for tensor in tensors} for tensors in lists]
    groups = dtypes if name == "_foreach_copy_" else [set().union(*dtypes)]
    return all(len(group) == 1 for group in groups) and all(
        _prims_common.is_non_overlapping_and_dense_or_false(first)
        and all((t.shape, t.stride()) == (first.shape, first.stride()) for t in rest)
        for first, *rest in zip(*lists, strict=True)
    )


def launches(sizes: Iterable[int], most: int) -> int:
    """Return the number of launches of at most ``most`` tensors each for tensors of these sizes."""
    count = tensors = blocks = 0
    for size in filter(None, sizes):
        # a launch is full when its blocks are used up; the rest of the tensor starts the next
        full, left = divmod(blocks + -(-size // CHUNK), BLOCKS)
        tensors = (left > 0) if full else tensors + 1
        count, blocks = count + full, left
        if tensors == most and blocks:
            count, tensors, blocks = count + 1, 0, 0
    return count + (blocks > 0)
