"""Runs unmodified megatron-core and megatron.training on CPU processes with gloo.

Megatron names the device ``cuda`` in hundreds of places. :func:`enable` lets those places mean the
CPU: tensors asked for on a GPU are made on the CPU, streams and events become no-ops (a CPU
computes in program order), and a second generator of random numbers keeps the host's draws apart
from the GPU's (see :mod:`megatron_eopt.cpu.generators`). :func:`disable` takes everything back.
"""

from megatron_eopt.cpu.backend import (
    Device,
    choose_device,
    disable,
    enable,
    enable_if_chosen,
    enabled,
    is_enabled,
)
from megatron_eopt.cpu.flags import check_supported, set_defaults

__all__ = [
    "Device",
    "check_supported",
    "choose_device",
    "disable",
    "enable",
    "enable_if_chosen",
    "enabled",
    "is_enabled",
    "set_defaults",
]
