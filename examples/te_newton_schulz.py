"""Orthogonalize a matrix with Transformer Engine's newton_schulz (cuSolverMp), as Muon's back end.

Run it on a machine with NVIDIA GPUs and Transformer Engine:

    torchrun --nproc-per-node 1 examples/te_newton_schulz.py

With several processes, the library distributes each matrix over all of them. The longer side of a
matrix must then be divisible by the number of processes.
"""

import os

import torch
import torch.distributed as dist

from megatron_eopt.math import orthogonalize, register_backend
from megatron_eopt.math.backends import transformer_engine


def main() -> None:
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl")
    # Without this line, the back end uses all ranks. Register it to choose another process group.
    register_backend("transformer_engine", transformer_engine(dist.group.WORLD))

    gradient = torch.randn(2048, 8192, device="cuda", generator=_seeded())
    ours = orthogonalize(gradient, coefficients="quintic", steps=5)
    theirs = orthogonalize(gradient, coefficients="quintic", steps=5, backend="transformer_engine")
    if dist.get_rank() == 0:
        difference = ((theirs - ours).norm() / ours.norm()).item()
        print(f"relative difference between the back ends: {difference:.1e}")
    dist.destroy_process_group()


def _seeded() -> torch.Generator:
    """Return a generator with the same seed on every rank, since all ranks need the same matrix."""
    return torch.Generator("cuda").manual_seed(0)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("This example needs an NVIDIA GPU and Transformer Engine.")
    main()
