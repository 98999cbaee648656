"""Muon's orthogonalization on Transformer Engine's newton_schulz (cuSolverMp).

Run on a machine with NVIDIA GPUs and Transformer Engine:

    torchrun --nproc-per-node 1 examples/te_newton_schulz.py

With more processes the library spreads every matrix over all of them; its longer side must then be
divisible by their number.
"""

import os

import torch
import torch.distributed as dist

from megatron_eopt.math import orthogonalize, register_backend
from megatron_eopt.math.backends import transformer_engine


def main() -> None:
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl")
    # The name works without this line too, over all ranks; register it to choose a group yourself.
    register_backend("transformer_engine", transformer_engine(dist.group.WORLD))

    gradient = torch.randn(2048, 8192, device="cuda", generator=_seeded())
    ours = orthogonalize(gradient, coefficients="quintic", steps=5)
    theirs = orthogonalize(gradient, coefficients="quintic", steps=5, backend="transformer_engine")
    if dist.get_rank() == 0:
        difference = ((theirs - ours).norm() / ours.norm()).item()
        print(f"relative difference between the back ends: {difference:.1e}")
    dist.destroy_process_group()


def _seeded() -> torch.Generator:
    """Return the same generator on every rank: all of them must hold the same matrix."""
    return torch.Generator("cuda").manual_seed(0)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("this example needs an NVIDIA GPU and Transformer Engine")
    main()
