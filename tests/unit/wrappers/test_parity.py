"""With megatron-core's own configuration class our factory trains as megatron-core's does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

import megatron_eopt
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import synthetic_batch, tiny_gpt, train_step, wrap_ddp
from tests.harness.tiers import mostly_long
from tests.unit.storage.runs import SHARDED

FACTORIES: dict[str, Callable[..., Any]] = {
    "stock": megatron_optimizer.get_megatron_optimizer,
    "ours": megatron_eopt.get_megatron_optimizer,
}


def losses(factory: str, steps: int, config: dict[str, Any], case: dict[str, Any]) -> list[float]:
    """Train a tiny GPT; return the loss of every step."""
    if not parallel_state.model_parallel_is_initialized():
        initialize_megatron(**case.get("parallel", {}))
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    chunk = wrap_ddp(tiny_gpt(**case.get("model", {})), **case.get("ddp", {}))
    fields = {
        "muon_fp32_matmul_prec": "highest",
        "lr": 0.01,
        "min_lr": 0.001,
        "weight_decay": 0.1,
        "clip_grad": 1.0,
    } | config
    make = FACTORIES[factory]
    optimizer = make(OptimizerConfig(**fields), [chunk], use_gloo_process_groups=False)
    for group in optimizer.param_groups:
        group["lr"] = group["max_lr"]
    rank = parallel_state.get_data_parallel_rank()
    batches = ([synthetic_batch(1000 * rank + step)] for step in range(steps))
    found = [train_step([chunk], optimizer, batch) for batch in batches]
    return [loss for loss in found if loss is not None]


def both(steps: int, case: dict[str, Any]) -> dict[str, list[float]]:
    """Return the losses of both; ``stock_config`` is what megatron-core needs other values of."""
    theirs = {**case["config"], **case.get("stock_config", {})}
    return {
        "stock": losses("stock", steps, theirs, case),
        "ours": losses("ours", steps, case["config"], case),
    }


ROPE = {"position_embedding": "rope"}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
OVERLAPPED = SHARDED | {"overlap_param_gather": True}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform"}
RECOMPUTED |= {"recompute_num_layers": 1}

# Twenty steps let differences of rounding grow; the same arithmetic in the same order has none.
EXACT = 1e-6
MEDIUM = {"muon_fp32_matmul_prec": "medium"}
TWO_INSTANCES = SHARDED | {"num_distributed_optimizer_instances": 2}
BUCKETS = {**OVERLAPPED, "overlap_grad_reduce": True, "bucket_size": 5000}
FP16 = SHARDED | {"fp16": True, "initial_loss_scale": 1024}
EP, TP = {"ep": 2}, {"tp": 2}


def case(optimizer: str, config: dict[str, Any], tolerance: float, **kwargs: Any) -> Any:
    return {"config": {"optimizer": optimizer} | config, **kwargs}, tolerance


CASES = {
    "muon, megatron-core's default precision, a factor that rounds": case(
        "muon", MEDIUM | {"muon_extra_scale_factor": 0.2}, EXACT, model=ROPE
    ),
    "muon, bf16 weights": case(
        "muon", MEDIUM | {"bf16": True}, EXACT, model={**ROPE, "dtype": torch.bfloat16}
    ),
    "muon, two tensor-parallel ranks, the cheapest exact mode": case(
        "muon", {"muon_tp_mode": "auto"}, 1e-5, stock_config={"muon_tp_mode": "duplicated"},
        model={**ROPE, "query_groups": 2}, parallel=TP,
    ),
    "muon, two tensor-parallel ranks, blockwise": case(
        "muon", {}, 1e-5, model={**ROPE, **DROPOUT}, parallel=TP
    ),
    "muon, experts on two ranks, lion": case(
        "muon", {"muon_scalar_optimizer": "lion", "lr": 0.001}, 1e-5,
        model={**ROPE, "experts": 4}, parallel=EP,
    ),
    "muon with a decoupled learning rate": case("muon", {"decoupled_lr": 0.003}, 1e-5, model=ROPE),
    "adam with experts, biases": case(
        "adam", {"adam_beta2": 0.95}, EXACT,
        model={"experts": 4, "bias": True, **RECOMPUTED}, parallel=EP,
    ),
    "sgd": case("sgd", {}, EXACT),
    "adam, distributed, bf16": case(
        "adam", OVERLAPPED | {"bf16": True}, EXACT,
        model={"dtype": torch.bfloat16, "experts": 4}, ddp=BUCKETS,
    ),
    "adam, distributed, fp16": case(
        "adam", FP16, EXACT, model={"dtype": torch.float16}, ddp=SHARDED
    ),
    "adam, two instances": case(
        "adam", SHARDED, EXACT, parallel={"optimizer_instances": 2}, ddp=TWO_INSTANCES
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", mostly_long(CASES, "muon, bf16 weights", "adam, distributed, fp16")
)
def test_losses_equal_stocks(name):
    case, tolerance = CASES[name]
    for result in run_ranks(2, both, 20, case, timeout=120):
        assert result["ours"] == pytest.approx(result["stock"], abs=tolerance)
        assert result["ours"][-1] < result["ours"][0]


def tags(factory: str) -> dict[str, dict[str, Any]]:
    """Return what a factory says of each parameter of a model with experts."""
    initialize_megatron(ep=2)
    chunk = wrap_ddp(tiny_gpt(position_embedding="rope", experts=4))
    config = OptimizerConfig(optimizer="muon", lr=0.01)
    FACTORIES[factory](config, [chunk], use_gloo_process_groups=False)
    said = ("expert_tp", "is_qkv", "qkv_split_shapes")
    return {
        name: {key: value for key, value in vars(param).items() if key in said}
        for name, param in chunk.named_parameters()
    }


def test_users_optimizers_find_what_stock_says_of_parameters():
    (ours, _), (stock, _) = run_ranks(2, tags, "ours"), run_ranks(2, tags, "stock")
    assert any(said.get("expert_tp") for said in stock.values())
    assert ours == stock
