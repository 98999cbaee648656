"""The self-check of GPU kernels: each fault put into one of them is found, and nothing else is.

Triton's interpreter runs the kernels. A fault is another text in a kernel, a table or a launch.
"""

import ast
import importlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from megatron_eopt.base import kernels
from megatron_eopt.layouts import copy_checks, redistribution
from megatron_eopt.math import kernel_checks, norms, passes, products
from tests.harness.kernels import checked_kernels

ROOT = Path(kernels.__file__).parents[1]


class Fault(NamedTuple):
    """A text of a module and what it becomes."""

    right: str
    wrong: str
    first: int = 0  # case that can find it, before which others would take seconds


PASSES = {
    "momentum mixed the other way round": Fault(
        "_lerp(start, grad, share)", "_lerp(grad, start, share)"
    ),
    "Nesterov with the other number": Fault(
        "mixed.to(tl.float32), numbers[1]", "mixed.to(tl.float32), numbers[0]"
    ),
    "decay of momentum left out": Fault("tl.fma(weight.to(tl.float32), numbers[2], grad)", "grad"),
    "momentum stored without a mask": Fault(
        "tl.store(kept, mixed, mask=mask)", "tl.store(kept, mixed)"
    ),
    "gradients loaded from a block further on": Fault(
        "tl.load(grads, mask=mask)", "tl.load(grads + BLOCK, mask=mask)"
    ),
    "nan writes": Fault("size = tl.where(factor == factor, size, 0)", "size = size"),
    "gradients without their factor": Fault("grad * tl.load(grad_scale)", "grad"),
    "sums of all blocks in the first": Fault(
        "tl.store(sums + block, tl.sum(value * value))", "tl.store(sums, tl.sum(value * value))"
    ),
    "update added, not subtracted": Fault(
        "weight = tl.fma(step, numbers[1], weight)", "weight = tl.fma(step, -numbers[1], weight)"
    ),
    "weights not decayed": Fault("_decayed(weight, step, numbers[0]", "_decayed(weight, step, 0.0"),
    "cautious decay of all weights": Fault("decay - cautious * decay", "decay", first=8),
    "decay where signs are opposed": Fault(
        "tl.where(opposed, decay -", "tl.where(~opposed, decay -", first=8
    ),
    "copies of weights left out": Fault(
        "if dtypes[1] is not None:\n        rounded", "if False:\n        rounded"
    ),
    "beta 1 in the place of beta 2": Fault(
        "tl.fma(grad * grad - second, numbers[4]",
        "tl.fma(grad * grad - second, numbers[3]",
        first=10,
    ),
    "second moment of gradients": Fault("grad * grad - second", "grad - second", first=10),
    "bias of the first moment left": Fault("lr / (1 - tl.exp2(steps * log1))", "lr", first=10),
    "bias of the second moment left": Fault(
        "tl.sqrt(1 - tl.exp2(steps * log2))", "lr / lr", first=10
    ),
    "eps left out": Fault("root) + numbers[7]", "root)", first=10),
    "L2 decay left out": Fault("grad = tl.fma(weight, numbers[2], grad)", "", first=14),
    "moments swapped": Fault(
        "tl.store(firsts, first.to(dtypes[1])", "tl.store(firsts, second.to(dtypes[1])", first=10
    ),
    "stale addresses": Fault(
        "table_of(device, sizes_and_addresses).",
        "globals().setdefault(f'{name}{counts}{dtypes}', table_of(device, sizes_and_addresses)).",
    ),
    "numbers in 16 bits": Fault(
        "np.array(numbers, np.float32)", "np.array(numbers, np.float16)", first=10
    ),
    "a launch too short": Fault("[(sum(counts),)]", "[(sum(counts) - 1,)]"),
    "the third block of a tensor": Fault(
        "places = block * BLOCK", "places = tl.where(block < 2, block, 1) * BLOCK"
    ),
    "the fourth tensor": Fault("return number, places", "return tl.minimum(number, 2), places"),
}

PRODUCTS = {
    "a tile mirrored without transposing": Fault(
        "tl.trans(columns) * out_row + tl.trans(rows) * out_column",
        "tl.trans(rows) * out_row + tl.trans(columns) * out_column",
    ),
    "the other half left out": Fault(
        "tl.store(mirror, tl.trans(value), mask=None if inside is None else tl.trans(inside))",
        "pass",
    ),
    "the diagonal's half left out": Fault(
        "tl.store(mirror, tl.trans(value), mask=tl.trans(within & (rows > columns)))", "pass"
    ),
    "the left loaded without a mask": Fault(
        "tl.load(lefts, mask=of_left, other=0.0)", "tl.load(lefts)", first=8
    ),
    "the inner dimension not masked": Fault(
        "(inner[:, None] < k - start) & (columns[None, :] < n)", "columns[None, :] < n", first=8
    ),
    "stored without a mask": Fault(
        "tl.store(place, value, mask=inside)", "tl.store(place, value)", first=8
    ),
    # not another stride, which would read far beyond the tensor
    "one row in place of a block": Fault("rights += ahead * right_row", "rights += right_row"),
    "only the last block": Fault("tl.dot(one, other, total)", "tl.dot(one, other)"),
    "alpha left out": Fault("total = total * alpha", "total = total"),
    "beta left out": Fault("total += beta * tl.load(place", "total += tl.load(place", first=2),
    "gamma left out": Fault(
        "total += gamma * tl.load(place", "total += 0.0 * tl.load(place", first=3
    ),
    "the addend of another batch": Fault("place = add + batch * add_batch", "place = add", first=2),
    "the diagonal everywhere": Fault(
        "tl.where(rows == columns, total + diagonal, total)", "total + diagonal", first=2
    ),
    "tiles of the lower triangle": Fault("row, number - row * (row + 1) // 2", "row, row"),
    "two batches": Fault("left + batch * left_batch", "left + batch % 2 * left_batch"),
    "lower tiles from the sixteenth row on": Fault(
        "row = ((tl.sqrt(",
        "number = tl.where(number < 120, number, 0)\n    row = ((tl.sqrt(",
        first=-1,
    ),
    "the third group of rows of tiles": Fault(
        "return group * _NEIGHBOURS + within", "return group % 2 * _NEIGHBOURS + within", first=7
    ),
    "512 entries of the inner dimension": Fault(
        "range(0, k, depth)", "range(0, tl.minimum(k, 512), depth)"
    ),
    "strides of another operand": Fault(
        "(left, right, out if add is None else add, out)",
        "(left, left, out if add is None else add, out)",
    ),
    "unmasked tiles for all": Fault(
        "even = m % _SIDE == 0 and n % _SIDE == 0", "even = True or n % _SIDE == 0", first=8
    ),
}

NORMS = {
    "squares loaded without a mask": Fault("mask=places < size, other=0.0)", "other=0.0)"),
    "chunks that overlap": Fault("program % parts * chunk", "program % parts * block"),
    "sums of the first matrix": Fault(
        "tl.load(x + matrix * size + places, mask=places < size",
        "tl.load(x + places, mask=places < size",
    ),
    "not squared": Fault("total += value * value", "total += value"),
    "nan divided away": Fault(", propagate_nan=tl.PropagateNan.ALL", ""),
    "no smallest norm": Fault(
        "tl.full((), numbers[0], tl.float64)", "tl.full((), 0.0, tl.float64)"
    ),
    "another norm": Fault("numbers[1] / old", "1.0 / old"),
    "the first matrix's norm": Fault("sums + matrix * parts + each", "sums + each"),
    "divided without a mask": Fault(
        "value.to(out.dtype.element_ty), mask=mask", "value.to(out.dtype.element_ty)"
    ),
    "a part left out": Fault("mask=each < parts", "mask=each < parts - 1"),
    "the third chunk": Fault("program % parts * chunk", "program % parts % 2 * chunk"),
    "the third matrix": Fault("tl.store(out + matrix * size", "tl.store(out + matrix % 2 * size"),
    "the fifth part": Fault("mask=each < parts", "mask=each < tl.minimum(parts, 4)"),
    "the last blocks left out": Fault("triton.cdiv(size, 4 * block) *", "size // (4 * block) *"),
}

COPIES = {
    "rows and planes of one stride": Fault(
        "planes * _number(block, 5", "planes * _number(block, 6"
    ),
    "rows of all planes": Fault("(rows % height)", "rows"),
    "stored without a mask": Fault(
        "tl.store(sink + columns, values, mask=mask)", "tl.store(sink + columns, values)"
    ),
    "strides swapped": Fault("*sizes, *source, *sink)", "*sizes, *sink, *source)"),
    "sizes swapped": Fault(
        "width = _number(block, 4, aligned)", "width = _number(block, 3, aligned)"
    ),
    "stale addresses": Fault(
        "table_of(device, tuple(rows)).",
        "globals().setdefault(f'{read}{write}{counts}', table_of(device, tuple(rows))).",
    ),
    "a launch too short": Fault("_copy[(sum(counts),)]", "_copy[(sum(counts) - 1,)]"),
    "the third part of a block": Fault(
        "tl.program_id(0)) * BLOCK", "tl.program_id(0)) % 2 * BLOCK"
    ),
    "the third plane": Fault("(rows // height)", "(rows // height % 2)"),
}

# what the kernels of passes and those of copies are launched with
OF_BOTH = {
    "another 16-bit type": Fault("torch.bfloat16: tl.bfloat16", "torch.bfloat16: tl.float16"),
    "blocks counted over all tensors": Fault("- np.repeat(firsts, blocks)", ""),
    "the first tensor for all": Fault(
        "np.repeat(np.arange(len(blocks), dtype=np.int32), blocks)",
        "np.repeat(np.zeros(len(blocks), dtype=np.int32), blocks)",
    ),
}

TABLES = {
    "math.triton_passes": (passes.KERNELS, PASSES),
    "math.triton_products": (products.KERNELS, PRODUCTS),
    "math.triton_normalize": (norms.KERNELS, NORMS),
    "layouts.block_copies": (redistribution.KERNELS, COPIES),
}
FAULTS = [
    *((module, *TABLES[module], name) for module in TABLES for name in TABLES[module][1]),
    *(
        ("base.kernel_tables", family, OF_BOTH, name)
        for family in (passes.KERNELS, redistribution.KERNELS)
        for name in OF_BOTH
    ),
]


def changed_text(module: str, fault: Fault, folder: Path) -> dict[str, Path]:
    """Return the file of a module with a fault in it."""
    text = (ROOT / f"{module.replace('.', '/')}.py").read_text()
    assert text.count(fault.right) >= 1, f"{fault.right} is gone from {module}"
    file = folder / f"{module}.py"
    file.write_text(text.replace(fault.right, fault.wrong))
    return {f"megatron_eopt.{module}": file}


@pytest.mark.parametrize(
    ("module", "family", "faults", "name"),
    FAULTS,
    ids=[f"{module}, {family.name}: {name}" for module, family, _, name in FAULTS],
)
def test_a_fault_in_a_kernel_a_table_or_a_launch_is_found(
    module, family, faults, name, tmp_path, caplog
):
    x = torch.ones(32, 32, dtype=torch.float16)
    cases = slice(faults[name].first, None)
    with checked_kernels(changed_text(module, faults[name], tmp_path), cases):
        assert not family.runs(x)
        assert caplog.text.count(f"GPU kernels for {family.name} do not work") == 1
        assert kernels.SWITCH in caplog.text


def check_place(pointers, mask, given):
    """Check that what is read or written is in a tensor, not around it."""
    addresses = pointers.data[mask.data]
    for tensor in given:
        (first, last), (begin, end) = (
            (one.data_ptr(), one.data_ptr() + one.nbytes) for one in (tensor, kernels.whole(tensor))
        )
        around = (begin <= addresses) & (addresses < end)
        assert not (around & ((addresses < first) | (addresses >= last))).any()


def reads_of(interpreter, given):
    """Return how kernels read: where a mask leaves a number out, a GPU has any number."""
    plain = interpreter.InterpreterBuilder.create_masked_load

    def read(builder, pointers, mask, other, *rest):
        check_place(pointers, mask, given)
        kind = pointers.get_element_ty()
        numbers = np.zeros(pointers.data.shape, interpreter._get_np_dtype(kind))
        # nan in each dtype
        numbers.reshape(-1).view(np.uint8)[:] = 255
        any_number = interpreter.TensorHandle(numbers, kind)
        return plain(builder, pointers, mask, any_number if other is None else other, *rest)

    return read


def writes_of(interpreter, given):
    plain = interpreter.InterpreterBuilder.create_masked_store

    def write(builder, pointers, values, mask, *rest):
        check_place(pointers, mask, given)
        return plain(builder, pointers, values, mask, *rest)

    return write


def divisible(handle, name, values):
    """Take what a kernel says of numbers and addresses, which a GPU's compiler believes."""
    assert name == "tt.divisibility"
    assert not (handle.data % np.array(values)).any()


@pytest.mark.parametrize("module", TABLES)
def test_kernels_stay_within_and_say_what_is_true(module, monkeypatch):
    """Numbers beyond a tensor may be masked later, but need not be memory.

    What the self-check compares is right without them.
    """
    given = []

    def noted(*args, **kwargs):
        given.append(kernels.integers(*args, **kwargs))
        return given[-1]

    for checks in (kernel_checks, copy_checks):
        monkeypatch.setattr(checks, "integers", noted)
    interpreter = importlib.import_module("triton.runtime.interpreter")
    monkeypatch.setattr(interpreter.TensorHandle, "set_attr", divisible)
    builder = interpreter.InterpreterBuilder
    monkeypatch.setattr(builder, "create_masked_load", reads_of(interpreter, given))
    monkeypatch.setattr(builder, "create_masked_store", writes_of(interpreter, given))
    with checked_kernels():
        for name, compute, tolerance in TABLES[module][0]._cases(torch.device("cpu")):
            given.clear()
            for found, wanted in zip(*compute(), strict=True):
                assert kernels._is_near(found, wanted, tolerance), name
            assert given


@pytest.mark.parametrize("module", TABLES)
def test_no_kernel_leaves_the_fusion_of_sums_to_triton(module):
    """Its default differs between releases, and rounding with it."""
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    named = [{word.arg for word in c.keywords} for c in calls if isinstance(c.func, ast.Subscript)]
    launches = [words for words in named if "num_warps" in words]
    assert launches
    assert all("enable_fp_fusion" in words for words in launches)
