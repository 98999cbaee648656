"""Whether there is a GPU."""

import torch


def is_there() -> bool:
    """Return whether ``cuda`` is a GPU: a back end may let it mean the CPU."""
    return torch.cuda.is_available() and torch.empty(0, device="cuda").is_cuda
