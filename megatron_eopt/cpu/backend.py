"""Turns the CPU back end on and off, and chooses between it and GPUs."""

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from functools import cache
from typing import Literal, get_args

import torch
from torch._dynamo import trace_rules

from megatron_eopt.base import gpu
from megatron_eopt.base.errors import check_choice
from megatron_eopt.cpu.cuda_standins import cuda_patches
from megatron_eopt.cpu.flags import check_supported, set_defaults
from megatron_eopt.cpu.generators import Generators
from megatron_eopt.cpu.gloo import gloo_patches
from megatron_eopt.cpu.hybrid import hybrid_patches
from megatron_eopt.cpu.megatron_parts import megatron_patches
from megatron_eopt.cpu.mode import CudaIsCpu, mode_patches, put_on_stack, take_off_stack
from megatron_eopt.cpu.patches import patched
from megatron_eopt.cpu.rematerialized import rematerialization_patches

logger = logging.getLogger(__name__)

type Device = Literal["cpu", "cuda"]

VARIABLE = "MEGATRON_EOPT_DEVICE"


@cache
def _gpu_is_available() -> bool:
    """Return the answer without the patches; Lightning lets torch ask patched functions."""
    return torch.cuda.is_available()


_LOCK = threading.RLock()
_GENERATORS = Generators()
_MODE = CudaIsCpu(_GENERATORS)
_UNDO = contextlib.ExitStack()


def enable() -> None:
    """Make ``cuda`` mean the CPU in this process; a second call changes nothing.

    Call it before ``init_process_group``. Threads started earlier each need their own call.
    """
    with _LOCK:
        if not _MODE.on:
            # remembered before the patches answer True
            _gpu_is_available()
            # Dynamo caches torch's functions, perhaps including patched ones
            _UNDO.callback(trace_rules.clear_lru_cache)
            patches = [
                *cuda_patches(),
                *_GENERATORS.patches(),
                *gloo_patches(),
                *megatron_patches(),
                *hybrid_patches(),
                *rematerialization_patches(),
                *mode_patches(_MODE),
            ]
            _UNDO.enter_context(patched(patches))
            # Dynamo cannot trace calls under a function mode in Python
            _UNDO.enter_context(torch.compiler.set_stance("force_eager"))
            _UNDO.callback(_GENERATORS.unite)
            _MODE.on = True
            gpu.stand_in = gpu.StandIn(set_defaults, check_supported)
        # outside of the condition, because each thread has a stack of its own
        put_on_stack(_MODE)


def disable() -> None:
    """Undo :func:`enable`; does nothing if the back end is off."""
    with _LOCK:
        take_off_stack(_MODE)
        _MODE.on = False
        gpu.stand_in = None
        _UNDO.close()


def is_enabled() -> bool:
    """Return whether the CPU back end is on."""
    return _MODE.on


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """Enable the CPU back end for a ``with`` block; it stays on if it was on before."""
    before = is_enabled()
    enable()
    try:
        yield
    finally:
        if not before:
            disable()


def choose_device() -> Device:
    """Return MEGATRON_EOPT_DEVICE if it is set, else ``"cuda"`` if a GPU is usable, or ``"cpu"``.

    Raises:
        ConfigurationError: If the variable is neither ``cpu`` nor ``cuda``.
    """
    value = os.environ.get(VARIABLE)
    if value is None:
        return "cuda" if _gpu_is_available() else "cpu"
    check_choice(VARIABLE, value, get_args(Device.__value__))
    return "cpu" if value == "cpu" else "cuda"


def enable_if_chosen() -> Device:
    """Enable the CPU back end if :func:`choose_device` returns ``"cpu"``; return the device."""
    device = choose_device()
    if device == "cpu":
        enable()
        logger.info("running on the CPU with gloo (set %s=cuda to use GPUs)", VARIABLE)
    return device
