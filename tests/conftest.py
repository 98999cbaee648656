"""What all tests share."""

from tests.harness import close_pools


def pytest_sessionfinish() -> None:
    close_pools()
