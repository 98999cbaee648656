"""The pages that scripts write are what the code says. If one is not, run its script."""

import sys

import pytest
import torch.distributed as dist

from scripts import error_table, recipe_pages, routing_tables
from tests.harness import run_ranks


def test_errors():
    assert error_table.PAGE.read_text() == error_table.page()


def check_routing() -> int:
    dist.destroy_process_group()
    sys.argv = ["routing_tables.py", "--check"]
    return routing_tables.main()


def test_routing():
    assert run_ranks(1, check_routing) == [0]


def check_recipes() -> int:
    dist.destroy_process_group()
    sys.argv = ["recipe_pages.py", "--check"]
    return recipe_pages.main()


def test_recipes():
    page = recipe_pages.page(recipe_pages.rows_of_page().__getitem__)
    assert recipe_pages.PAGE.read_text() == page


@pytest.mark.long
def test_plans_of_recipes():
    assert run_ranks(1, check_recipes) == [0]
