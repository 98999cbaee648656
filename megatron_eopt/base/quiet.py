"""Hides warnings of upstream that are of no use to who trains a model."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_eopt.base.errors import ConfigurationError

_OF_NO_USE = (
    # megatron-core says so in a dozen modules; layers that need a package raise an error
    r"Transformer Engine and Apex are not installed",
    r"Apex is not installed",
    r"Only transformer-engine>=",
    r"MimoModelConfig is experimental",
    # about how Megatron's own trainer and data loader call Megatron and torch
    r"\s*It is recommended to use a ModelConfig",
    r"Overriding default arguments for ",
    r"'pin_memory' argument is set as true but no accelerator is found",
    r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed",
    # about how megatron-core calls torch when it loads a checkpoint
    r"torch\.distributed is disabled, unavailable or uninitialized",
    r"The argument order of load has been changed",
    r"Please use DTensor instead and we are deprecating ShardedTensor",
)
"""Warnings of upstream that no user of an optimizer can act on, as regular expressions."""

_EXTENSIONS = logging.getLogger("torch.utils.cpp_extension")
"""Warns, when it is imported, of a machine with CUDA's compiler but no GPU."""


def ignore_useless_warnings() -> None:
    """Hide upstream's useless warnings in this process, which a script or the launcher owns.

    With a GPU, one line stays that says that Transformer Engine and Apex are missing.
    """
    import torch  # late, because importing this package must be cheap

    for message in _OF_NO_USE:
        warnings.filterwarnings("ignore", message=message)
    if torch.cuda.is_available():
        warnings.filterwarnings("once", message=r".*Falling back to Torch optimizers")
    _EXTENSIONS.setLevel(logging.ERROR)


TRACEBACK = "MEGATRON_EOPT_TRACEBACK"
"""Environment variable that adds the traceback to configuration errors if it is 1."""


def report_errors_once() -> None:
    """Print a configuration error that ends a job as one sentence, of all ranks on rank 0 alone.

    A traceback would say where this package found it, not what to change.
    """
    others = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if getattr(error, "is_on_all_ranks", False) and os.environ.get("RANK", "0") != "0":
            return
        if isinstance(error, ConfigurationError) and os.environ.get(TRACEBACK) != "1":
            sys.stderr.write(f"{kind.__name__}: {error}\n({TRACEBACK}=1 shows where)\n")
        else:
            others(kind, error, trace)

    sys.excepthook = report


@contextmanager
def importing_quietly() -> Iterator[None]:
    """Hide useless warnings while upstream's modules are imported."""
    level = _EXTENSIONS.level
    _EXTENSIONS.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for message in _OF_NO_USE:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        _EXTENSIONS.setLevel(level)
