"""How many kernels torch launches on a GPU for one operator, and how many bytes they move.

These are torch's own rules, so that tensors without data, or on a CPU, are counted as on a GPU:

* Views, allocations and values that the host reads take no kernel, nor does what has no elements.
* An operator takes one kernel. Lists of tensors (``_foreach``, ``_fused``) are cut into launches as
  torch's ``MultiTensorApply`` does. Where it cannot, as their dtypes or strides differ, each tensor
  has a kernel.
* Each distinct tensor is read once, and each output is written. What is overwritten is not read.

What one operator's kernels write for each other is not counted.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.utils._pytree import tree_iter

CHUNK = 65_536
"""Elements that one block of a launch works on, of one tensor."""

BLOCKS = 320
"""Most blocks of a launch."""

TENSORS = (110, 64, 48, 36, 30)
"""Most tensors of a launch, if it goes over one list, two, ... five."""

_NOTHING = {"_unsafe_view", "detach_", "resize_", "set_", "squeeze_", "t_", "unsqueeze_"}
_OVERWRITING = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"}
_OF_LISTS = ("_foreach_", "_fused_", "_amp_foreach_")
_REDUCING = {"_foreach_norm", "_foreach_max"}


def moved_by(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> tuple[int, int]:
    """Return the kernels, and the bytes they move, of an operator that is no matrix product.

    Schemas tell what it writes. Of this package's custom operators each is one kernel.
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
        # fused optimizers write gradients only if they unscale them
        if is_written and (argument.name != "grads" or given.get("grad_scale") is not None):
            written += tensors
        if not (is_written and (argument.name.startswith("out") or name in _OVERWRITING)):
            read += tensors
    if name.endswith("_like") or name.startswith("new_"):
        read = []
    if not any(tensor.numel() for tensor in written):
        return 0, 0
    distinct = {
        (t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride()): t for t in read
    }
    moved = sum(tensor.nbytes for tensor in (*distinct.values(), *written))
    is_of_lists = func.namespace == "aten" and name.startswith(_OF_LISTS)
    return (_kernels(func, given, result) if is_of_lists else 1), moved


def _tensors(value: Any) -> list[Tensor]:
    return [item for item in tree_iter(value) if isinstance(item, Tensor)]


def _kernels(func: Any, given: Mapping[str, Any], result: Any) -> int:
    """Return the kernels of an operator on lists of tensors."""
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
        most = min(most, 96)  # each launch has a number for each of its tensors
    # partial results are zeroed first, and combined last
    return launches(sizes, most) + 2 * (name in _REDUCING)


def _is_together(lists: Sequence[Sequence[Tensor]], name: str) -> bool:
    """Return whether one kernel can work on several tensors of these lists."""
    dtypes = [{tensor.dtype for tensor in tensors} for tensors in lists]
    groups = dtypes if name == "_foreach_copy_" else [set().union(*dtypes)]
    return all(len(group) == 1 for group in groups) and all(
        is_non_overlapping_and_dense_or_false(first)
        and all((t.shape, t.stride()) == (first.shape, first.stride()) for t in rest)
        for first, *rest in zip(*lists, strict=True)
    )


def launches(sizes: Iterable[int], most: int) -> int:
    """Return into how many launches, of ``most`` tensors at most, lists of such sizes are cut."""
    count = tensors = blocks = 0
    for size in filter(None, sizes):
        # a launch goes out when its blocks are all used; the rest of the tensor begins the next
        full, left = divmod(blocks + -(-size // CHUNK), BLOCKS)
        tensors = (left > 0) if full else tensors + 1
        count, blocks = count + full, left
        if tensors == most and blocks:
            count, tensors, blocks = count + 1, 0, 0
    return count + (blocks > 0)
