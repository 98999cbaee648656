"""Parameters of the optimizer tests."""

import torch


def parameter(*shape, seed=0, grad=True):
    """Return a seeded parameter, with a gradient unless told otherwise."""
    generator = torch.Generator().manual_seed(seed)
    param = torch.nn.Parameter(torch.randn(shape, generator=generator))
    if grad:
        param.grad = torch.randn(shape, generator=generator)
    return param
