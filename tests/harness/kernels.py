"""Triton's kernels on a CPU: its interpreter runs them, where no GPU does."""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime.jit import JITFunction

from megatron_eopt.base import gpu

NAMES = (
    "megatron_eopt.math.triton_passes",
    "megatron_eopt.math.triton_normalize",
    "megatron_eopt.math.triton_products",
    "megatron_eopt.layouts.block_copies",
)


@contextmanager
def interpreted_kernels() -> Iterator[None]:
    """Let kernels serve all tensors in the block, by the interpreter."""
    # only what is imported now is interpreted, and forgotten afterwards
    for name in NAMES:
        sys.modules.pop(name, None)
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        list(map(importlib.import_module, NAMES))
    interpreter = importlib.import_module("triton.runtime.interpreter")
    convert = interpreter._convert_float

    def to_nearest(values: Any, source: Any, wanted: Any, mode: Any) -> Any:
        # the interpreter cuts bits off, where a GPU rounds to the nearest number
        if (source, wanted) != (tl.float32, tl.bfloat16):
            return convert(values, source, wanted, mode)
        flat = torch.from_numpy(np.ascontiguousarray(values)).bfloat16()
        return flat.view(torch.int16).numpy().view(np.uint16)

    dot = interpreter.InterpreterBuilder.create_dot

    def widened(builder: Any, left: Any, right: Any, *args: Any) -> Any:
        # the interpreter multiplies the bits of bfloat16 as integers
        sides = [
            interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
            if x.dtype.scalar == tl.bfloat16
            else x
            for x in (left, right)
        ]
        return dot(builder, *sides, *args)

    multiplied = mock.patch.object(interpreter.InterpreterBuilder, "create_dot", widened)
    served = mock.patch.object(gpu, "runs_kernels", return_value=True)

    def call(function: Any, *args: Any) -> Any:
        # what kernels call of Triton's own has been imported already
        return interpreter.InterpretedFunction(function.fn)(*args)

    called = mock.patch.object(JITFunction, "__call__", call)
    with mock.patch.object(interpreter, "_convert_float", to_nearest), served, called, multiplied:
        yield
    for name in NAMES:
        del sys.modules[name]
