"""The training script with Megatron-FSDP and torch's FSDP2 on CPU processes."""

from pathlib import Path

import pytest
import torch

from tests.functional import saved_states
from tests.functional.script import losses, numbers, train
from tests.harness import RankError
from tests.harness.tiers import mostly_long

# without dropout, so that losses hang on the weights alone
COMMON = """
    --untie-embeddings-and-output-weights --clip-grad 0.5 --hidden-dropout 0 --attention-dropout 0
    --train-iters 4 --save-interval 2
""".split()
MANAGED = "--use-megatron-fsdp --use-distributed-optimizer --ckpt-format fsdp_dtensor".split()
MUON = ["--optimizer", "muon", "--muon-fp32-matmul-prec", "highest"]
NORMUON = "--optimizer adaptive_muon --adaptive-muon-moment2-method normuon".split()


def sharded(strategy):
    """Return the flags of torch's FSDP2, or of a strategy of Megatron-FSDP."""
    own = ["--use-torch-fsdp2"]
    if strategy != "torch":
        own = [*MANAGED, "--data-parallel-sharding-strategy", strategy]
    return [*COMMON, *own, "--no-gradient-accumulation-fusion"]


def differing(*folders, iterations=(4, 4)):
    """Return which weights and state two runs have saved differently."""
    pairs = zip(folders, iterations, strict=True)
    first, second = (Path(folder, f"iter_{iteration:07d}") for folder, iteration in pairs)
    names = saved_states.tensors_in(first)
    assert any(name.startswith("optimizer.state") for name in names)
    found = saved_states.differing(first, second)
    return [name for name in found if not name.startswith("rng_state")]


CASES = {
    # the norm's sum has another order, which clipping passes on
    "muon": ("optim_grads_params", [*MUON, "--swiglu"], 1e-5),
    "adam": ("optim_grads_params", ["--swiglu"], 1e-5),
    "muon, optim": ("optim", MUON, 1e-5),
    "muon, bf16": ("optim_grads", [*MUON, "--bf16"], 1e-2),
    # it takes roundings of a gradient of low rank for directions
    "soap": ("optim_grads_params", ["--optimizer", "soap"], 0.1),
    "torch, muon": ("torch", [*MUON, "--swiglu"], 1e-5),
    "torch, bf16": ("torch", [*MUON, "--bf16"], 1e-2),
    "torch, normuon": ("torch", [*MUON, *NORMUON], 1e-5),
    "torch, soap": ("torch", ["--optimizer", "soap"], 0.1),
}


@pytest.mark.parametrize("name", mostly_long(CASES, "muon"))
def test_training_is_training_with_ddp_and_goes_on_bit_equal(tmp_path, name):
    strategy, flags, tolerance = CASES[name]
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    storage = [] if strategy == "torch" else ["--use-distributed-optimizer"]
    replicated = numbers(train(*COMMON, *flags, *storage))
    # as runs begin that will go on by themselves
    straight = numbers(train(*sharded(strategy), *flags, "--save", first, "--load", first))
    assert len(straight) == 4
    assert len(differing(first, first, iterations=(2, 4))) > 20
    assert straight == pytest.approx(replicated, rel=tolerance)
    again = ["--load", first, "--ckpt-step", "2", "--save", second]
    resumed = numbers(train(*sharded(strategy), *flags, *again))
    assert not differing(first, second)
    # the second loss after a start is Megatron's mean of two
    assert resumed[0] == straight[2]


SPLIT = {
    "int8": [*MUON, "--muon-momentum-dtype", "int8"],
    "fp8": [*MUON, "--bf16", "--muon-momentum-dtype", "fp8"],
    "soap": ["--optimizer", "soap", "--bf16"],
}


@pytest.mark.long
@pytest.mark.parametrize("flags", SPLIT.values(), ids=SPLIT)
def test_state_of_a_split_weight_is_saved_as_of_any_other(tmp_path, flags):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    flags = [*sharded("optim_grads_params"), *flags, "--swiglu"]
    train(*flags, "--save", first)
    state = saved_states.tensors_in(Path(first, "iter_0000004"))
    assert {v.dtype for k, v in state.items() if k.endswith("momentum_buffer")} <= {torch.float32}
    train(*flags, "--load", first, "--ckpt-step", "2", "--save", second)
    assert not differing(first, second)


@pytest.mark.long
def test_another_model_or_format_is_refused_and_another_optimizer_starts_fresh(tmp_path):
    folder = str(tmp_path)
    train(*sharded("optim_grads_params"), "--save", folder)
    again = [*sharded("optim_grads_params"), "--load", folder, "--ckpt-step", "2"]
    with pytest.raises(RankError, match=r"must have all state.*, in the shapes of this model"):
        train(*again, "--hidden-size", "32", timeout=240)
    both = "is of format torch_dcp, and a run with --ckpt-format torch"
    with pytest.raises(RankError, match=both):
        train(*COMMON, "--use-distributed-optimizer", "--load", folder, timeout=240)
    assert len(losses(train(*again, *MUON, timeout=240))) == 2
