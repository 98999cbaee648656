"""How much of a whole train step the optimizer takes: Muon in fragments against stock's Adam."""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.optimizer_step.arms import TRAIN_SECTION, VOCABULARY, Contestant, ProductsT
from benchmarks.rounds import measured, milliseconds, slowest
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import SEQUENCE_LENGTH, forward_backward, synthetic_batch

MICROBATCHES, SEQUENCES = 4, 32
TOKENS = MICROBATCHES * SEQUENCES * SEQUENCE_LENGTH
WARM_UP = 1


@dataclass(frozen=True)
class TrainStep:
    """Times of one contestant in milliseconds, the slowest rank's of every round.

    Attributes:
        name: The contestant.
        gradients: Forward and backward pass with the reduction of gradients.
        step: The optimizer's step with the gathering of parameters.
    """

    name: str
    gradients: list[float]
    step: list[float]

    def to_json(self) -> dict[str, Any]:
        """Return plain lists and numbers."""
        return asdict(self)


def measure_train_step(products: ProductsT, rounds: int, timeout: float) -> list[TrainStep]:
    """Train both models in turn; ours is the first."""
    ranks = run_ranks(TRAIN_SECTION.ranks, _on_rank, products, rounds, timeout=timeout, cpu=True)

    def times(name: str, part: int) -> list[float]:
        return slowest([[both[part] for both in rank[name]] for rank in ranks])

    return [
        TrainStep(arm.name, times(arm.name, 0), times(arm.name, 1)) for arm in TRAIN_SECTION.arms
    ]


def _on_rank(products: ProductsT, rounds: int) -> dict[str, list[tuple[float, float]]]:
    initialize_megatron()
    dtype = torch.bfloat16 if products == "bf16" else torch.float32
    trainings = {
        arm.name: partial(_train, Contestant(TRAIN_SECTION, arm, products, dtype))
        for arm in TRAIN_SECTION.arms
    }
    return measured(trainings, rounds, WARM_UP)


def _train(contestant: Contestant, round_: int) -> tuple[float, float]:
    first = MICROBATCHES * round_
    batches = [
        synthetic_batch(seed, size=SEQUENCES, vocabulary=VOCABULARY)
        for seed in range(first, first + MICROBATCHES)
    ]
    passes = milliseconds(lambda: _passes(contestant, batches))
    return passes, milliseconds(contestant.optimizer.step)


def _passes(contestant: Contestant, batches: list[Any]) -> None:
    forward_backward([contestant.model], batches)
    # the slowest rank's reduction of gradients belongs to it
    dist.barrier()
