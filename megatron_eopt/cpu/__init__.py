"""CPU back end: runs unmodified megatron-core and megatron.training on CPU processes with gloo.

Megatron names the device ``cuda`` in hundreds of places. :func:`enable` makes it mean the CPU:
tensors are created on the CPU, streams and events do nothing, and host and "GPU" have separate
random number generators (:mod:`megatron_eopt.cpu.generators`). :func:`disable` undoes this.
Whoever adapts it to another release of Megatron or torch reads no other room.
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
