"""Optimizers of tiny models, built in a dry world."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state

from tests.harness.models import tiny_gpt, wrap_ddp, wrap_fsdp2
from tests.unit.storage.full_state import Case, optimizer_over

BF16 = {"dtype": torch.bfloat16}
FSDP2 = Case("muon", {"transformer_impl": "local"}, config={"use_distributed_optimizer": False})
_SIZES = {"tp": "tensor", "pp": "pipeline", "ep": "expert"}


def dry_optimizer(case: Case) -> tuple[Any, Callable[[], None]]:
    """Return the optimizer of a model of a case, and what sets gradients."""
    parallel = {f"{_SIZES[key]}_model_parallel_size": n for key, n in case.parallel.items()}
    parallel_state.initialize_model_parallel(**parallel, create_gloo_process_groups=False)
    dtype = case.model.get("dtype", torch.float32)
    torch.set_default_dtype(dtype)
    shape = {key: value for key, value in case.model.items() if key != "dtype"}
    with torch.device("cuda"):
        # else norms and position embeddings lie on the host, and fake tensors cannot be moved
        model = tiny_gpt(**shape, params_dtype=dtype, perform_initialization=False)
    torch.set_default_dtype(torch.float32)
    if case.model == FSDP2.model:
        return in_fsdp2(model, case)
    return optimizer_over(case, [wrap_ddp(model, **case.run.ddp)]), lambda: None


def in_fsdp2(model: torch.nn.Module, case: Case = FSDP2) -> tuple[Any, Callable[[], None]]:
    """Return the optimizer of a model in megatron-core's FSDP2, and what sets gradients."""
    wrapped = wrap_fsdp2(model)

    def give_gradients() -> None:
        for param in wrapped.parameters():
            param.grad = torch.ones_like(param)

    return optimizer_over(case, [wrapped]), give_gradients
