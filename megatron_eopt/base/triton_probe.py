"""A kernel that does nothing, to learn whether Triton can build one."""

import triton


@triton.jit
def _nothing() -> None:
    pass


def launch() -> None:
    """Build the kernel and launch it on the current GPU."""
    _nothing[(1,)]()
