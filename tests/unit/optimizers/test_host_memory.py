"""Off-loaded tensors visit the device in chunks of a bounded size."""

from collections import defaultdict

import torch

from megatron_eopt.optimizers.host_memory import HostMemory, OffloadSettings


def test_a_chunk_has_as_many_tensors_as_fit():
    tensors = [torch.zeros(size) for size in (100, 3, 30, 30, 60, 10)]
    stays, *moved = tensors
    memory = HostMemory(moved, settings=OffloadSettings(fraction=1.0, chunk_bytes=4 * 64))
    chunks = []
    memory.step_in_chunks(tensors, lambda chunk: chunks.append([t.numel() for t in chunk]), {})
    # what stays on the device comes first; a tensor that is larger than a chunk has its own
    assert chunks == [[100], [3, 30, 30], [60], [10]]
    assert stays.numel() == 100


def test_the_largest_tensors_within_the_fraction_are_chosen():
    settings = OffloadSettings(fraction=0.5)
    tensors = {name: torch.zeros(size) for name, size in zip("abcd", (6, 5, 3, 2), strict=True)}
    names = {tensor: name for name, tensor in tensors.items()}
    found = settings.chosen({tensor: tensor.numel() for tensor in tensors.values()})
    assert [names[tensor] for tensor in found] == ["a", "d"]


def test_state_that_is_new_goes_to_the_host_too():
    param = torch.zeros(4)
    memory = HostMemory([param], settings=OffloadSettings(fraction=1.0, chunk_bytes=64))
    state = defaultdict(dict)

    def step(chunk):
        for tensor in chunk:
            state[tensor]["momentum"] = torch.ones(4)

    memory.step_in_chunks([param], step, state)
    assert [value.tolist() for value in memory.tensors(state)] == [[1.0] * 4]
