"""A storage is one file: float64 main weights of float32 parameters, here below."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_eopt import extending
from megatron_eopt.testing.scene import forget_megatron
from megatron_eopt.wrappers import builders
from megatron_eopt.wrappers.replicated import Float32Optimizer
from tests.harness import run_ranks
from tests.unit.storage import runs
from tests.unit.storage.full_state import Case, build, differences, interrupted, steps


class Float64Optimizer(Float32Optimizer):
    """Steps on float64 copies of the parameters."""

    def __init__(self, optimizer: Any, config: Any, init_state_fn: Any) -> None:
        self._mains: dict[torch.Tensor, torch.Tensor] = {}
        for group in optimizer.param_groups if optimizer else ():
            for place, param in enumerate(group["params"]):
                self._mains[param] = group["params"][place] = param.detach().double()
        super().__init__(optimizer, config, init_state_fn)

    def mains(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return the copies."""
        return self._mains

    def collect_gradients(self) -> None:
        """Let the copies have the gradients that DDP keeps."""
        for shard in self.shards:
            shard.main.grad = shard.param.main_grad.double()  # type: ignore[attr-defined]

    def step_with_ready_grads(self) -> bool:
        """Step the copies, and round them to the parameters."""
        done = super().step_with_ready_grads()
        for shard in self.shards:
            shard.param.detach().copy_(shard.main)
        return done


def in_float64(context: extending.OptimizerBuildContext) -> Any:
    if context.settings.storage != "replicated" or context.settings.half:
        return None
    return extending.build_replicated(context, Float64Optimizer)


CASE = Case(ddp=runs.PLAIN, config=runs.PLAIN | {"muon_fp32_matmul_prec": "highest"})


def trained(case: Case) -> runs.Result:
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 4)
    return runs.Result(runs.weights(case.run, chunk), [], optimizer)


def in_ours(case: Case) -> runs.Result:
    return replace(trained(case), extra=None)


def in_an_own_storage(case: Case, folder: str) -> tuple[runs.Result, list[str]]:
    """Return the weights of four steps, and what differs if the last two follow a resumption."""
    extending.register_storage(in_float64)
    try:
        result = trained(case)
        mains = [item.main for m in result.extra.chained_optimizers for item in m.shards]
        assert {main.dtype for main in mains} == {torch.float64}
        forget_megatron()
        whole, resumed = interrupted([case], folder)
    finally:
        builders.BUILDERS.remove(in_float64)
    # the first rank puts the resumed state together
    found = differences(whole[0], resumed[0]) if torch.distributed.get_rank() == 0 else []
    return replace(result, extra=None), found


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_weights_and_checkpoints_are_those_of_a_storage_of_ours(tmp_path, optimizer):
    case = replace(CASE, optimizer=optimizer)
    expected = run_ranks(2, in_ours, case)[0]
    found, differing = zip(*run_ranks(2, in_an_own_storage, case, str(tmp_path)), strict=True)
    assert not any(differing)
    # float64 weights differ from float32 ones by the roundings of four steps
    assert runs.deviation(list(found), expected) < 1e-5
