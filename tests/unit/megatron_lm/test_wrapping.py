"""What the trainer's wrapper is asked for where a run wants layer-wise storage."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.distributed import DistributedDataParallel

from megatron_eopt.megatron_lm.trainer import with_standard_layout


def calls_of(names: str, **wanted: Any) -> tuple[bool, Any]:
    """Return what a wrapper with these parameters is asked for, and whether gradients scatter."""
    parameters = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names.split()]
    seen: dict[str, Any] = {}

    def original(**kwargs: Any) -> None:
        seen.update(kwargs)

    original.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    config = SimpleNamespace(use_distributed_optimizer=False)
    with_standard_layout(original)(
        ddp_config=config, use_layer_wise_distributed_optimizer=True, **wanted
    )
    return config.use_distributed_optimizer, seen["use_layer_wise_distributed_optimizer"]


ASKS = "ddp_config use_layer_wise_distributed_optimizer"


@pytest.mark.parametrize(
    ("more", "scatters"),
    [
        ({"DP": DistributedDataParallel, "use_layer_wise_param_layout": True}, True),
        ({"DP": DistributedDataParallel, "use_layer_wise_param_layout": False}, False),
        ({"DP": object, "use_layer_wise_param_layout": True}, False),
    ],
    ids=str,
)
def test_layer_wise_storage_of_the_trainer_means_ours(more, scatters):
    assert calls_of(" ".join((ASKS, *more)), **more) == (scatters, False)
