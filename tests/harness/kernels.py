"""Triton's kernels on a CPU: its interpreter runs them, where no GPU does."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime.jit import JITFunction

from megatron_eopt.base import kernels
from megatron_eopt.layouts import redistribution
from megatron_eopt.math import norms, passes, products

NAMES = (
    "megatron_eopt.base.kernel_tables",
    "megatron_eopt.math.triton_passes",
    "megatron_eopt.math.triton_normalize",
    "megatron_eopt.math.triton_products",
    "megatron_eopt.layouts.block_copies",
)


OWN = (passes.KERNELS, norms.KERNELS, products.KERNELS, redistribution.KERNELS)
"""The families of this package's own kernels; others are of packages for GPUs."""


def serve_all(family: kernels.Family, tensor: torch.Tensor) -> bool:
    """Let own kernels serve all tensors."""
    return family in OWN


@contextmanager
def interpreted_kernels(
    runs: Callable[..., bool] = serve_all, changed: Mapping[str, Path] | None = None
) -> Iterator[None]:
    """Let kernels serve tensors in the block by Triton's interpreter.

    Args:
        runs: Says for a family of kernels and a tensor whether they do; for all by default.
        changed: Files with other texts of modules, by their names.
    """
    # only what is imported now is interpreted, and forgotten afterwards
    for name in NAMES:
        sys.modules.pop(name, None)
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        for name in NAMES:
            if file := (changed or {}).get(name):
                spec = importlib.util.spec_from_file_location(name, file)
                assert spec is not None
                assert spec.loader is not None
                sys.modules[name] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(sys.modules[name])
            else:
                importlib.import_module(name)
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

    patch, run = interpreter._patch_lang, interpreter.InterpretedFunction.__call__

    def run_and_restore(function: Any, *args: Any, **kwargs: Any) -> Any:
        # which the interpreter forgets after a function that a kernel calls, so that nothing could
        # be compiled in this process any more
        scopes: list[Any] = []

        def noted(fn: Any) -> Any:
            scopes.append(patch(fn))
            return scopes[-1]

        with mock.patch.object(interpreter, "_patch_lang", noted):
            try:
                return run(function, *args, **kwargs)
            finally:
                for scope in reversed(scopes):
                    scope.restore()

    def call(function: Any, *args: Any) -> Any:
        # what kernels call of Triton's own has been imported already
        return interpreter.InterpretedFunction(function.fn)(*args)

    with (
        mock.patch.object(interpreter, "_convert_float", to_nearest),
        mock.patch.object(interpreter.InterpreterBuilder, "create_dot", widened),
        mock.patch.object(interpreter.InterpretedFunction, "__call__", run_and_restore),
        mock.patch.object(JITFunction, "__call__", call),
        mock.patch.object(kernels.Family, "runs", runs),
    ):
        try:
            yield
        finally:
            for name in NAMES:
                del sys.modules[name]


@contextmanager
def checked_kernels(
    changed: Mapping[str, Path] | None = None, cases: slice = slice(None)
) -> Iterator[None]:
    """Let their self-check decide which kernels the interpreter runs in the block.

    Args:
        changed: As of :func:`interpreted_kernels`.
        cases: Which cases a check has, because the interpreter takes seconds for all.
    """
    families = kernels.FAMILIES.values()
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        interpreted_kernels(lambda family, tensor: family.work_on(tensor.device), changed),
        mock.patch.object(kernels, "_wanted", True),
        ExitStack() as briefly,
    ):
        for family in families:
            family.forget()
            some = mock.patch.object(family, "_cases", _some_of(family._cases, cases))
            briefly.enter_context(some)
        yield
    for family in families:
        family.forget()


def _some_of(every: Callable[..., Iterator[Any]] | None, which: slice) -> Any:
    return every and (lambda device: iter([*every(device)][which]))
