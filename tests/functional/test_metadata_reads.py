"""A trainer's load reads a checkpoint's metadata once, besides what megatron-core reads itself."""

import io
import re
import traceback
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_eopt.checkpoint.common_state import read_common_state
from megatron_eopt.guard.contents import forget_metadata
from tests.functional.script import TINY, _run_once, save
from tests.harness import run_ranks
from tests.harness.tiers import mostly_long

FSDP = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --no-gradient-accumulation-fusion"
FORMS = {
    "torch_dist": [],
    "fsdp_dtensor": [*FSDP.split(), "--data-parallel-sharding-strategy", "optim_grads_params"],
}


def reads_of(flags: list[str]) -> Counter[str]:
    """Return how often functions of ours have opened the file in a run."""
    found: Counter[str] = Counter()
    opened = io.open

    def spy(file: Any, *args: Any, **kwargs: Any) -> Any:
        if str(file).endswith(".metadata"):
            packages = re.compile("/(megatron_eopt|megatron)/")
            known = [f for f in traceback.extract_stack() if packages.search(f.filename)]
            if "/megatron_eopt/" in known[-1].filename:
                found[known[-1].name] += 1
        return opened(file, *args, **kwargs)

    forget_metadata()
    with mock.patch("io.open", spy), mock.patch("builtins.open", spy):
        _run_once(flags)
    return found


@pytest.mark.parametrize("form", mostly_long(FORMS, "torch_dist"))
def test_metadata_are_read_once(tmp_path: Path, form: str) -> None:
    flags = ["--optimizer", "muon", "--use-distributed-optimizer", *FORMS[form]]
    save(tmp_path, *flags)
    if form == "torch_dist":
        # although Megatron asks for state by bucket: its own optimizers load what this says
        said = read_common_state(tmp_path / "iter_0000002")["content_metadata"]
        assert said["distrib_optim_sharding_type"] == "fully_reshardable"
    loading = [*TINY, *flags, "--train-iters", "2", "--load", str(tmp_path)]
    first, second = run_ranks(2, reads_of, loading, cpu=False, timeout=300)
    assert first.total() == 1, first
    assert second.total() <= 1
