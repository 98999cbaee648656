"""What an import of upstream's modules prints, and what its loads warn of."""

import logging
import warnings
from unittest.mock import patch

import torch
from torch.distributed import checkpoint

from megatron_eopt.base.quiet import ignore_useless_warnings, importing_quietly


def test_a_missing_gpu_is_not_reported_while_importing(caplog):
    log = logging.getLogger("torch.utils.cpp_extension")
    log.addHandler(caplog.handler)
    # scripts turn these lines off by torch's own variable
    caplog.set_level(logging.WARNING, log.name)
    with importing_quietly():
        log.warning("No CUDA runtime is found")
    log.warning("afterwards")
    log.removeHandler(caplog.handler)
    assert {record.getMessage() for record in caplog.records} == {"afterwards"}


def test_nothing_is_said_of_how_megatron_loads(tmp_path):
    values = {"weight": torch.ones(2)}
    checkpoint.save(values, checkpoint_id=tmp_path, no_dist=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with patch("megatron_eopt.base.quiet._EXTENSIONS"):
            ignore_useless_warnings()
        # as megatron-core calls it: the reader second, and outside of a process group
        checkpoint.load(values, checkpoint.FileSystemReader(tmp_path))
    assert not told
