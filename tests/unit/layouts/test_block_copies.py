"""The kernel that copies blocks does what torch does; Triton's interpreter runs it on a CPU."""

import sys
from unittest import mock

import pytest
import torch

from megatron_eopt.base import kernels
from megatron_eopt.layouts import redistribution
from megatron_eopt.layouts.exchange import Copy
from megatron_eopt.layouts.redistribution import run_copies
from tests.harness.kernels import interpreted_kernels

KERNELS = "megatron_eopt.layouts.block_copies"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ODD = [
    Copy(0, 0, (5000,), (1, 3), (1, 7)),
    Copy(1, 0, (7, 11), (13, 1, 2), (11, 1, 6000)),
    Copy(1, 1, (3, 5, 9), (70, 11, 1, 200), (45, 9, 1, 0)),
    Copy(0, 1, (1,), (1, 0), (1, 500)),
    Copy(0, 1, (4, 700), (1, 1, 0), (800, 1, 600)),
]
EVEN = [
    Copy(0, 0, (4, 16, 32), (1536, 32, 1, 512), (512, 32, 1, 0)),
    Copy(1, 1, (32, 64), (96, 1, 32), (64, 1, 1024)),
]


@pytest.fixture
def interpreted():
    """Let the interpreter run kernels, where tests say so, and say how often they were launched."""
    with interpreted_kernels(lambda *_: False):
        module = sys.modules[KERNELS]
        with mock.patch.object(module, "launch", side_effect=module.launch) as launch:
            yield launch


def copied(copies, read, write):
    # integers, so that bfloat16 has them: the interpreter rounds otherwise than a GPU
    numbers = torch.Generator().manual_seed(1)
    sources = [torch.randint(-99, 99, (8192,), generator=numbers).to(dtype) for dtype in read]
    sinks = [torch.full([8192], -1000.0, dtype=dtype) for dtype in write]
    run_copies(copies, sources, sinks)
    return sinks


@pytest.mark.parametrize(
    ("read", "write", "launches"),
    [
        ((F32, F32), (F32, F32), 1),
        ((F32, F32), (BF16, BF16), 1),
        ((BF16, BF16), (F32, F32), 1),
        ((F16, F16), (F16, F16), 1),
        ((F32, BF16), (BF16, F16), None),
    ],
)
@pytest.mark.parametrize("copies", [ODD, EVEN], ids=["odd", "even"])
def test_all_blocks_of_a_call_are_copied_by_one_kernel(interpreted, copies, read, write, launches):
    expected = copied(copies, read, write)
    assert not interpreted.called
    with mock.patch.object(kernels.Family, "runs", return_value=True):
        found = copied(copies, read, write)
    assert all(map(torch.equal, found, expected))
    dtypes = {(read[copy.source], write[copy.sink]) for copy in copies}
    assert interpreted.call_count == (launches or len(dtypes))


def test_one_odd_block_narrows_no_launch_but_its_own(interpreted):
    kernel = mock.MagicMock()
    with (
        mock.patch.object(sys.modules[KERNELS], "_copy", kernel),
        mock.patch.object(kernels.Family, "runs", return_value=True),
    ):
        copied([*EVEN, *ODD[:2]], (F32, F32), (BF16, BF16))
    # tables of nine numbers for each block, and whether their loads are wide
    launches = [call.args for call in kernel.__getitem__.return_value.call_args_list]
    assert [(args[1].numel(), args[-1]) for args in launches] == [(2 * 9, True), (2 * 9, False)]


def test_what_32_bits_cannot_count_is_copied_by_torch():
    flat = [torch.empty(2**31, device="meta")]
    copies = [Copy(0, 0, (size,), (1, 0), (1, 0)) for size in (77, 2**31, 1)]
    with (
        mock.patch.object(kernels.Family, "runs", return_value=True),
        mock.patch.object(redistribution, "copy_blocks") as by_kernel,
    ):
        run_copies(copies, flat, flat)
    assert [out.numel() for out in by_kernel.call_args.args[0]] == [77, 1]
