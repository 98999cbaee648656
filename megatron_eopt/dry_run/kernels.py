"""How many kernels torch launches on a GPU for one operator, and how many bytes they move.

These are torch's own rules, so that tensors without data, or on a CPU, are counted as on a GPU:

* Views, allocations and values that the host reads take no kernel, nor does what has no elements.
* An operator takes one kernel. Lists of tensors (``_foreach``, ``_fused``) are cut into launches as
  torch's ``MultiTensorApply`` does. Where it cannot, as their dtypes or strides differ, each tensor
  has a kernel.
* Each distinct tensor is read once, and each output is written. What is overwritten is not read.

What one operator's kernels write for each other, and copies that a product's library makes, are not
counted.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_iter

CHUNK = 65_536
"""Elements that one block of a launch works on, of one tensor."""

BLOCKS = 320
"""Most blocks of a launch."""

TENSORS = (110, 64, 48, 36, 30)
"""Most tensors of a launch, if it goes over one list, two, ... five."""

_TENSORS_WITH_SCALARS = (96, *TENSORS[1:])
"""The same if each tensor has a number of its own."""

_METADATA = frozenset(("detach_", "resize_", "set_", "squeeze_", "t_", "transpose_", "unsqueeze_"))
"""What changes no element of what it is called on."""

_OVERWRITING = frozenset(("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"))
_REDUCING = frozenset(("_foreach_norm", "_foreach_max"))


class Moved(NamedTuple):
    """What one operator does.

    Attributes:
        kernels: How many it launches.
        read: Bytes that they read.
        written: Bytes that they write.
    """

    kernels: int = 0
    read: int = 0
    written: int = 0


def moved_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Moved:
    """Return what an operator does that is no matrix product; schemas tell what it writes.

    Of the custom operators of this package each is one kernel.
    """
    name, schema = func.overloadpacket.__name__, func._schema
    aliases = [value.alias_info for value in schema.returns if value.alias_info is not None]
    is_view = any(not alias.is_write for alias in aliases)
    if is_view or name in _METADATA or "empty" in name or name == "_unsafe_view":
        return Moved()
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False))
    given |= kwargs
    read: list[Tensor] = []
    written = [] if aliases else _tensors(result)
    for argument in schema.arguments:
        tensors = _tensors(given.get(argument.name))
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        # fused optimizers write gradients only if they unscale them
        if is_written and (argument.name != "grads" or given.get("grad_scale") is not None):
            written += tensors
        if not (is_written and (argument.name.startswith("out") or name in _OVERWRITING)):
            read += tensors
    if name.endswith("_like") or name.startswith("new_"):
        read = []
    if not any(tensor.numel() for tensor in written):
        return Moved()
    distinct = {
        (t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride()): t for t in read
    }
    return Moved(
        _kernels(name, func.namespace, given, result),
        sum(tensor.nbytes for tensor in distinct.values()),
        sum(tensor.nbytes for tensor in written),
    )


def _tensors(value: Any) -> list[Tensor]:
    return [item for item in tree_iter(value) if isinstance(item, Tensor)]


def _kernels(name: str, namespace: str, given: Mapping[str, Any], result: Any) -> int:
    if namespace != "aten" or not ("_foreach_" in name or name.startswith("_fused_")):
        return 1
    lists = [
        value
        for key, value in given.items()
        if isinstance(value, list | tuple)
        and key != "state_steps"
        and value
        and isinstance(value[0], Tensor)
    ]
    if name in _REDUCING:
        # partial results are zeroed first, and combined last
        return launches(lists, TENSORS) + 2 if _is_together(lists, name) else len(lists[0])
    if isinstance(result, list | tuple) and result:
        lists.append(result)
    if not (name.startswith("_fused_") or _is_together(lists, name)):
        return sum(tensor.numel() > 0 for tensor in lists[0])
    has_scalars = any(
        isinstance(value, list | tuple) and value and isinstance(value[0], int | float)
        for value in given.values()
    )
    return launches(lists, _TENSORS_WITH_SCALARS if has_scalars else TENSORS)


def _is_together(lists: Sequence[Sequence[Tensor]], name: str) -> bool:
    """Return whether launches can go over several tensors of these lists."""
    dtypes = [{tensor.dtype for tensor in tensors} for tensors in lists]
    if name == "_foreach_copy_":
        is_alike = all(len(kinds) == 1 for kinds in dtypes)
    else:
        is_alike = len(set().union(*dtypes)) == 1
    return is_alike and all(
        _is_dense(first)
        and all(t.stride() == first.stride() and t.shape == first.shape for t in rest)
        for first, *rest in zip(*lists, strict=True)
    )


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements fill a range of memory, each once."""
    expected = 1
    by_stride = sorted(zip(tensor.stride(), tensor.shape, strict=True), key=operator.itemgetter(0))
    for stride, size in by_stride:
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def launches(lists: Sequence[Sequence[Tensor]], most: Sequence[int]) -> int:
    """Return into how many launches ``MultiTensorApply`` cuts lists of tensors.

    Args:
        lists: One or more, of equally many tensors.
        most: Tensors that fit into a launch over one list, two, ...
    """
    return _launches((tensor.numel() for tensor in lists[0]), most[len(lists) - 1])


def _launches(sizes: Iterable[int], most: int) -> int:
    count = tensors = blocks = 0
    for size in filter(None, sizes):
        # a launch goes out when its blocks are all used; the rest of the tensor begins the next
        full, left = divmod(blocks + -(-size // CHUNK), BLOCKS)
        tensors = (left > 0) if full else tensors + 1
        count, blocks = count + full, left
        if tensors == most and blocks:
            count, tensors, blocks = count + 1, 0, 0
    return count + (blocks > 0)
