"""The pages that scripts write are what the code says. If one is not, run its script."""

import sys

import torch.distributed as dist

from scripts import error_table, routing_tables
from tests.harness import run_ranks


def test_errors():
    assert error_table.PAGE.read_text() == error_table.page()


def check_routing() -> int:
    dist.destroy_process_group()
    sys.argv = ["routing_tables.py", "--check"]
    return routing_tables.main()


def test_routing():
    assert run_ranks(1, check_routing) == [0]
