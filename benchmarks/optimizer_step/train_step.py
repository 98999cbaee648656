"""How much of a whole train step the optimizer takes: Muon in fragments against stock's Adam."""

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.about import in_turn
from benchmarks.optimizer_step.arms import TRAIN_SECTION, VOCABULARY, Contestant, ProductsT
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

    @property
    def whole(self) -> list[float]:
        """Return the sums."""
        return [a + b for a, b in zip(self.gradients, self.step, strict=True)]

    def to_json(self) -> dict[str, Any]:
        """Return plain lists and numbers."""
        return asdict(self)


def measure_train_step(products: ProductsT, rounds: int, timeout: float) -> list[TrainStep]:
    """Train both models in turn; ours is the first."""
    ranks = run_ranks(TRAIN_SECTION.ranks, _on_rank, products, rounds, timeout=timeout, cpu=True)

    def slowest(name: str, part: int) -> list[float]:
        return [max(rank[name][i][part] for rank in ranks) for i in range(rounds)]

    return [
        TrainStep(arm.name, slowest(arm.name, 0), slowest(arm.name, 1))
        for arm in TRAIN_SECTION.arms
    ]


def _on_rank(products: ProductsT, rounds: int) -> dict[str, list[tuple[float, float]]]:
    initialize_megatron()
    dtype = torch.bfloat16 if products == "bf16" else torch.float32
    contestants = [Contestant(TRAIN_SECTION, arm, products, dtype) for arm in TRAIN_SECTION.arms]
    times: dict[str, list[tuple[float, float]]] = {arm.name: [] for arm in TRAIN_SECTION.arms}
    for round_, contestant in in_turn(contestants, WARM_UP + rounds):
        elapsed = _train(contestant, MICROBATCHES * round_)
        if round_ >= WARM_UP:
            times[contestant.arm.name].append(elapsed)
    return times


def _train(contestant: Contestant, first: int) -> tuple[float, float]:
    batches = [
        synthetic_batch(seed, size=SEQUENCES, vocabulary=VOCABULARY)
        for seed in range(first, first + MICROBATCHES)
    ]
    dist.barrier()
    began = time.perf_counter()
    forward_backward([contestant.model], batches)
    dist.barrier()
    middle = time.perf_counter()
    contestant.optimizer.step()
    return 1e3 * (middle - began), 1e3 * (time.perf_counter() - middle)
