"""What megatron-core's factory serves, ours serves: models, rates and parts of models."""

import itertools
import math

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from megatron_eopt import ConfigurationError
from megatron_eopt.testing.scene import forget_megatron
from megatron_eopt.wrappers.factory import get_megatron_optimizer
from tests.harness import models
from tests.harness.each_rank import on_ranks
from tests.harness.log import listening
from tests.harness.megatron import initialize_megatron
from tests.harness.models import assert_same, copies_of, synthetic_batch, train_step, wrap_ddp
from tests.harness.tiers import mostly_long
from tests.unit.contracts.callers import scheduler_of
from tests.unit.storage.runs import OVERLAP

LIGHT = {"num_attention_heads": 1, "num_layers": 1}


def perceptron():
    """Return two linear layers and a normalization; nothing of Megatron."""
    first, second = torch.nn.Linear(24, 16), torch.nn.Linear(16, 8)
    return torch.nn.Sequential(first, torch.nn.LayerNorm(16), torch.nn.ReLU(), second)


class Scales(torch.nn.Module):
    """A model without any matrix."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(24))
        self.shift = torch.nn.Parameter(torch.zeros(24))

    def forward(self, x):
        return x * self.scale + self.shift


def wrapped(model, *, sharded, **flags):
    # the sizes of attention stay 0, as for any model without it
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=sharded, **flags)
    return DistributedDataParallel(TransformerConfig(**LIGHT), ddp, model)


def config_of(optimizer, *, sharded, **fields):
    numbers = {"lr": 0.01, "min_lr": 0.0, "weight_decay": 0.1, "clip_grad": 0.0} | fields
    return OptimizerConfig(optimizer=optimizer, use_distributed_optimizer=sharded, **numbers)


def backward(chunk, seed=0):
    generator = torch.Generator().manual_seed(seed)
    chunk.zero_grad_buffer()
    chunk(torch.randn(4, 24, generator=generator)).square().mean().backward()
    chunk.finish_grad_sync()


def each(*optimizers):
    """Yield each optimizer with each storage, in a Megatron of its own."""
    for case in itertools.product(optimizers, (False, True)):
        initialize_megatron()
        yield case
        forget_megatron()


@on_ranks(2, timeout=120)
def test_a_model_without_attention_is_trained():
    for optimizer, sharded in each("muon", "normuon", "soap", "adam"):
        torch.manual_seed(0)
        chunk = wrapped(perceptron(), sharded=sharded)
        config = config_of(optimizer, sharded=sharded)
        if optimizer == "normuon":
            config.optimizer, config.adaptive_muon_moment2_method = "adaptive_muon", optimizer
        chain = get_megatron_optimizer(config, [chunk])
        before = copies_of(chunk)
        backward(chunk)
        assert chain.step()[0]
        for name, weight in copies_of(chunk).items():
            assert not torch.equal(weight, before[name])
            assert weight.isfinite().all()


# a rate that is written later


@on_ranks(2, timeout=120)
def test_a_rate_may_be_written_after_the_optimizer_is_built():
    for optimizer, sharded in each("muon", "soap", "adam", "sgd"):
        rates, weights = [], []
        for rate in (None, 0.01):
            torch.manual_seed(0)
            chunk = wrapped(perceptron(), sharded=sharded)
            config = config_of(optimizer, sharded=sharded, lr=rate, min_lr=rate and 0.0)
            chain = get_megatron_optimizer(config, [chunk])
            if rate is None:
                backward(chunk)
                with pytest.raises(ConfigurationError, match="lr=None: must be set before a step"):
                    chain.step()
                chain.zero_grad()
            scheduler_of(chain).step(2)
            for seed in range(2):
                backward(chunk, seed)
                chain.step()
                chain.zero_grad()
            rates.append([group["lr"] for group in chain.param_groups])
            weights.append(copies_of(chunk))
        assert rates[0] == rates[1]
        assert_same(*weights)


# nothing for the main optimizer


@on_ranks(2)
def test_a_model_without_matrices_is_trained_by_the_scalar_optimizer():
    for optimizer, sharded in each("muon", "soap"):
        trained = []
        with listening() as lines:
            for name in (optimizer, "adam"):
                chunk = wrapped(Scales(), sharded=sharded)
                chain = get_megatron_optimizer(config_of(name, sharded=sharded), [chunk])
                for seed in range(2):
                    backward(chunk, seed)
                    assert chain.step()[0]
                trained.append(copies_of(chunk))
        warned = [text for text in lines if "is not used" in text]
        assert len(warned) == (torch.distributed.get_rank() == 0)
        assert_same(*trained)


# optimizers over parts of a wrapped model

PARTS = ("layers.0", "layers.1")
"""What two optimizers own; the second has everything outside of the layers, too."""


def only(chunk, part):
    """Let the parameters of one part require gradients, None for all."""
    for name, param in chunk.named_parameters():
        param.requires_grad = part is None or (PARTS[0] in name) == (part == PARTS[0])


def two_parts(sharded, dtype=torch.float32, *, plain_ddp=False, **ddp):
    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    model = models.tiny_gpt(gated=True, query_groups=2, dtype=dtype)
    return wrap_ddp(model, use_distributed_optimizer=sharded and not plain_ddp, **ddp)


USUAL = [("muon", False, False, {}), ("muon", True, True, {}), ("muon", True, False, OVERLAP)]
OTHERS = [
    ("muon", True, False, {}),
    ("muon", True, False, {"plain_ddp": True}),
    ("muon", True, False, {"plain_ddp": True} | OVERLAP),
    ("soap", True, False, {}),
    ("adam", True, False, {}),
    ("adam", True, True, {}),
]


@pytest.mark.parametrize(
    ("optimizer", "sharded", "half", "ddp"), mostly_long([*USUAL, *OTHERS], *USUAL)
)
@on_ranks(2)
def test_two_optimizers_over_disjoint_parts_equal_one_over_all(optimizer, sharded, half, ddp):
    initialize_megatron()
    dtype = torch.bfloat16 if half else torch.float32
    config = config_of(optimizer, sharded=sharded, bf16=half, muon_tp_mode="duplicated")
    whole = two_parts(sharded, dtype, **ddp)
    one = get_megatron_optimizer(config, [whole])
    chunk = two_parts(sharded, dtype, **ddp)
    several = []
    for part in PARTS:
        only(chunk, part)
        several.append(get_megatron_optimizer(config, [chunk]))
    only(chunk, None)
    assert all(any(group["params"] for group in chain.param_groups) for chain in several)
    for step in range(3):
        batch = synthetic_batch(10 * torch.distributed.get_rank() + step)
        train_step([whole], one, [batch])
        several[0].zero_grad()
        train_step([chunk], several[1], [batch])
        several[0].step()
    if ddp.get("overlap_param_gather"):
        for model in (whole, chunk):
            model.start_param_sync(force_sync=True)
            # the hooks of a forward pass gather
            model(batch.tokens, batch.positions, None, labels=batch.labels)
    assert_same(copies_of(chunk), copies_of(whole))


@pytest.mark.parametrize("sharded", [False, True])
@on_ranks(2)
def test_a_parameter_of_two_optimizers_is_not_stepped_by_both(sharded):
    initialize_megatron()
    chunk = two_parts(sharded)
    config = config_of("muon", sharded=sharded)
    first = get_megatron_optimizer(config, [chunk])
    only(chunk, PARTS[1])
    second = get_megatron_optimizer(config, [chunk])
    only(chunk, None)
    assert math.isfinite(train_step([chunk], second, [synthetic_batch(0)]))
    with pytest.raises(ConfigurationError, match=r"optimizer.step=.*built later owns some of its"):
        first.step()
