"""Entry: ``python -m megatron_eopt``, the same as the command ``megatron-eopt``."""

import gc
import importlib
import logging
import os
import sys
import warnings
from typing import NoReturn

from rich.console import Console


def main() -> NoReturn:
    """Run the command; see :func:`megatron_eopt.tools.command.main`."""
    # what packages say while they are imported concerns trainings
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    # nearly all that an import creates stays
    gc.disable()
    with Console(stderr=True).status("loading Megatron ..."):
        command = importlib.import_module("megatron_eopt.tools.command")
    gc.enable()
    status: int = command.main()
    # the system frees a large model faster than Python, which would look through it for cycles
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
