"""Passes beside matrix products: which stream gets what, in which order, without a GPU."""

from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_eopt.base import gpu
from tests.harness import run_ranks
from tests.unit.storage.full_state import Case, build, steps
from tests.unit.storage.runs import SHARDED, weights

MODEL = {"layers": 2, "hidden": 32, "heads": 4, "query_groups": 2}
CASE = Case("muon", MODEL, ddp=SHARDED, config=SHARDED | {"matrix_buffer_mb": 1 / 128})

PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm")


class Streams:
    """Stands in for CUDA's streams, and notes what is launched where."""

    def __init__(self, patch):
        self.events, self.current, self.made = [], "main", 0
        streams = self

        class Stream:
            def __init__(self, name=""):
                streams.made += not name
                self.name = name or f"side {streams.made}"

            def wait_stream(self, other):
                streams.events.append((self.name, "waits for", other.name))

        @contextmanager
        def stream(one):
            before, streams.current = streams.current, one.name
            try:
                yield
            finally:
                streams.current = before

        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "stream", stream)
        patch.setattr(torch.cuda, "current_stream", lambda: Stream(streams.current))
        patch.setattr(gpu, "is_there", lambda: True)


class Launches(TorchDispatchMode):
    """Notes on which stream each operator is launched."""

    def __init__(self, streams):
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._streams.events.append((self._streams.current, func._schema.name))
        return func(*args, **(kwargs or {}))


def trained(wanted):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(gpu.SIDE_STREAM, wanted)
        streams = Streams(patch)
        chunk, optimizer = build(CASE)
        patch.setattr(gpu, "is_there", lambda: False)
        with Launches(streams):
            steps(CASE, chunk, optimizer, 0, 1)
    found = {name: value.clone() for name, (_, value) in weights(CASE.run, chunk).items()}
    return streams.events, found


def test_passes_run_beside_products_in_the_bits_of_one_stream():
    (alone, expected), (events, found) = (run_ranks(1, trained, way)[0] for way in "01")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert {place for place, *_ in alone} == {"main"}
    sides = {place for place, *_ in events} - {"main"}
    # one for what is stepped element by element, one for the directions of the next wave
    assert len(sides) == 2
    fresh, running, beside = set(), set(), 0
    for place, *what in events:
        if what == ["waits for", "main"]:
            fresh.add(place)
        elif what[0] == "waits for":
            running.discard(what[1])
        elif place == "main":
            fresh.clear()
            beside += bool(running) and what[0] in PRODUCTS
        else:
            # what it reads has been launched before
            assert place in fresh
            running.add(place)
    assert beside > 2
    # the step ends when all streams have
    assert not running
