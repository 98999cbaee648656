"""Entry: ``python -m megatron_eopt``, the same as the command ``megatron-eopt``."""

import importlib
import logging
import sys
import warnings

from rich.console import Console


def main() -> int:
    """Run the command; see :func:`megatron_eopt.tools.command.main`."""
    # what packages say while they are imported concerns trainings
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with Console(stderr=True).status("loading Megatron ..."):
        command = importlib.import_module("megatron_eopt.tools.command")
    status: int = command.main()
    return status


if __name__ == "__main__":
    sys.exit(main())
