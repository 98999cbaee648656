"""How much of a whole train step the optimizer takes: Muon in fragments against stock's Adam."""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tqdm import tqdm

from benchmarks.optimizer_step.arms import TRAIN_SECTION, VOCABULARY, Contestant, ProductsT
from benchmarks.rounds import measured, milliseconds, slowest
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import forward_backward, synthetic_batch


class Tokens(NamedTuple):
    """How a rank's tokens come.

    Attributes:
        microbatches: Forward and backward passes of a step.
        sequences: Of a microbatch.
        length: Tokens of a sequence.
        vocabulary: Rows of the embedding and of the output layer.
    """

    microbatches: int
    sequences: int
    length: int
    vocabulary: int


GPT2_VOCABULARY = 50_304
"""GPT-2's 50,257, padded as Megatron pads it on one tensor-parallel rank."""

CASES = tuple(
    Tokens(*form, vocabulary)
    for vocabulary in (VOCABULARY, GPT2_VOCABULARY)
    for form in ((4, 32, 16), (4, 1, 512), (1, 1, 2048))
)
"""The same number of tokens: the shorter the sequences and the smaller the vocabulary, the less
time attention and logits take, and the larger the optimizer's part is."""

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


def measure_train_steps(products: ProductsT, rounds: int, timeout: float) -> list[dict[str, Any]]:
    """Train both models in turn, with each form of tokens; ours is the first."""
    found = []
    for number, tokens in enumerate(tqdm(CASES, unit="case")):
        ranks = run_ranks(
            TRAIN_SECTION.ranks, _on_rank, number, products, rounds, timeout=timeout, cpu=True
        )
        arms = [
            TrainStep(
                arm.name,
                *(
                    slowest([[both[part] for both in rank[arm.name]] for rank in ranks])
                    for part in range(2)
                ),
            )
            for arm in TRAIN_SECTION.arms
        ]
        found.append({**tokens._asdict(), "arms": [asdict(arm) for arm in arms]})
    return found


def _on_rank(number: int, products: ProductsT, rounds: int) -> dict[str, list[tuple[float, float]]]:
    initialize_megatron()
    tokens = CASES[number]
    dtype = torch.bfloat16 if products == "bf16" else torch.float32
    trainings = {
        arm.name: partial(
            _train,
            Contestant(TRAIN_SECTION, arm, products, dtype, tokens.length, tokens.vocabulary),
            tokens,
        )
        for arm in TRAIN_SECTION.arms
    }
    return measured(trainings, rounds, WARM_UP)


def _train(contestant: Contestant, tokens: Tokens, round_: int) -> tuple[float, float]:
    first = tokens.microbatches * round_
    batches = [
        synthetic_batch(
            seed, size=tokens.sequences, vocabulary=tokens.vocabulary, length=tokens.length
        )
        for seed in range(first, first + tokens.microbatches)
    ]
    passes = milliseconds(lambda: _passes(contestant, batches))
    return passes, milliseconds(contestant.optimizer.step)


def _passes(contestant: Contestant, batches: list[Any]) -> None:
    forward_backward([contestant.model], batches)
    # the slowest rank's reduction of gradients belongs to it
    dist.barrier()
