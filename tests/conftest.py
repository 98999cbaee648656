"""What all tests share."""

from pathlib import Path

from tests.harness import close_pools
from tests.harness.result_table import ResultTable


def pytest_addoption(parser):
    parser.addoption(
        "--write-table",
        type=Path,
        metavar="FILE",
        help="write outcomes, times and figures of the long tests there",
    )


def pytest_configure(config):
    path = config.getoption("--write-table")
    # workers report to the process that started them, which writes
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(ResultTable(path.absolute()))


def pytest_sessionfinish() -> None:
    close_pools()
