"""GPUs and their interconnects: the rates from which an optimizer step's time is predicted."""

import dataclasses
from dataclasses import dataclass

from megatron_eopt.base.errors import check_number


@dataclass(frozen=True)
class Machine:
    """A GPU and its links. Change numbers with :func:`dataclasses.replace`.

    Raises:
        ConfigurationError: If a number is not positive, or a share of the peak is above 1.
    """

    flops: float  # peak FLOP/s, dense bfloat16
    memory: float  # memory bandwidth in bytes/s
    link: float  # bytes/s that it sends to GPUs of its node
    network: float  # bytes/s that it sends to other nodes
    capacity: float  # bytes of its memory
    gpus: int = 8  # GPUs per node
    efficiency: float = 0.6  # share of ``flops`` that matrix products use, at most 1
    utilization: float = 0.4  # share of ``flops`` that forward and backward passes use, at most 1
    latency: float = 1e-5  # seconds before a collective begins to move data

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            at_most = 1 if name in ("efficiency", "utilization") else None
            check_number(f"machine.{name}", value, above=0, at_most=at_most)


MACHINES = {
    "A100": Machine(312e12, 2.04e12, 300e9, 25e9, 80 * 2**30),
    "H100": Machine(989e12, 3.35e12, 450e9, 50e9, 80 * 2**30),
    "H200": Machine(989e12, 4.8e12, 450e9, 50e9, 141 * 2**30),
    "B200": Machine(2250e12, 8e12, 900e9, 50e9, 180 * 2**30),
}
"""From NVIDIA's data sheets of the SXM modules: bfloat16 without sparsity, NVLink in one direction,
and one network adapter of 200 (A100) or 400 Gbit/s per GPU, as in DGX systems. The sheets' GB of
memory are about as many GiB."""
