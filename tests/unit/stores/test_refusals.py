"""What layer-wise storage refuses, when it is built and with one sentence."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.optimizer.optimizer import FP32Optimizer

from megatron_eopt import EmergingOptimizerConfig, get_megatron_optimizer
from megatron_eopt.base.errors import ConfigurationError, ConfigurationTypeError
from megatron_eopt.storage import LayerWiseDistributedOptimizer
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import tiny_gpt, wrap_ddp
from tests.unit.stores import runs
from tests.unit.stores.full_state import Case, build, unwrapped
from tests.unit.stores.runs import DENSE, Run, make_chunk

MODES = [
    "use_precision_aware_optimizer",
    "reuse_grad_buf_for_mxfp8_param_ag",
    "optimizer_cuda_graph",
    "overlap_param_gather_with_optimizer_step",
]


VALUES = {
    "clip_grad": math.nan,
    "grad_norm_skip_threshold": -1.0,
    "weight_decay": math.nan,
    "loss_scale": -2.0,
    "initial_loss_scale": math.nan,
}


def refusals() -> dict[str, tuple[str, str]]:
    """Build in every wrong way; return the kinds and texts of the errors."""
    found: dict[str, tuple[str, str]] = {}
    run = Run(model=DENSE)
    chunk = make_chunk(run)
    config = runs.make_config(run)
    matrices, others = runs.param_groups(run, config, chunk)
    muon, adam = runs.muon_over(matrices, config, chunk), runs.adam_over(others, config)

    def attempt(name: str, *args: Any) -> None:
        try:
            LayerWiseDistributedOptimizer(*args)
        except (ConfigurationError, ConfigurationTypeError) as error:
            found[name] = (type(error).__name__, str(error))

    for mode in MODES:
        object.__setattr__(config, mode, True)
        attempt(mode, [muon, adam], config, None, None, [chunk])
        object.__setattr__(config, mode, False)
    attempt("wrapped", [FP32Optimizer(adam, config, None)], config, None, None, [chunk])
    attempt("no optimizer", [muon, "adam"], config, None, None, [chunk])
    attempt("not wrapped", [muon, adam], config, None, None, [chunk.module])
    attempt("missing", [muon], config, None, None, [chunk])
    attempt("twice", [muon, adam, runs.adam_over(others, config)], config, None, None, [chunk])
    attempt("init functions", [muon, adam], config, None, [None], [chunk])
    attempt("no init functions", [muon, adam], config, None, 3, [chunk])
    attempt("no chunks", [muon, adam], config, None, None, 3)
    attempt("one chunk", [muon, adam], config, None, None, chunk)
    attempt("no list", None, config, None, None, [chunk])
    attempt("no functions", [muon, adam], config, None, [1, None], [chunk])
    attempt("no configuration", [muon, adam], {}, None, None, [chunk])
    for name, value in VALUES.items():
        kept = getattr(config, name)
        setattr(config, name, value)
        attempt(name, [muon, adam], config, None, None, [chunk])
        setattr(config, name, kept)
    closure = torch.optim.LBFGS([param for group in others for param in group["params"]])
    attempt("closure", [muon, closure], config, None, None, [chunk])
    for name in ("use_megatron_fsdp", "reuse_grad_buf_for_mxfp8_param_ag"):
        setattr(chunk.ddp_config, name, True)
        attempt(f"ddp {name}", [muon, adam], config, None, None, [chunk])
        setattr(chunk.ddp_config, name, False)
    return found


EXPECTED = {
    "no init functions": ("ConfigurationTypeError", "init_state_fn_list=3"),
    "no chunks": ("ConfigurationTypeError", "model_chunks=3"),
    "one chunk": ("ConfigurationTypeError", "model_chunks="),
    "no list": ("ConfigurationTypeError", "must be torch optimizers"),
    "no functions": ("ConfigurationTypeError", "must be functions"),
    "no configuration": ("ConfigurationTypeError", "must be an OptimizerConfig"),
    **{name: ("ConfigurationError", name) for name in VALUES},
    **{mode: ("ConfigurationError", mode) for mode in MODES},
    "wrapped": ("ConfigurationTypeError", "is wrapped already"),
    "no optimizer": ("ConfigurationTypeError", "must be a torch.optim.Optimizer"),
    "not wrapped": ("ConfigurationTypeError", "DistributedDataParallel"),
    "missing": ("ConfigurationError", "exactly one parameter group, and is in 0"),
    "twice": ("ConfigurationError", "exactly one parameter group, and is in 2"),
    "init functions": ("ConfigurationError", "init_state_fn_list"),
    "closure": ("ConfigurationError", "closure"),
    "ddp use_megatron_fsdp": ("ConfigurationError", "use_megatron_fsdp"),
    "ddp reuse_grad_buf_for_mxfp8_param_ag": ("ConfigurationError", "reuse_grad_buf"),
}


def test_everything_wrong_is_refused_when_built():
    found = run_ranks(1, refusals)[0]
    assert found.keys() == EXPECTED.keys()
    for name, (kind, words) in EXPECTED.items():
        assert found[name][0] == kind, name
        assert words in found[name][1], found[name]


def mixed_dtypes() -> str:
    run = Run(model=DENSE)
    chunk = make_chunk(run)
    optimizer_params = list(chunk.parameters())
    optimizer_params[0].data = optimizer_params[0].data.to(torch.bfloat16)
    config = runs.make_config(run)
    adam = runs.adam_over([{"params": optimizer_params}], config)
    with pytest.raises(ConfigurationError) as caught:
        LayerWiseDistributedOptimizer([adam], config, None, None, [chunk])
    return str(caught.value)


def test_mixed_data_types_in_a_buffer():
    assert "word_embeddings.weight" in run_ranks(1, mixed_dtypes)[0]


def expert_groups_missing() -> str:
    from megatron.core.process_groups_config import ProcessGroupCollection

    run = Run(model=runs.MOE, parallel={"ep": 2})
    chunk = make_chunk(run)
    config = runs.make_config(run)
    collection = ProcessGroupCollection.use_mpu_process_groups()
    collection.expt_tp = None
    matrices, others = runs.param_groups(run, config, chunk)
    bases = [runs.muon_over(matrices, config, chunk), runs.adam_over(others, config)]
    with pytest.raises(ConfigurationError) as caught:
        LayerWiseDistributedOptimizer(bases, config, collection, None, [chunk])
    return str(caught.value)


def test_a_missing_group_for_experts():
    for message in run_ranks(2, expert_groups_missing):
        assert "pg_collection.expt_tp" in message


def loads() -> dict[str, str]:
    """Load what is no state of fragments; return the texts of the errors."""
    case = Case("muon", DENSE)
    chunk, optimizer = build(case)
    own = optimizer.state_dict()
    with_state = {**own, "optimizer": {**own["optimizer"], "state": {0: {"exp_avg": 1.0}}}}
    other = build(replace(case, optimizer="adam"))[1].state_dict()
    found = {}
    cases = {"model": dict(unwrapped(chunk).state_dict()), "nothing": {}, "no list": []}
    for name, state in {**cases, "whole": with_state, "another's": other}.items():
        with pytest.raises(ConfigurationError) as caught:
            optimizer.load_state_dict(state)
        found[name] = str(caught.value)
    with pytest.raises(ConfigurationError, match="neither state nor main weights"):
        optimizer.load_state_dict(own)
    model = unwrapped(chunk).sharded_state_dict()
    with pytest.raises(ConfigurationError, match="dp_reshardable"):
        optimizer.sharded_state_dict(model, sharding_type="dp_reshardabel")
    return found


def test_what_is_no_state_of_fragments_or_no_form_of_it_is_refused():
    (found,) = run_ranks(1, loads)
    assert "keeps fragments" in found.pop("whole")
    assert all("must hold the state of the optimizers" in text for text in found.values())


def refusal_of_float64() -> str:
    initialize_megatron()
    model = tiny_gpt(**DENSE)
    model.decoder.final_layernorm.double()
    fields = {"use_distributed_optimizer": True}
    config = EmergingOptimizerConfig(optimizer="muon", lr=0.01, **fields)
    with pytest.raises(ConfigurationTypeError) as caught:
        get_megatron_optimizer(config, [wrap_ddp(model, **fields)])
    return str(caught.value)


def test_dtypes_without_main_weights_are_refused_by_name():
    (message,) = run_ranks(1, refusal_of_float64)
    assert "decoder.final_layernorm.weight=torch.float64" in message
