"""What layer-wise storage would train or load wrongly is refused with one sentence."""

import pytest
import torch
from megatron.core.optimizer.optimizer import FP32Optimizer

from megatron_eopt.base.errors import ConfigurationError, ConfigurationTypeError
from megatron_eopt.extending import LayerWiseDistributedOptimizer
from megatron_eopt.matrices import qkv, whole
from megatron_eopt.wrappers.zero1.buffers import check_model_chunks, has_frozen
from megatron_eopt.wrappers.zero1.fragments import _slab_of
from tests.harness.each_rank import on_ranks
from tests.unit.storage import runs
from tests.unit.storage.full_state import Case, build, unwrapped
from tests.unit.storage.runs import DENSE, Run, make_chunk

MODES = [
    "use_precision_aware_optimizer",
    "reuse_grad_buf_for_mxfp8_param_ag",
    "optimizer_cuda_graph",
    "overlap_param_gather_with_optimizer_step",
    "muon_overlap_dp_comm",
]


@on_ranks(1)
def test_what_would_train_something_else_is_refused_when_built():
    """Build in every way that would train something else."""
    run = Run(model=DENSE)
    chunk = make_chunk(run)
    config = runs.make_config(run)
    matrices, others = runs.param_groups(run, config, chunk)
    muon, adam = runs.muon_over(matrices, config, chunk), runs.adam_over(others, config)

    def refused(words: str, *bases: torch.optim.Optimizer) -> None:
        with pytest.raises(ConfigurationError, match=words):
            LayerWiseDistributedOptimizer(list(bases), config, None, None, [chunk])

    for mode in MODES:
        object.__setattr__(config, mode, True)
        refused(mode, muon, adam)
        object.__setattr__(config, mode, False)
    refused("exactly one parameter group, but is in 0", muon)
    refused("exactly one parameter group, but is in 2", muon, adam, runs.adam_over(others, config))
    with pytest.raises(ConfigurationTypeError, match="Pass the torch optimizer inside it"):
        LayerWiseDistributedOptimizer([FP32Optimizer(muon, config, None)], config)
    chunk.ddp_config.reuse_grad_buf_for_mxfp8_param_ag = True
    refused("reuse_grad_buf_for_mxfp8_param_ag", muon, adam)


def test_a_model_without_megatrons_wrapper_is_named():
    model = torch.nn.Linear(2, 2)
    assert not has_frozen(model)
    for _ in range(2):
        with pytest.raises(ConfigurationTypeError, match=r"must be wrapped in megatron\.core"):
            check_model_chunks([model], reuses=None)
        model.ddp_config = None


@on_ranks(1)
def test_what_is_no_state_of_fragments_is_refused():
    """Load what is no state of fragments."""
    case = Case("muon", DENSE)
    chunk, optimizer = build(case)
    own = optimizer.state_dict()
    refused = pytest.raises(ConfigurationError, match="that the distributed optimizer shards")
    for state in (dict(unwrapped(chunk).state_dict()), own):
        with refused:
            optimizer.load_state_dict(state)
    for method in (optimizer.save_parameter_state, optimizer.load_parameter_state):
        with refused:
            method("file")


def test_slabs_that_cut_blocks_are_refused():
    """A section of one matrix may be cut, where its rows can be divided."""
    assert _slab_of(whole((8, 4)), 2, 0, "w").shape == (4, 4)
    for split in (qkv((16, 4), [8, 4, 4]), whole((3, 4))):
        with pytest.raises(ConfigurationError, match="needs whole blocks per rank, but w"):
            _slab_of(split, 2, 0, "w")
