"""The log shows what a user has asked for, and no warning that is of no use."""

import logging
import subprocess
import sys
import warnings
from unittest.mock import patch

import pytest
import torch
from torch import distributed
from torch.distributed import checkpoint

from megatron_eopt.base.log import inform, warn
from megatron_eopt.base.quiet import ignore_useless_warnings, importing_quietly
from tests.harness.each_rank import on_ranks
from tests.harness.log import listening

NAME = "megatron_eopt.base.somewhere"


@pytest.fixture
def package():
    logger = logging.getLogger("megatron_eopt")
    level, logger.level = logger.level, logging.NOTSET
    yield logger
    logger.setLevel(level)


def test_what_is_asked_for_is_shown_where_warnings_alone_are(package, caplog):
    logging.getLogger().setLevel(logging.WARNING)
    inform(logging.getLogger(NAME), "asked for")
    assert [(r.levelname, r.message) for r in caplog.records] == [("INFO", "asked for")]


def test_a_level_that_is_set_decides(package, caplog):
    package.setLevel(logging.ERROR)
    inform(logging.getLogger(NAME), "asked for")
    assert not caplog.records


@on_ranks(2)
def test_one_rank_warns_as_the_logger_would():
    with listening() as lines:
        warn(logging.getLogger(NAME), "%d of %s", 2, "them")
        warn(logging.getLogger(NAME), "100 %")
    assert lines == (["2 of them", "100 %"] if distributed.get_rank() == 0 else [])


@pytest.mark.long
@pytest.mark.parametrize(
    "statement",
    [
        "from megatron_eopt import get_megatron_optimizer; import megatron_eopt.fsdp2",
        "import megatron_eopt.checkpoints",
        "import megatron_eopt.hugging_face",
    ],
)
def test_an_import_prints_nothing(statement):
    command = [sys.executable, "-W", "default", "-c", statement]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for text in ("not installed", "transformer-engine>=", "No CUDA runtime"):
        assert text not in done.stdout + done.stderr


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
