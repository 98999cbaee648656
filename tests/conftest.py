"""What all tests share."""

import gc
from pathlib import Path

import pytest

from megatron_eopt.megatron_core.upstream import untested_releases
from tests.harness import close_pools
from tests.harness.long_results import LongResults


def pytest_addoption(parser):
    parser.addoption(
        "--write-results",
        type=Path,
        metavar="FILE",
        help="write outcomes, times and figures of the long tests there",
    )


def pytest_configure(config):
    path = config.getoption("--write-results")
    # workers report to the process that started them, which writes
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(LongResults(path.absolute()))


def pytest_runtest_setup(item):
    if item.get_closest_marker("tested_release") and (other := untested_releases()):
        pytest.skip(f"with {' and '.join(other)}")


def pytest_collection_finish() -> None:
    gc.freeze()


def pytest_sessionfinish() -> None:
    close_pools()
