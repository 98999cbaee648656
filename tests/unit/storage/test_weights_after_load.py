"""After every way to load, a model has the weights that were saved, on all ranks, at once."""

from pathlib import Path

import pytest
import torch

from megatron_eopt.testing.scene import forget_megatron
from tests.harness import run_ranks
from tests.harness.models import assert_same, copies_of
from tests.unit.storage.full_state import Case, build, resume_as, steps, unwrapped, write_as
from tests.unit.storage.runs import DENSE, PLAIN, SHARDED

CASES = {
    f"{name}, {storage}": (name, ddp)
    for name in ("adam", "muon")
    for storage, ddp in (("sharded", SHARDED), ("whole", PLAIN))
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def forms_of(name: str, storage: str) -> list[str]:
    """Return the ways to save; megatron-core's by state dict and file has Adam's shards alone."""
    has_state_dict = (name, storage) != ("muon", "sharded")
    by_bucket = ["dp_reshardable"] if (name, storage) == ("adam", "sharded") else []
    return ["rank files", "fully_reshardable", *by_bucket, *(["state_dict"] * has_state_dict)]


def loaded(form: str, case: Case, folder: str) -> None:
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 2)
    weights = write_as(form, case, chunk, optimizer, Path(folder))
    forget_megatron()
    other, following = resume_as(form, case, Path(folder), weights)
    assert_same(copies_of(unwrapped(other)), weights)
    steps(case, other, following, 2, 3)
    resumed = copies_of(unwrapped(other))
    steps(case, chunk, optimizer, 2, 3)
    assert_same(copies_of(unwrapped(chunk)), resumed)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
@pytest.mark.parametrize(
    ("name", "form"),
    [(name, form) for name in CASES for form in forms_of(*name.split(", "))],
)
def test_weights_are_those_that_were_saved(name, form, dtype, tmp_path):
    optimizer, ddp = CASES[name]
    config = {"use_distributed_optimizer": ddp["use_distributed_optimizer"]}
    model = {**DENSE, "layers": 1, "dtype": DTYPES[dtype]}
    run_ranks(2, loaded, form, Case(optimizer, model, ddp=ddp, config=config), str(tmp_path))
