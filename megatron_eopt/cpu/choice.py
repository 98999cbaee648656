"""Whether a script runs on GPUs or on the CPU."""

import logging
import os
from typing import Literal, get_args

import torch

from megatron_eopt.base.errors import check_choice
from megatron_eopt.cpu.backend import enable

logger = logging.getLogger(__name__)

type Device = Literal["cpu", "cuda"]

VARIABLE = "MEGATRON_EOPT_DEVICE"

# kept before enable() puts an answer of its own there
_gpu_is_available = torch.cuda.is_available


def choose_device() -> Device:
    """Return the device that the environment variable MEGATRON_EOPT_DEVICE names.

    Without it, ``"cpu"`` exactly when this machine has no usable GPU, also after
    :func:`megatron_eopt.cpu.enable`.

    Raises:
        ConfigurationError: If the variable has another value than ``cpu`` or ``cuda``.
    """
    value = os.environ.get(VARIABLE)
    if value is None:
        return "cuda" if _gpu_is_available() else "cpu"
    check_choice(VARIABLE, value, get_args(Device.__value__))
    return "cpu" if value == "cpu" else "cuda"


def enable_if_chosen() -> Device:
    """Enable the CPU back end if :func:`choose_device` says ``"cpu"``; return what it says."""
    device = choose_device()
    if device == "cpu":
        enable()
        logger.info("running on the CPU with gloo (set %s=cuda to use GPUs)", VARIABLE)
    return device
