"""Parameters with arguments of their own keep their state, and overlap like all others."""

from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.optimizer import ParamKey
from torch import distributed

from megatron_eopt import ConfigurationError, EmergingOptimizerConfig, get_megatron_optimizer
from tests.harness import run_ranks
from tests.unit.storage.full_state import Case, unwrapped
from tests.unit.storage.runs import OVERLAP, PLAIN, SHARDED, inject, make_chunk

OWN: dict[str, Any] = {"nesterov": True, "num_ns_steps": 2}
FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}


def build(ddp: dict[str, Any], own: dict[str, Any], **fields: Any) -> tuple[Any, Any, Any]:
    run = Case("muon", ddp=ddp).run
    chunk = make_chunk(run)
    config = EmergingOptimizerConfig(
        optimizer="muon",
        lr=0.01,
        use_distributed_optimizer=ddp["use_distributed_optimizer"],
        **fields,
    )
    return run, chunk, get_megatron_optimizer(config, [chunk], {ParamKey(name="*proj.weight"): own})


def weights_after(run: Any, chunk: Any, optimizer: Any, steps: range) -> list[torch.Tensor]:
    for step in steps:
        optimizer.zero_grad()
        inject(run, chunk, step)
        optimizer.step()
    return [param.detach().clone() for param in chunk.parameters()]


def resumed(ddp: dict[str, Any], folder: str) -> bool:
    """Return whether a resumed run has the weights of an uninterrupted one."""
    own = OWN | {"momentum_dtype": "int8"}
    run, chunk, optimizer = build(ddp, own)
    weights_after(run, chunk, optimizer, range(2))
    model = unwrapped(chunk).sharded_state_dict()
    state = {"model": model, "optimizer": optimizer.sharded_state_dict(model, metadata=FORMAT)}
    dist_checkpointing.save(state, folder)
    expected = weights_after(run, chunk, optimizer, range(2, 4))
    _, chunk, optimizer = build(ddp, own)
    model = unwrapped(chunk).sharded_state_dict()
    wanted = optimizer.sharded_state_dict(model, is_loading=True, metadata=FORMAT)
    state = dist_checkpointing.load({"model": model, "optimizer": wanted}, folder)
    unwrapped(chunk).load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    found = weights_after(run, chunk, optimizer, range(2, 4))
    distributed.barrier()
    return all(map(torch.equal, expected, found))


@pytest.mark.parametrize("ddp", [PLAIN, SHARDED], ids=["replicated", "sharded"])
def test_a_resumed_run_is_an_uninterrupted_one(ddp, tmp_path):
    assert run_ranks(2, resumed, ddp, str(tmp_path)) == [True, True]


def overlapped() -> str:
    flags = {"overlap_param_gather": True, "muon_overlap_dp_comm": True}
    build({**SHARDED, **OVERLAP}, OWN, **flags)
    with pytest.raises(ConfigurationError) as caught:
        build({**SHARDED, **OVERLAP}, {"momentum_dtype": "int8"}, **flags)
    return str(caught.value)


def test_rounded_momentum_cannot_overlap():
    assert "needs momentum_dtype='fp32' for all parameters" in run_ranks(1, overlapped)[0]
