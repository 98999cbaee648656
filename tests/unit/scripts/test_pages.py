"""The pages that scripts write are what the code says. If one is not, run its script."""

import importlib
import sys

import pytest
import torch.distributed as dist

from benchmarks import page as benchmarks_page
from scripts import error_table, recipe_pages, reference_pages
from tests.harness import run_ranks


def test_errors():
    assert error_table.PAGE.read_text() == error_table.page()


def test_benchmarks():
    assert benchmarks_page.TARGET.read_text() == benchmarks_page.page()


@pytest.mark.tested_release
@pytest.mark.parametrize("name", reference_pages.PAGES)
def test_reference(name):
    assert (reference_pages.FOLDER / name).read_text() == reference_pages.PAGES[name]()


def checked(name: str) -> int:
    dist.destroy_process_group()
    sys.argv = [f"{name}.py", "--check"]
    status: int = importlib.import_module(f"scripts.{name}").main()
    return status


@pytest.mark.parametrize(
    "name", ["routing_tables", pytest.param("recipe_pages", marks=pytest.mark.long)]
)
def test_pages_of_scripts(name):
    assert run_ranks(1, checked, name, timeout=500) == [0]


def test_recipes_but_for_their_plans():
    page = recipe_pages.page(recipe_pages.rows_of_page().__getitem__)
    assert recipe_pages.PAGE.read_text() == page
