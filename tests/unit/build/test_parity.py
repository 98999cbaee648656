"""With megatron-core's own configuration class our factory trains as megatron-core's does."""

import pytest

from tests.harness import run_ranks
from tests.unit.build.factories import both, losses

ROPE = {"position_embedding": "rope"}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
OVERLAPPED = {"use_distributed_optimizer": True, "overlap_param_gather": True}
RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}

# Twenty steps let differences of rounding grow; the same arithmetic in the same order has none.
EXACT = 1e-6
MEDIUM = {"optimizer": "muon", "muon_fp32_matmul_prec": "medium"}
CASES = {
    "muon, megatron-core's default precision, a factor that rounds": (
        {"config": {**MEDIUM, "muon_extra_scale_factor": 0.2}, "model": ROPE},
        EXACT,
    ),
    "muon, bf16 weights": (
        {"config": {**MEDIUM, "bf16": True}, "model": {**ROPE, "dtype": "bfloat16"}},
        EXACT,
    ),
    "muon, two tensor-parallel ranks, the cheapest exact mode": (
        {
            "config": {"optimizer": "muon", "muon_tp_mode": "auto"},
            "stock_config": {"muon_tp_mode": "duplicated"},
            "model": {**ROPE, "query_groups": 2},
            "parallel": {"tp": 2},
        },
        1e-5,
    ),
    "muon, two tensor-parallel ranks, blockwise": (
        {"config": {"optimizer": "muon"}, "model": {**ROPE, **DROPOUT}, "parallel": {"tp": 2}},
        1e-5,
    ),
    "muon, experts on two ranks, lion": (
        {
            "config": {"optimizer": "muon", "muon_scalar_optimizer": "lion", "lr": 0.001},
            "model": {**ROPE, "experts": 4},
            "parallel": {"ep": 2},
        },
        1e-5,
    ),
    "muon with a decoupled learning rate": (
        {"config": {"optimizer": "muon", "decoupled_lr": 0.003}, "model": ROPE},
        1e-5,
    ),
    "adam with experts, biases": (
        {
            "config": {"optimizer": "adam", "adam_beta2": 0.95},
            "model": {"experts": 4, "bias": True, **RECOMPUTED},
            "parallel": {"ep": 2},
        },
        EXACT,
    ),
    "sgd": ({"config": {"optimizer": "sgd"}}, EXACT),
    "adam, distributed, bf16": (
        {
            "config": {"optimizer": "adam", "bf16": True, **OVERLAPPED},
            "model": {"dtype": "bfloat16", "experts": 4},
            "ddp": {**OVERLAPPED, "overlap_grad_reduce": True, "bucket_size": 5000},
        },
        EXACT,
    ),
    "adam, distributed, fp16": (
        {
            "config": {
                "optimizer": "adam",
                "use_distributed_optimizer": True,
                "fp16": True,
                "initial_loss_scale": 1024,
            },
            "model": {"dtype": "float16"},
            "ddp": {"use_distributed_optimizer": True},
        },
        EXACT,
    ),
    "adam, two instances": (
        {
            "config": {"optimizer": "adam", "use_distributed_optimizer": True},
            "parallel": {"optimizer_instances": 2},
            "ddp": {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2},
        },
        EXACT,
    ),
}


@pytest.mark.parametrize(("case", "tolerance"), CASES.values(), ids=CASES)
def test_losses_equal_stocks(case, tolerance):
    for result in run_ranks(2, both, 20, case, timeout=120):
        assert result["ours"] == pytest.approx(result["stock"], abs=tolerance)
        assert result["ours"][-1] < result["ours"][0]


def _fragments_against_replicas() -> dict[str, list[float]]:
    """Ten steps: sums in another order differ by 1e-7 at once, and training lets that grow."""
    muon = {"optimizer": "muon"}
    fragments = {
        "config": {**muon, "use_distributed_optimizer": True},
        "ddp": {"use_distributed_optimizer": True},
    }
    return {
        "stock": losses("stock", 10, config=muon, model=ROPE),
        "ours": losses("ours", 10, model=ROPE, **fragments),
    }


def test_state_in_fragments_changes_nothing():
    for result in run_ranks(2, _fragments_against_replicas):
        assert result["ours"] == pytest.approx(result["stock"], abs=1e-5)
