"""Off-loaded tensors visit the device in chunks of a bounded size."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from megatron_eopt.optimizers import host_memory
from megatron_eopt.optimizers.host_memory import HostMemory, OffloadSettings


def run_waves(memory, state, run, *functions, arriving=((), ()), named=None, owned=(), batches=()):
    """Let ``run`` be a redistribution that gets functions which load, compute and store."""
    plan = SimpleNamespace(waves=[SimpleNamespace(batches=batches)])
    redistribution = SimpleNamespace(arriving=arriving.__getitem__, plan=plan, run=run)
    found = (lambda names: [named[n] for n in names]), (lambda numbers: [owned[n] for n in numbers])
    memory.run_waves(redistribution, *functions, *found, state)


@pytest.mark.parametrize(
    ("stays", "moved", "chunks"),
    [
        # what stays on the device comes first; a tensor that is larger than a chunk has its own
        ([100], [3, 30, 30, 60, 10], [[100], [3, 30, 30], [60], [10]]),
        # full to the last byte
        ([], [32, 32, 1], [[32, 32], [1]]),
    ],
)
def test_a_chunk_has_as_many_tensors_as_fit(stays, moved, chunks):
    moved = [torch.zeros(size) for size in moved]
    memory = HostMemory(moved, settings=OffloadSettings(fraction=1.0, chunk_bytes=4 * 64))
    found = []
    tensors = [*map(torch.zeros, stays), *moved]
    memory.step_in_chunks(tensors, lambda chunk: found.append([t.numel() for t in chunk]), {})
    assert found == chunks


def test_the_first_chunk_has_only_what_stays():
    stays, tiny = torch.zeros(2), torch.zeros(1, dtype=torch.uint8)
    chunks = []
    HostMemory([tiny]).step_in_chunks([tiny, stays], chunks.append, {})
    assert [[*map(id, chunk)] for chunk in chunks] == [[id(stays)], [id(tiny)]]


def test_the_largest_tensors_within_the_fraction_are_chosen():
    settings = OffloadSettings(fraction=0.5)
    tensors = {name: torch.zeros(size) for name, size in zip("abcd", (6, 5, 3, 2), strict=True)}
    names = {tensor: name for name, tensor in tensors.items()}
    found = settings.chosen({tensor: tensor.numel() for tensor in tensors.values()})
    assert [names[tensor] for tensor in found] == ["a", "d"]


def kept():
    """Return memory that keeps a weight and its state, both, and where everything is."""
    weight, other = (torch.nn.Parameter(torch.zeros(4)) for _ in "12")
    state = {
        weight: {
            "momentum": torch.zeros(4),
            "factors": {"left": [torch.zeros(2, 2)]},
            "codes": torch.zeros(3),
            "step": torch.tensor(1.0),
            "name": "text",
        },
        other: {"momentum": torch.zeros(4)},
    }
    memory = HostMemory([weight], [weight], is_kept=lambda kind, *_: kind != "codes")
    return memory, weight, other, state


def places(weight, state):
    its = state[weight]
    return [t.data_ptr() for t in (weight, its["momentum"], its["factors"]["left"][0])]


def test_what_is_fetched_is_a_copy_that_goes_back_to_its_home():
    memory, weight, other, state = kept()
    homes = places(weight, state)
    stays = [state[weight]["codes"], state[weight]["step"], state[other]["momentum"], other.data]
    before = [tensor.data_ptr() for tensor in stays]
    assert sorted(t.data_ptr() for t in memory.tensors(state)) == sorted(homes)
    memory.fetch([weight, other], state)
    assert not {*homes} & {*places(weight, state)}
    weight.data += 1
    state[weight]["momentum"] += 2
    memory.fetch([weight], state)  # what is there already stays
    assert (weight.sum(), state[weight]["momentum"].sum()) == (4, 8)
    memory.write_back([other], state)
    memory.write_back([weight, other], state)
    assert places(weight, state) == homes
    assert (weight.sum(), state[weight]["momentum"].sum()) == (4, 8)
    now = [state[weight]["codes"], state[weight]["step"], state[other]["momentum"], other.data]
    assert [tensor.data_ptr() for tensor in now] == before
    # and once more: nothing of the first time is left
    memory.fetch([weight], state)
    weight.data += 1
    memory.write_back([weight], state)
    assert (weight.data_ptr(), weight.sum()) == (homes[0], 8)


def test_copies_do_not_block_the_host(monkeypatch):
    memory, weight, _, state = kept()
    copy, how = torch.Tensor.copy_, []
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *t, **k: how.append(k) or copy(*t, **k))
    memory.fetch([weight], state)
    memory.write_back([weight], state)
    assert how == [{"non_blocking": True}] * 6


def test_a_prefetch_is_made_once_and_not_kept_from_a_step_that_failed():
    memory, weight, _, state = kept()
    memory.announce([weight], state)
    state[weight]["momentum"].fill_(5)
    memory.announce([weight], state)
    memory.fetch([weight], state)
    assert state[weight]["momentum"].sum() == 0
    memory.write_back([weight], state)
    seen = []

    def step(chunk):
        seen.append(state[weight]["momentum"].sum().item())

    memory.announce([weight], state)
    state[weight]["momentum"].fill_(5)
    memory.step_in_chunks([weight], step, state)
    memory.announce([weight], state)
    state[weight]["momentum"].fill_(6)
    functions = (lambda *_: step([])), None, None
    run_waves(memory, state, lambda load, *_: load(0, ["w"]), *functions, named={"w": weight})
    assert seen == [20, 24]


@pytest.mark.parametrize("value", [torch.ones(4, dtype=torch.bfloat16), torch.ones(2, 2)])
def test_another_tensor_in_place_of_the_one_that_was_fetched_gets_its_own_home(value):
    memory, weight, _, state = kept()
    home = state[weight]["momentum"]
    memory.fetch([weight], state)
    state[weight]["momentum"] = value
    memory.write_back([weight], state)
    its = state[weight]["momentum"]
    assert (its.dtype, its.shape, its.sum()) == (value.dtype, value.shape, 4)
    assert home.sum() == 0


@pytest.mark.parametrize(
    ("device", "pinned", "home", "fits"),
    [
        ("cpu", False, {}, True),
        ("cpu", False, {"is_pinned": lambda: True}, True),
        ("cpu", False, {"shape": (2, 2)}, False),
        ("cpu", False, {"dtype": torch.bfloat16}, False),
        ("cpu", False, {"device": torch.device("meta")}, False),
        ("cuda", True, {}, False),
        ("cuda", True, {"is_pinned": lambda: True}, True),
    ],
)
def test_a_home_fits_if_it_is_alike_and_pinned_where_a_gpu_reads_it(
    monkeypatch, device, pinned, home, fits
):
    monkeypatch.setattr(host_memory, "_stream", lambda device: None)
    memory = HostMemory(settings=OffloadSettings(device=device))
    alike = {"shape": (4,), "dtype": torch.float32, "device": torch.device("cpu")}
    found = SimpleNamespace(**{**alike, "is_pinned": lambda: False, **home})
    assert memory._fits(found, torch.zeros(4)) == fits
    assert memory._pinned == pinned


def test_waves_fetch_what_they_need_and_what_comes_next():
    memory, weight, _, state = kept()
    later = torch.nn.Parameter(torch.zeros(4))
    memory.params, memory.weights = memory.params | {later}, memory.weights | {later}
    named, calls = {"a": weight, "b": later}, []
    homes = {name: param.data_ptr() for name, param in named.items()}

    def is_home():
        return [named[name].data_ptr() == home for name, home in homes.items()]

    def load(wave, names):
        calls.append((wave, names, is_home(), [*memory._coming]))
        return {name: named[name] for name in names}

    def store(results):
        calls.append(([*results], is_home()))

    def run(fetch, _, write):
        assert fetch(0, ["a"]) == {"a": weight}
        write({"a": weight})
        assert is_home() == [True, True]
        fetch(1, ["b"])
        write({"b": later})

    run_waves(memory, state, run, load, None, store, named=named, arriving=[["a"], ["b"], []])
    assert calls == [
        (0, ["a"], [False, True], [later]),
        (["a"], [False, True]),
        (1, ["b"], [True, False], []),
        (["b"], [True, False]),
    ]


def test_the_state_of_matrices_is_there_while_they_are_computed_and_that_of_the_next_comes():
    owned = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
    state = {param: {"moment": torch.zeros(4)} for param in owned}
    memory, calls = HostMemory(owned), []
    homes = [state[param]["moment"].data_ptr() for param in owned]

    def is_home():
        return [state[p]["moment"].data_ptr() == h for p, h in zip(owned, homes, strict=True)]

    def compute(batch):
        calls.append((is_home(), [*memory._coming]))
        state[owned[batch.matrices[0]]]["moment"] += 1

    batches = [SimpleNamespace(matrices=(n,)) for n in range(2)]

    def run(_, fetch_and_compute, __):
        for batch in batches:
            fetch_and_compute(batch)

    run_waves(memory, state, run, None, compute, None, owned=owned, batches=batches)
    assert calls == [([False, True], [owned[1]]), ([True, False], [])]
    assert is_home() == [True, True]
    assert [state[param]["moment"].sum() for param in owned] == [4, 4]


def test_other_tensors_can_take_the_place_of_those_that_are_kept():
    memory, weight, other, state = kept()
    new = torch.nn.Parameter(torch.zeros(4))
    memory.params |= {other}
    memory.announce([weight], state)
    memory.fetch([other], state)
    state[new] = state.pop(weight)
    memory.follow({weight: new})
    assert (memory.params, memory.weights) == ({new, other}, {new})
    assert not memory._coming
    assert not memory._homes


def test_weights_have_a_shape_and_no_memory_while_they_get_gradients():
    memory, weight, other, _ = kept()
    home = weight.data_ptr()
    seen = []

    def fail():
        with memory.stood_in_for():
            seen.append((weight.shape, weight.dtype, weight.stride(), other.stride()))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen == [((4,), torch.float32, (0,), (1,))]
    assert weight.data_ptr() == home


def test_each_direction_waits_on_its_own_stream(monkeypatch):
    """On a GPU; without one, what the streams are asked is recorded."""
    log = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            log.append(f"{self.name} waits for {other.name}")

        def synchronize(self):
            log.append(f"host waits for {self.name}")

    names = iter(["inward", "outward"])
    monkeypatch.setattr(host_memory, "_stream", lambda device: Stream(next(names)))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(log.append(stream.name)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("step"))
    memory, weight, _, state = kept()
    memory.weights, memory._pinned = frozenset(), True
    del state[weight]["factors"]
    empty_like = torch.empty_like
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda _, it: log.append(f"used by {it.name}")
    )
    monkeypatch.setattr(torch, "empty_like", lambda it, **_: log.append("empty") or empty_like(it))
    memory.announce([weight], state)
    memory.fetch([weight], state)
    memory.write_back([weight], state)
    memory.wait_for_write_back()
    # nothing comes or goes
    memory.fetch([], state)
    memory.write_back([], state)
    assert log == [
        *("inward", "empty"),
        *("step waits for inward", "used by step"),
        *("outward waits for step", "empty", "outward", "used by outward"),
        "host waits for outward",
    ]


def test_only_gpus_have_streams(monkeypatch):
    monkeypatch.setattr(torch, "Stream", lambda device: f"stream of {device}")
    assert host_memory._stream(torch.device("cpu")) is None
    assert host_memory._stream(torch.device("cuda", 1)) == "stream of cuda:1"
