"""Writes to the log what a user has asked for."""

import logging

from megatron_eopt.base.agreement import is_rank_0


def warn(logger: logging.Logger, text: str, *args: object) -> None:
    """Log a warning on rank 0, with arguments as ``logger.warning`` takes them."""
    if is_rank_0():
        logger.warning(text, *args)


def inform(logger: logging.Logger, text: str) -> None:
    """Log on rank 0 what a setting asks for, at INFO, even if the log shows warnings only.

    If a level or a handler is set for ``megatron_eopt`` or one of its modules, it decides.
    """
    package = logging.getLogger("megatron_eopt")
    if package.level == logging.NOTSET:
        package.setLevel(logging.INFO)
    # Python's handler of last resort shows warnings only
    if not logger.hasHandlers():
        package.addHandler(logging.StreamHandler())
    if is_rank_0():
        logger.info(text)
