"""List the sections and their time limits, with the standard library only."""

from typing import NamedTuple


class Section(NamedTuple):
    """One section.

    Attributes:
        name: Name of its module in ``sections``.
        limit_s: Time limit in seconds.
        meaning: What it does, in one line.
    """

    name: str
    limit_s: float
    meaning: str


SECTIONS = (
    Section("kernels", 90, "compare our kernels with torch's functions, and time them"),
    Section("step", 150, "time a step against megatron-core's optimizers, and split its time"),
    Section("no_sync", 45, "list where the host waits for the GPU during a step"),
    Section("overlap", 75, "compare steps beside the backward pass with serial ones"),
    Section("off_load", 45, "compare steps with state in host memory with those without"),
    Section("replay", 75, "run the step of one rank of a large job, beside its plan and others'"),
    Section("newton_schulz", 45, "time all back ends of Newton-Schulz"),
    Section("reference", 90, "compare one step with float64 on the CPU, in float32 and bfloat16"),
    Section("layouts", 120, "compare updates at all layouts that fit the GPUs"),
    Section("memory", 90, "compare measured memory with the optimizer's own count"),
    Section("quickstart", 150, "train the quickstart and check that its loss falls"),
)
"""In the order in which they run; the first :data:`FIRST` answer most, and fit the time limit."""

FIRST = 7
MINUTES = 9.0
"""The command's time limit, unless ``--minutes`` says another."""

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
    "packaging": "packaging",
    "tensorboard": "tensorboard",
    "google.protobuf": "protobuf",
}
"""Modules that sections import, with the packages that provide them."""
