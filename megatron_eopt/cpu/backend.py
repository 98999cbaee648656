"""Turning the CPU back end on and off."""

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch._dynamo import trace_rules

from megatron_eopt.base.upstream import dataset_helpers_to_skip
from megatron_eopt.cpu.attention import attention_patches
from megatron_eopt.cpu.cuda_standins import cuda_patches
from megatron_eopt.cpu.generators import Generators
from megatron_eopt.cpu.gloo import collective_patches, group_patches, mesh_patches
from megatron_eopt.cpu.hybrid import hybrid_patches
from megatron_eopt.cpu.mode import CudaIsCpu, Switch, engine_patches, put_on_stack, take_off_stack
from megatron_eopt.cpu.norms import norm_patches
from megatron_eopt.cpu.patches import Patch, PatchList
from megatron_eopt.cpu.snapshots import snapshot_patches
from megatron_eopt.cpu.threads import thread_patches

logger = logging.getLogger(__name__)


def _dataset_helpers() -> list[Patch]:
    """Skip building the dataset helpers where that cannot work and is not needed."""
    module = dataset_helpers_to_skip()
    return [] if module is None else [Patch(module, "compile_helpers", lambda: None)]


class _Backend:
    """What :func:`enable` has set and :func:`disable` takes back."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._switch = Switch()
        self._generators = Generators()
        self._mode = CudaIsCpu(self._switch, self._generators)
        self._patches = PatchList()
        self._stance: Any = None

    @property
    def on(self) -> bool:
        return self._switch.on

    def enable(self) -> None:
        with self._lock:
            if not self.on:
                self._patches.apply(
                    [
                        *cuda_patches(),
                        *self._generators.patches(),
                        *collective_patches(),
                        *group_patches(),
                        *mesh_patches(),
                        *norm_patches(),
                        *attention_patches(),
                        *hybrid_patches(),
                        *snapshot_patches(),
                        *engine_patches(self._mode),
                        *thread_patches(self._mode),
                        *_dataset_helpers(),
                    ]
                )
                # Dynamo cannot trace calls under a function mode of Python code like this one
                self._stance = torch.compiler.set_stance("force_eager")
                self._switch.on = True
            put_on_stack(self._mode)

    def disable(self) -> None:
        with self._lock:
            take_off_stack(self._mode)
            if self.on:
                self._switch.on = False
                self._generators.unite()
                self._stance.__exit__(None, None, None)
                self._stance = None
                self._patches.restore()
                # Dynamo keeps a table of torch's functions, by now perhaps with stand-ins in it
                trace_rules.clear_lru_cache()


_BACKEND = _Backend()


def enable() -> None:
    """Let ``cuda`` mean the CPU in this process; does nothing if it does already.

    Threads started from now on follow. A thread that ran before needs a call of its own.
    """
    _BACKEND.enable()


def disable() -> None:
    """Take back everything that :func:`enable` did; does nothing if it is off."""
    _BACKEND.disable()


def is_enabled() -> bool:
    """Return whether the CPU back end is on."""
    return _BACKEND.on


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """Enable the back end for a block; it stays on afterwards if it was on before."""
    before = is_enabled()
    enable()
    try:
        yield
    finally:
        if not before:
            disable()
