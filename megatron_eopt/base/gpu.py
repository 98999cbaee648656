"""Whether there is a GPU, and which code serves a tensor."""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake


def is_there() -> bool:
    """Return whether ``cuda`` is a GPU: a back end may let it mean the CPU."""
    return torch.cuda.is_available() and torch.empty(0, device="cuda").is_cuda


def runs_kernels(tensor: Tensor) -> bool:
    """Return whether a GPU's code serves a tensor: it is on one, or has no data.

    A dry run plans for GPUs, so its tensors take the same way.
    """
    return tensor.is_cuda or is_fake(tensor)
