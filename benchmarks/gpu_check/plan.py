"""Which sections there are, and how long each may take; the standard library alone is needed."""

from typing import NamedTuple


class Section(NamedTuple):
    """One section.

    Attributes:
        name: Of its module below ``sections``.
        limit_s: Seconds after which it is stopped.
        meaning: What it does, in a line.
    """

    name: str
    limit_s: float
    meaning: str


SECTIONS = (
    Section("quickstart", 150, "the quickstart's training, whose loss must fall"),
    Section("reference", 90, "one step against float64 on the CPU, in float32 and bfloat16"),
    Section("layouts", 120, "the same update at all layouts that the GPUs allow"),
    Section("no_sync", 90, "where the host waits for the device in a step"),
    Section("cuda_graph", 60, "orthogonalization captured in a CUDA graph and replayed"),
    Section("memory", 90, "peak and standing memory against what the optimizer counts"),
    Section("step", 120, "milliseconds of a step against megatron-core's optimizers"),
    Section("newton_schulz", 150, "milliseconds and TFLOP/s of all back ends"),
    Section("golden", 240, "values of functional cases: recorded, or compared with committed ones"),
)
"""In the order in which they run: the one that may take longest comes last."""

NEEDED = {
    "torch": "torch",
    "megatron.core": "megatron-core",
    "megatron.training": "megatron-core",
    "emerging_optimizers": "emerging-optimizers",
    "absl": "absl-py",
    "numpy": "numpy",
    "psutil": "psutil",
    "yaml": "pyyaml",
    "rich": "rich",
    "einops": "einops",
    "omegaconf": "omegaconf",
    "tqdm": "tqdm",
    "tensorboard": "tensorboard",
    "matplotlib": "matplotlib",
}
"""Modules that sections import, and the packages that have them."""
