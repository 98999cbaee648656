"""Parameters with arguments of their own keep their state, and overlap like all others."""

from functools import partial
from typing import Any

import pytest
from megatron.core import dist_checkpointing
from megatron.core.optimizer import ParamKey

from megatron_eopt import ConfigurationError, EmergingOptimizerConfig, get_megatron_optimizer
from tests.harness import run_ranks
from tests.harness.models import assert_same, copies_of
from tests.unit.storage.full_state import Case, resume, steps, write
from tests.unit.storage.runs import OVERLAP, PLAIN, SHARDED, make_chunk

OWN: dict[str, Any] = {"nesterov": True, "num_ns_steps": 2}


def build(case: Case, _: Any = None, **own: Any) -> tuple[Any, Any]:
    """Return a model and its optimizer, in which some matrices have arguments of their own."""
    chunk = make_chunk(case.run)
    config = EmergingOptimizerConfig(optimizer="muon", lr=0.01, **case.config)
    overrides = {ParamKey(name="*proj.weight"): OWN | own}
    return chunk, get_megatron_optimizer(config, [chunk], overrides)


def resumed(storage: dict[str, Any], folder: str) -> None:
    """Compare a resumed run with an uninterrupted one."""
    case, make = Case(ddp=storage, config=storage), partial(build, momentum_dtype="int8")
    chunk, optimizer = make(case)
    steps(case, chunk, optimizer, 0, 2)
    write(case, chunk, optimizer, folder)
    steps(case, chunk, optimizer, 2, 4)
    other, its = resume(case, folder, dist_checkpointing.load, make=make)
    steps(case, other, its, 2, 4)
    assert_same(copies_of(other), copies_of(chunk))


@pytest.mark.parametrize("storage", [PLAIN, SHARDED], ids=["replicated", "sharded"])
def test_a_resumed_run_is_an_uninterrupted_one(storage, tmp_path):
    run_ranks(2, resumed, storage, str(tmp_path))


def overlapped() -> str:
    flags = {"use_distributed_optimizer": True, "muon_overlap_dp_comm": True}
    case = Case(ddp=SHARDED | OVERLAP, config=flags | {"overlap_param_gather": True})
    build(case)
    with pytest.raises(ConfigurationError) as caught:
        build(case, momentum_dtype="int8")
    return str(caught.value)


def test_rounded_momentum_cannot_overlap():
    assert "needs momentum_dtype='fp32' for all parameters" in run_ranks(1, overlapped)[0]
