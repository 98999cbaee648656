"""Compile every kernel for GPUs that are not here, and list what it uses of a multiprocessor.

    python -m benchmarks.compiled --write

writes docs/benchmarks/compiled.json, from which docs/reference/benchmarks.md has a table. The real
launch functions run on tensors of the CPU; Triton only compiles what they would launch.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.about import table
from benchmarks.predicted import FIGURES
from megatron_eopt.layouts import block_copies
from megatron_eopt.math import passes, triton_normalize, triton_passes, triton_products

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
"""A100, H100, B200 and MI300."""

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
RESULT = FIGURES / "compiled.json"


class Usage(NamedTuple):
    """What a program of a kernel uses: registers a thread, bytes shared, bytes spilled a thread."""

    registers: int
    shared: int
    spilled: int


@contextmanager
def compiling_for(target: GPUTarget) -> Iterator[list[Any]]:
    """Compile for a GPU what the block launches, launch nothing, and yield what was compiled."""
    found: list[Any] = []
    number = list(TARGETS.values()).index(target)
    active = SimpleNamespace(
        # Triton keeps what it has compiled by device
        get_current_device=lambda *_: number,
        get_current_stream=lambda *_: 0,
        get_current_target=lambda: target,
    )
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, **options: Any) -> None:
        found.append(run(kernel, *args, **(options | {"warmup": True})))

    with (
        mock.patch.object(type(driver), "active", active),
        mock.patch.object(JITFunction, "run", compile_only),
    ):
        yield found


def usage(kernel: Any) -> Usage:
    """Return what a compiled kernel uses."""
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        registers, spilled = (
            int(re.findall(rf"\.{name}:\s*(\d+)", text)[-1])
            for name in ("vgpr_count", "private_segment_fixed_size")
        )
        return Usage(registers, kernel.metadata.shared, spilled)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    ((registers, stack),) = re.findall(r"REG:(\d+) STACK:(\d+)", text)
    return Usage(int(registers), kernel.metadata.shared, int(stack))


def cases() -> dict[str, Callable[[], object]]:
    """Return launches of every kernel by name: aligned sizes, then others that kernels serve."""
    found: dict[str, Callable[[], object]] = {}
    for m, k, kind in ((2048, 8192, ""), (2880, 2880, ", 2880"), (576, 1040, ", 576")):
        found |= {
            f"product X Xᵀ{kind}": _product(m, k, F16, tall=False),
            f"product X Xᵀ, tall{kind}": _product(m, k, BF16, tall=True),
            f"product, addend{kind}": _product(m, m, F16, add=True),
            f"product, addend, gamma{kind}": _product(m, m, F16, add=True, gamma=0.5),
            f"product, whole{kind}": _product(m, m, F16, add=True, gamma=0.5, symmetric=False),
            f"product Q X{kind}": _product(m, k, BF16, add=True, symmetric=False, applies=True),
        }
    for size, kind in ((8192, ""), (8191, ", odd")):
        found |= {
            f"directions{kind}": _pass("momentum_update", size, (F32, BF16, F32, None, F64)),
            f"directions, decay{kind}": _pass("momentum_update", size, (F32, BF16, F32, F32, F64)),
            f"update{kind}": _pass("update", size, (F32, BF16, BF16)),
            f"Adam{kind}": _pass("adam", size, (F32, F32, F32, BF16, F32, F32)),
        }
        found[f"copies{kind}"] = _copies(size)
    x = torch.empty(2, 512, 2048, dtype=BF16)
    sums = torch.empty(2, 16, dtype=F64)
    out = torch.empty_like(x, dtype=F16)
    found["sums of squares"] = lambda: triton_normalize.launch_sums(x, sums, 65536, 4096)
    found["division"] = lambda: triton_normalize.launch_division(x, sums, 0.5, 64.0, out, 4096)
    return found


def _product(
    m: int,
    k: int,
    dtype: torch.dtype,
    *,
    tall: bool = False,
    add: bool = False,
    gamma: float = 0.0,
    symmetric: bool = True,
    applies: bool = False,
) -> Callable[[], object]:
    def launch() -> None:
        left = torch.empty(2, m, m if applies else k, dtype=dtype)
        if tall:
            left = left.mT.contiguous().mT
        right = torch.empty(2, m, k, dtype=dtype) if applies else left.mT
        out = torch.empty(2, m, right.shape[-1], dtype=dtype)
        numbers = (0.5, 2.0, gamma, 4.0)
        addend = torch.empty_like(out) if add else None
        triton_products.launch(left, right, addend, out, numbers, symmetric)

    return launch


def _pass(name: str, size: int, dtypes: Sequence[torch.dtype | None]) -> Callable[[], object]:
    blocks = -(-size // passes.BLOCK)

    def of(dtype: torch.dtype) -> Tensor:
        # sums have one element a block
        return torch.empty(blocks if dtype == F64 else size, dtype=dtype)

    lists = [[] if dtype is None else [of(dtype)] for dtype in dtypes]
    return lambda: triton_passes.launch(name, lists, torch.ones(()), (0.5,) * 9)


def _copies(size: int) -> Callable[[], object]:
    outs, blocks = ([torch.empty(size, dtype=dtype)] for dtype in (BF16, F32))
    return lambda: block_copies.launch(outs, blocks)


def measured(targets: Sequence[str] = (*TARGETS,)) -> dict[str, dict[str, Usage]]:
    """Return what each case uses on each target."""
    found: dict[str, dict[str, Usage]] = {}
    for target in targets:
        for name, launch in cases().items():
            with compiling_for(TARGETS[target]) as kernels:
                launch()
            (kernel,) = kernels
            found.setdefault(name, {})[target] = usage(kernel)
    return found


def shown(figures: dict[str, Any]) -> str:
    """Return the page's table."""
    rows = [
        [name, *("{} / {}".format(*uses[target]) for target in TARGETS)]
        for name, uses in figures["kernels"].items()
    ]
    return table(" | ".join(["kernel", *(f"{target}:" for target in TARGETS)]), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    write = parser.parse_args().write
    figures = {"triton": version("triton"), "kernels": measured()}
    print(shown(figures))
    if write:
        RESULT.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
