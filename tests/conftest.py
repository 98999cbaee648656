"""What all tests share."""

import gc
import sys
from pathlib import Path

import pytest

# nothing that imports torch, since the process that starts pytest-xdist's workers runs no test


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
        from tests.harness.long_results import LongResults

        config.pluginmanager.register(LongResults(path.absolute()))


def pytest_runtest_setup(item):
    from megatron_eopt.megatron_core.upstream import untested_releases

    if item.get_closest_marker("tested_release") and (other := untested_releases()):
        pytest.skip(f"with {' and '.join(other)}")


def pytest_collection_finish() -> None:
    gc.freeze()


def pytest_sessionfinish() -> None:
    if harness := sys.modules.get("tests.harness"):
        harness.close_pools()
