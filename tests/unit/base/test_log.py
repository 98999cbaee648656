"""The log shows what a user has asked for, and no warning that is of no use."""

import logging
import subprocess
import sys

import pytest

from megatron_eopt.base.log import inform

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
