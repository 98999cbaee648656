"""After every way to load, a model has the weights that were saved, on all ranks, at once."""

import pytest
import torch

from megatron_eopt.testing.scene import forget_megatron
from tests.harness.each_rank import on_ranks
from tests.harness.models import assert_same, copies_of
from tests.unit.storage.full_state import Case, build, resume_as, steps, unwrapped, write_as
from tests.unit.storage.runs import DENSE, PLAIN, SHARDED

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WAYS = {
    "sharded": ("torch_dist", SHARDED),
    "whole": ("torch_dist", PLAIN),
    "whole, state_dict": ("state_dict", PLAIN),
}
"""Forms of checkpoints, and storages."""


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", ["adam", "muon"])
@on_ranks(2)
def test_weights_are_those_that_were_saved(optimizer, way, dtype, tmp_path):
    form, storage = WAYS[way]
    model = {**DENSE, "layers": 1, "dtype": DTYPES[dtype]}
    case = Case(optimizer, model, ddp=storage, config=storage)
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 2)
    weights = write_as(form, case, chunk, optimizer, tmp_path)
    forget_megatron()
    # 16-bit weights are copies of main weights, which the optimizer saves
    given = {} if dtype == "bfloat16" else weights
    other, following = resume_as(form, case, tmp_path, given)
    assert_same(copies_of(unwrapped(other)), weights)
    steps(case, other, following, 2, 3)
    resumed = copies_of(unwrapped(other))
    steps(case, chunk, optimizer, 2, 3)
    assert_same(copies_of(unwrapped(chunk)), resumed)
