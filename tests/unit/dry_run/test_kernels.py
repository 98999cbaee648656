"""Kernels and bytes of single operators, against what torch's rules for GPUs give by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_eopt.math.newton_schulz import symmetric
from megatron_eopt.tools.dry_run.counting import Amount, Counts, Phase, Report
from megatron_eopt.tools.dry_run.kernels import BLOCKS, CHUNK

FULL = BLOCKS * CHUNK
"""Elements of a tensor that fills one launch."""


def counted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Amount:
    with Counts() as counts:
        function(*args, **kwargs)
    return sum(counts.phases.values(), Amount())


def of(count: int, size: int | tuple[int, ...] = 1, dtype: torch.dtype = torch.float32) -> Any:
    """Return tensors of one shape."""
    return [torch.ones(size, dtype=dtype) for _ in range(count)]


A, B, C, BF16 = *of(3, 10), torch.ones(10, dtype=torch.bfloat16)
SQUARE, NUMBER = torch.ones(4, 4), torch.ones(())
STACK, INTO = torch.ones(2, 4, 4), torch.ones(2, 4, 4)

SINGLE: dict[str, tuple[Callable[[], Any], int, int]] = {
    "views": (lambda: SQUARE.t()[1:].flatten(0).view(12)[::2].unsqueeze(0).detach(), 1, 2 * 48),
    "allocations": (lambda: (torch.empty_like(A), A.new_empty(3), torch.empty(3)), 0, 0),
    "nothing": (lambda: torch.add(A[:0], B[:0]), 0, 0),
    "two inputs": (lambda: torch.add(A, B), 1, 120),
    "one input twice": (lambda: torch.mul(A, A), 1, 80),
    "two parts of one": (lambda: torch.mul(A[:5], A[5:]), 1, 60),
    "a cast": (lambda: BF16.float(), 1, 60),
    "in place": (lambda: A.mul_(B), 1, 120),
    "into another": (lambda: torch.lerp(A, B, 0.5, out=C), 1, 120),
    "copied over": (lambda: A.copy_(BF16), 1, 60),
    "zeroed": (lambda: A.zero_(), 1, 40),
    "new zeros": (lambda: (torch.zeros(10), torch.zeros_like(A), A.new_zeros(10)), 3, 120),
    "to the host": (lambda: float(A[0]), 0, 0),
    "a reduction": (lambda: SQUARE.sum(dim=0), 1, 64 + 16),
    "a product": (lambda: SQUARE @ SQUARE, 0, 0),
    # its addend is copied, unless it is the result
    "a product with an addend": (lambda: torch.addmm(SQUARE, SQUARE, SQUARE), 1, 64 + 64),
    "that into another": (lambda: torch.baddbmm(STACK, STACK, STACK, out=INTO), 1, 128 + 128),
    "with a row": (lambda: torch.addmm(SQUARE[0], SQUARE, SQUARE), 1, 16 + 64),
    "that in place": (lambda: torch.baddbmm(INTO, STACK, STACK, out=INTO), 0, 0),
    "that times zero": (lambda: torch.addmm(SQUARE, SQUARE, SQUARE, beta=0), 0, 0),
}


@pytest.mark.parametrize("name", SINGLE)
def test_one_operator_is_one_kernel(name):
    function, kernels, moved = SINGLE[name]
    found = counted(function)
    assert (found.kernels, found.bytes) == (kernels, moved)


def test_products_and_waits_are_apart():
    found = counted(lambda: (torch.mm(SQUARE, SQUARE), float(A[0]), A.add(1)))
    assert found == Amount(kernels=1, bytes=80, flops=128, kernels_in_all=2, host_waits=1)


def test_half_products_count_half_and_copy_nothing():
    half = torch.ones(16, 16, dtype=torch.float16)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        left = fake.from_tensor(half)
        found = counted(symmetric, left, left.mT, left, beta=2.0)
    assert found == Amount(flops=16 * 16 * 17, kernels_in_all=1)


def strided(count: int) -> list[Tensor]:
    return [tensor[:, ::2] for tensor in of(count, (2, 4))]


MOST: list[tuple[Callable[..., Any], int, int]] = [
    # in place over one list; torch._foreach_mul makes the second, lerp_ has two, lerp makes three
    (lambda a: torch._foreach_mul_(a, 2.0), 1, 110),
    (lambda a: torch._foreach_mul_(a, NUMBER), 1, 110),
    (lambda a: torch._foreach_mul_(a, [2.0] * len(a)), 1, 96),
    (lambda a: torch._foreach_mul(a, 2.0), 1, 64),
    (lambda a, b: torch._foreach_lerp_(a, b, 0.5), 2, 64),
    (lambda a, b: torch._foreach_lerp(a, b, 0.5), 2, 48),
    (torch._foreach_addcmul_, 3, 48),
    (lambda a, b, c: torch._foreach_addcdiv_(a, b, c, [1.0] * len(a)), 3, 48),
    (torch._foreach_addcmul, 3, 36),
]


@pytest.mark.parametrize(("function", "lists", "most"), MOST)
def test_a_launch_takes_fewer_tensors_the_more_lists_there_are(function, lists, most):
    for count, kernels in ((most, 1), (most + 1, 2)):
        assert counted(function, *[of(count) for _ in range(lists)]).kernels == kernels


LISTS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
    "none is empty": (torch._foreach_mul_, (of(110) + of(5, 0), 2.0), 1),
    "all are empty": (torch._foreach_mul_, (of(5, 0), 2.0), 0),
    "two dtypes": (torch._foreach_add_, (of(5), of(5, dtype=torch.bfloat16)), 5),
    "two dtypes in a list": (torch._foreach_mul_, ([A, BF16], 2.0), 2),
    "other strides": (torch._foreach_add_, (of(3, (2, 2)), strided(3)), 3),
    "gaps": (torch._foreach_mul_, (strided(3), 2.0), 3),
    "transposed": (torch._foreach_mul_, ([t.t() for t in of(3, (2, 4))], 2.0), 1),
    # zeros before, what combines partial sums after
    "norms": (torch._foreach_norm, (of(111),), 2 + 2),
    "copies of other dtype": (torch._foreach_copy_, (of(64), of(64, 1, torch.bfloat16)), 1),
    "copies of two dtypes": (torch._foreach_copy_, ([A, B], [A, BF16]), 2),
    "strided copies": (torch._foreach_copy_, (strided(3), of(3, (2, 2))), 3),
    "zeroed": (torch._foreach_zero_, (of(111),), 2),
    "unscaled": (torch._amp_foreach_non_finite_check_and_unscale_, (of(111), *of(2)), 2),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_are_cut_into_launches(name):
    function, args, kernels = LISTS[name]
    assert counted(function, *args).kernels == kernels


@pytest.mark.parametrize(
    ("sizes", "kernels"),
    [
        ([FULL], 1),
        ([FULL + 1], 2),
        ([FULL - CHUNK, CHUNK, 1], 2),
        ([FULL - CHUNK, CHUNK + 1], 2),
        # the rest of the first takes the place of a tensor in the second launch
        ([FULL + 1] + [1] * 109, 2),
        ([FULL + 1] + [1] * 110, 3),
        ([1] * 109 + [FULL], 2),
        # tensors and blocks are all used at once
        ([1] * 109 + [FULL - 109 * CHUNK, 1], 2),
    ],
)
def test_large_tensors_take_many_blocks(sizes, kernels):
    with FakeTensorMode():
        tensors = [torch.empty(size) for size in sizes]
        found = counted(torch._foreach_mul_, tensors, 2.0)
    assert found == Amount(kernels, 8 * sum(sizes), 0, kernels)


def test_bytes_of_lists():
    a, b, half = of(3, 10), of(3, 10), of(3, 10, torch.bfloat16)
    assert counted(torch._foreach_add_, a, b, alpha=-1.0).bytes == 3 * 120
    assert counted(torch._foreach_add_, a, a, alpha=-1.0).bytes == 3 * 80
    assert counted(torch._foreach_add_, a, half).bytes == 3 * 100
    assert counted(torch._foreach_copy_, half, a).bytes == 3 * 60
    assert counted(torch._foreach_sqrt, a).bytes == 3 * 80


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("scale", [None, torch.ones(())])
def test_fused_adam_passes_once(amsgrad, scale):
    most = 30 if amsgrad else 36
    lists = [of(most + 1, 10) for _ in range(4)] + [of((most + 1) * amsgrad, 10), of(most + 1)]
    numbers = dict.fromkeys(("lr", "beta1", "beta2", "weight_decay", "eps"), 0.1)
    found = counted(
        torch._fused_adamw_, *lists, **numbers, amsgrad=amsgrad, maximize=False, grad_scale=scale
    )
    passes = 4 + 3 + 2 * amsgrad + (scale is not None)
    counters = 4 * (most + 1) + (4 if scale is not None else 0)
    assert (found.kernels, found.bytes) == (2, 40 * passes * (most + 1) + counters)


def test_custom_operators_are_counted_by_their_schemas():
    """They are as this package has them."""
    arguments = "Tensor[] a, Tensor(a!)[] b, Tensor table, *, Tensor(b!)[] outs"
    table, operators = torch.ones(6, dtype=torch.int64), torch.ops.megatron_eopt
    with torch.library._scoped_library("megatron_eopt", "FRAGMENT") as library:
        library.define(f"counted_pass({arguments}) -> Tensor")
        library.impl("counted_pass", lambda a, b, table, *, outs: table.new_ones(2), "CPU")
        library.define("counted_move(Tensor a, *, Tensor(a!) out) -> ()")
        library.impl("counted_move", lambda a, *, out: None, "CPU")
        # a is read once, b read and written, the table read, outs and the result written
        found = counted(operators.counted_pass, [A, A], [B, C], table, outs=of(2, 10))
        assert found == Amount(1, 40 + 2 * 80 + 48 + 2 * 40 + 16, 0, 1)
        assert counted(operators.counted_move, A, out=BF16) == Amount(1, 60, 0, 1)


@pytest.mark.parametrize("device", ["host", "device"])
def test_counters_of_steps_are_where_they_are(device):
    param = torch.ones(10, requires_grad=True)
    param.grad = torch.ones(10)
    fused = {"fused": True} if device == "device" else {"foreach": True}
    optimizer = torch.optim.AdamW([param], weight_decay=0.0, **fused)
    optimizer.step()
    found = counted(optimizer.step)
    # a kernel counts, and one updates; else 3 update moments and 4 the weights
    assert found.kernels == (2 if device == "device" else 7)
    assert found.host_waits == 0


def test_what_is_done_for_all_is_shared_by_elements():
    phases = {
        Phase(None, "norm"): Amount(bytes=100),
        Phase("Muon", "directions"): Amount(bytes=60),
        Phase("Muon", "weights"): Amount(bytes=30),
        Phase("Adam", "update"): Amount(bytes=400),
    }
    elements = {"Muon": 15, "Adam": 10, "Lion": 0}
    others: Any = dict.fromkeys(("collectives", "host_reads", "memory"))
    found = Report(elements, [], phases=phases, **others)
    assert found.bytes_per_element == {"Muon": 4 + 6, "Adam": 4 + 40}
    assert found.total.bytes == 590
