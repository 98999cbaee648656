"""Passes beside matrix products: which stream gets what, in which order, without a GPU."""

from contextlib import contextmanager

import pytest
import torch

from megatron_eopt.base import gpu
from megatron_eopt.math import passes
from megatron_eopt.optimizers.muon_rule import MuonRule
from tests.harness import run_ranks
from tests.unit.storage.full_state import Case, build, steps
from tests.unit.storage.runs import weights

MODEL = {"layers": 2, "hidden": 32, "heads": 4, "query_groups": 2}
CASE = Case(
    "muon",
    MODEL,
    ddp={"use_distributed_optimizer": True},
    config={"use_distributed_optimizer": True, "matrix_buffer_mb": 1 / 128},
)


class Streams:
    """Stands in for CUDA's streams, and notes what is launched where."""

    def __init__(self, patch):
        self.events, self.current, self.made = [], "main", 0
        streams = self

        class Stream:
            def __init__(self):
                streams.made += 1
                self.name = f"side {streams.made}"

            def wait_stream(self, other):
                streams.events.append((self.name, "waits for", other.name))

        class Current(Stream):
            def __init__(self, name):
                self.name = name

        @contextmanager
        def stream(one):
            before, streams.current = streams.current, one.name
            try:
                yield
            finally:
                streams.current = before

        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "stream", stream)
        patch.setattr(torch.cuda, "current_stream", lambda: Current(streams.current))
        patch.setattr(gpu, "is_there", lambda: True)

    def note(self, patch, owner, name):
        function = getattr(owner, name)

        def call(*args, **kwargs):
            self.events.append((self.current, name))
            return function(*args, **kwargs)

        patch.setattr(owner, name, call)


def trained(wanted):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(gpu.SIDE_STREAM, wanted)
        streams = Streams(patch)
        chunk, optimizer = build(CASE)
        patch.setattr(gpu, "is_there", lambda: False)
        for owner, name in (
            (MuonRule, "_directions"),
            (MuonRule, "_orthogonalize"),
            (MuonRule, "_apply"),
            (passes, "adam_"),
        ):
            streams.note(patch, owner, name)
        patch.setattr("megatron_eopt.optimizers.element_wise.adam_", passes.adam_)
        steps(CASE, chunk, optimizer, 0, 1)
    return streams.events, {
        name: value.clone() for name, (_, value) in weights(CASE.run, chunk).items()
    }


def both_ways():
    return [trained(wanted) for wanted in ("0", "1")]


def test_passes_run_beside_products_in_the_bits_of_one_stream():
    (((alone, expected), (events, found)),) = run_ranks(1, both_ways)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert {place for place, *_ in alone} == {"main"}
    work = [event for event in events if len(event) == 2]
    of = {name: [place for place, what in work if what == name] for _, name in work}
    waves = len(of["_orthogonalize"])
    assert waves > 2
    assert set(of["_orthogonalize"] + of["_apply"]) == {"main"}
    (adams,), (directions,) = set(of["adam_"]), set(of["_directions"][1:])
    assert of["_directions"][0] == "main"
    assert "main" not in (adams, directions)
    assert adams != directions
    # the step ends when all streams have
    assert ("main", "waits for", adams) in events[-2:]
    for place, event in enumerate(events):
        if event == (directions, "_directions"):
            # its stack is free, and it is computed after it has come
            assert events[place - 1] == (directions, "waits for", "main")
            rest = events[place + 1 :]
            last = rest.index(("main", "waits for", directions))
            assert ("main", "_orthogonalize") in rest[:last]
