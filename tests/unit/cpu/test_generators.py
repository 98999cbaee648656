"""The host and the GPU draw from generators of their own, as where there is a GPU."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import checkpoint as megatron_checkpoint
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from torch.nn import functional
from torch.utils.data import DataLoader

from megatron_eopt import cpu
from tests.harness.each_rank import on_ranks
from tests.harness.megatron import initialize_megatron

ONES = torch.ones(4, 8)
NUMBERS = torch.arange(8)

HOSTS: dict[str, Callable[[], Any]] = {
    "rand": lambda: torch.rand(3),
    "randint": lambda: torch.randint(5, (3,)),
    "randperm": lambda: torch.randperm(5),
    "normal": lambda: torch.normal(0.0, 1.0, (3,)),
    "a seed": lambda: torch.empty((), dtype=torch.int64).random_(),
    "a shuffling data loader": lambda: list(DataLoader([1, 2, 3], shuffle=True)),  # type: ignore[arg-type]
}
GPUS: dict[str, Callable[[], Any]] = {
    "rand on a GPU": lambda: torch.rand(3, device="cuda"),
    "rand_like": lambda: torch.rand_like(ONES),
    "normal around a tensor": lambda: torch.normal(ONES, 1.0),
    "normal_": lambda: torch.empty(3).normal_(),
    "initial weights": lambda: torch.nn.Linear(2, 2),
    "dropout": lambda: functional.dropout(ONES),
    "dropout of attention": lambda: functional.scaled_dot_product_attention(
        ONES[None], ONES[None], ONES[None], dropout_p=0.1
    ),
    "bernoulli": lambda: torch.bernoulli(ONES / 2),
    "multinomial": lambda: torch.multinomial(ONES, 2),
}


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    default = torch.default_generator
    yield
    cpu.disable()
    assert torch.default_generator is torch.random.default_generator is default


@pytest.fixture
def two() -> None:
    cpu.enable()
    torch.manual_seed(1)
    torch.cuda.manual_seed(2)


def _moved(draw: Callable[[], Any]) -> tuple[bool, bool]:
    """Return whether the host's and the GPU's generator have moved."""
    host, gpu = torch.get_rng_state(), torch.cuda.get_rng_state()
    draw()
    moved = not torch.equal(host, torch.get_rng_state())
    return moved, not torch.equal(gpu, torch.cuda.get_rng_state())


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("name", [*HOSTS, *GPUS])
def test_one_of_them_draws(name: str) -> None:
    assert _moved((HOSTS | GPUS)[name]) == (name in HOSTS, name in GPUS)


@pytest.mark.usefixtures("two")
def test_who_names_a_generator_gets_that() -> None:
    own = torch.Generator().manual_seed(3)
    assert _moved(lambda: torch.rand(3, generator=own)) == (False, False)
    assert _moved(lambda: NUMBERS.clone().random_(generator=own)) == (False, False)


def test_there_is_one_until_the_gpu_is_seeded_by_itself() -> None:
    def draws() -> list[torch.Tensor]:
        torch.manual_seed(3)
        return [
            torch.rand(2),
            functional.dropout(ONES),
            torch.empty(3).normal_(),
            torch.randperm(9),
        ]

    plain = draws()
    cpu.enable()
    assert all(map(torch.equal, draws(), plain))
    before = torch.get_rng_state()
    torch.cuda.manual_seed(4)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(torch.cuda.get_rng_state(), before)
    cpu.disable()
    # what the host has drawn counts afterwards
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, draws(), plain))


@on_ranks(2)
def test_megatrons_recomputation_draws_the_same_masks() -> None:
    initialize_megatron(tp=2)
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    def layer(x: torch.Tensor) -> torch.Tensor:
        y = functional.dropout(x)
        with get_cuda_rng_tracker().fork():
            return functional.dropout(y)

    x = ONES.clone().requires_grad_()
    y = megatron_checkpoint(layer, False, x)
    functional.dropout(ONES)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    size = parallel_state.get_tensor_model_parallel_world_size()
    masks = [torch.empty_like(y) for _ in range(size)]
    torch.distributed.all_gather(masks, y.detach())
    assert not torch.equal(*masks)


@pytest.mark.usefixtures("two")
def test_megatrons_tracker_forks_the_gpus(caplog: pytest.LogCaptureFixture) -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 7)

    def forked() -> None:
        with tracker.fork("a"):
            drawn.append(torch.rand(3, device="cuda"))

    drawn: list[torch.Tensor] = []
    assert _moved(forked) == (False, False)
    forked()
    torch.cuda.manual_seed(7)
    assert torch.equal(torch.cat(drawn), torch.rand(6, device="cuda"))
    with tracker.fork("a"):
        torch.nn.init.normal_(torch.empty(3))
    assert not caplog.records
    with tracker.fork("a"):
        torch.rand(3)
    assert "CPU RNG state changed" in caplog.text
