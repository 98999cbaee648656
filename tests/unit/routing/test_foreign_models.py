"""Models of other libraries are routed as recorded in ``foreign.yaml``; read it to review them."""

import pytest
import yaml

from tests.unit.routing.foreign import EXPECTED, LIBRARIES, routing_of

RECORDED = yaml.safe_load(EXPECTED.read_text())
MODELS = [(library, name) for library, (_, models) in LIBRARIES.items() for name in models]


@pytest.mark.parametrize(("library", "name"), MODELS)
def test_a_model_is_routed_as_recorded(library, name):
    pytest.importorskip(library, exc_type=ImportError)
    assert routing_of(library, name) == RECORDED[library][name]


def test_twenty_models_are_recorded():
    assert {(library, name) for library in RECORDED for name in RECORDED[library]} == set(MODELS)
    assert len(MODELS) >= 20
