"""The pages that ``python -m scripts.reference_pages`` writes are what the code says."""

import subprocess
import sys

import pytest

from benchmarks import page as benchmarks_page
from benchmarks.head_to_head import page as head_to_head
from scripts import reference_pages


def test_benchmarks():
    assert benchmarks_page.TARGET.read_text() == benchmarks_page.page()
    assert head_to_head.TARGET.read_text() == head_to_head.page()


@pytest.mark.tested_release
@pytest.mark.parametrize("name", reference_pages.PAGES)
def test_page(name):
    assert (reference_pages.FOLDER / name).read_text() == reference_pages.PAGES[name]()


@pytest.mark.long
def test_plans_of_recipes():
    command = [sys.executable, "-m", "scripts.reference_pages", "--check", "--plans"]
    subprocess.run(command, cwd=reference_pages.FOLDER.parents[1], check=True)
