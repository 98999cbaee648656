"""Collections of garbage are put off, and go on afterwards as they did before."""

import gc
from collections.abc import Iterator

import pytest

from megatron_eopt.base.garbage import without_collections


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_before_also_after_an_error(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()

    @without_collections()
    def fails() -> None:
        assert not gc.isenabled()
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert gc.isenabled() == enabled


def test_a_decorated_function_can_be_called_again() -> None:
    gc.enable()
    seen = without_collections()(gc.isenabled)
    assert [seen(), gc.isenabled(), seen()] == [False, True, False]
