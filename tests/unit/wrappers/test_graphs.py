"""A step that a CUDA graph replays has the bits of a plain one, with new rates and gradients."""

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.optimizer.optimizer_cuda_graph import OptimizerCudaGraphWrapper

from megatron_eopt import checkpoints
from megatron_eopt.base.errors import ConfigurationError, NonFiniteError
from megatron_eopt.qk_clip import clip_qk
from tests.harness import run_ranks
from tests.harness.graphs import recorded_graphs
from tests.harness.scene import forget_megatron
from tests.unit.qk_clip.test_clip import GROUPED, MAXIMA, put
from tests.unit.qk_clip.test_clip import MODEL as CLIPPING
from tests.unit.storage.full_state import (
    Case,
    build,
    counts_of,
    full_state,
    sharded,
    unwrapped,
    write_as,
)
from tests.unit.storage.runs import BF16, MOE, NORMUON, REPLICATED, inject

STEPS = 6
CLIPPED = {"clip_grad": 0.3, "muon_fp32_matmul_prec": "medium"}
GRAPH = {"optimizer_cuda_graph": True}


def config(**fields: Any) -> dict[str, Any]:
    return {"config": {**CLIPPED, "fused_adam": True, **fields}}


def replicated(**fields: Any) -> dict[str, Any]:
    merged = {**config(**fields)["config"], **REPLICATED["config"]}
    return {**REPLICATED, "config": merged}


CASES = {
    "Muon, tensor parallel": Case(parallel={"tp": 2}, **replicated(muon_tp_mode="distributed")),
    "Muon, sharded": Case(**config()),
    "Muon, replicated": Case(**replicated()),
    "Muon, sharded, bfloat16": Case(model=BF16["model"], **config()),
    "Muon, replicated, bfloat16": Case(model=BF16["model"], **replicated()),
    "Muon, small waves": Case(**config(matrix_buffer_mb=0.01)),
    "Muon, experts": Case(model=MOE, **config()),
    "Muon, L2": Case(**config(decoupled_weight_decay=False)),
    "Muon, not clipped": Case(**config(clip_grad=0.0)),
    "Muon, int8 momentum": Case(**config(muon_momentum_dtype="int8")),
    "Muon, bf16 momentum": Case(**config(muon_momentum_dtype="bf16")),
    "Muon, QK-clip": Case(model={**GROUPED, **CLIPPING, "dtype": torch.bfloat16}, **config()),
    "NorMuon, sharded": Case("adaptive_muon", **config(**NORMUON)),
    "NorMuon, replicated": Case("adaptive_muon", **replicated(**NORMUON)),
    "Adam, sharded": Case("adam", **config()),
    "Adam, replicated": Case("adam", **replicated()),
}


def with_graph(case: Case) -> Case:
    return replace(case, config=case.config | GRAPH)


def set_rates(optimizer: Any, step: int) -> None:
    """Do what a scheduler does before a step; the second, which is captured, has zeros."""
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.01 / (1 + step + number) if step not in (1, 3) else 0.0
        group["weight_decay"] = 0.1 * step if step not in (1, 2) else 0.0


def train(case: Case, chunk: Any, optimizer: Any, steps: range) -> list[float]:
    """Return the gradient norm of each step."""
    norms = []
    for step in steps:
        set_rates(optimizer, step)
        optimizer.zero_grad()
        inject(case.run, chunk, step)
        done, norm, zeros = optimizer.step()
        assert done
        assert zeros is None
        norms.append(float(norm))
        if case.model.get("qk_clip"):
            put([chunk], MAXIMA[step % 2])
            clip_qk([chunk])
    return norms


def trained(case: Case) -> Any:
    chunk, optimizer = build(case)
    norms = train(case, chunk, optimizer, range(STEPS))
    return norms, counts_of(chunk, optimizer), full_state(case, chunk, optimizer)


def wrap(optimizer: Any) -> None:
    """Do what megatron-core's trainer does before the first step."""
    optimizer.step = OptimizerCudaGraphWrapper(optimizer.step)


def replayed(case: Case) -> Any:
    """Return the same of a run that captures its second step, and steps by itself at the end."""
    case = with_graph(case)
    chunk, optimizer = build(case)
    with recorded_graphs() as graphs:
        wrap(optimizer)
        norms = train(case, chunk, optimizer, range(2))
        (graph,), buffers = graphs, addresses(optimizer)
        calls = len(graph.calls)
        norms += train(case, chunk, optimizer, range(2, STEPS - 1))
        assert len(graph.calls) == calls
        assert addresses(optimizer) == buffers
        del optimizer.step
    norms += train(case, chunk, optimizer, range(STEPS - 1, STEPS))
    return norms, counts_of(chunk, optimizer), full_state(case, chunk, optimizer)


def addresses(optimizer: Any) -> list[int]:
    rules = (rule for link in optimizer.chained_optimizers for rule in link.update_rules)
    return [tensor.data_ptr() for rule in rules for tensor in rule.buffers()]


def compare(name: str) -> None:
    forget_megatron()
    norms, counts, state = trained(CASES[name])
    forget_megatron()
    found_norms, found_counts, found = replayed(CASES[name])
    assert (found_norms, found_counts) == (norms, counts)
    assert found.keys() == state.keys()
    tensors = [key for key, value in state.items() if isinstance(value, torch.Tensor)]
    assert len(tensors) > len(counts)
    assert not [key for key in tensors if not torch.equal(found[key], state[key])]


@pytest.mark.parametrize("name", [name for name in CASES if "parallel" not in name])
def test_replays_have_the_bits_of_plain_steps(name):
    run_ranks(1, compare, name)


@pytest.mark.parametrize("name", ["Muon, tensor parallel", "Muon, QK-clip"])
def test_replays_of_two_ranks_have_the_bits_of_plain_steps(name):
    run_ranks(2, compare, name)


BIASED = "layers.0.mlp.linear_fc1.weight"


def spoiled(name: str, *, graph: bool) -> Any:
    """Return the end of a run, one of whose gradients is not finite, and what was raised."""
    case = with_graph(CASES[name]) if graph else CASES[name]
    chunk, optimizer = build(case)
    raised, norms = [], []
    with recorded_graphs() if graph else nullcontext():
        if graph:
            wrap(optimizer)
        for step in range(STEPS):
            set_rates(optimizer, step)
            for is_bad in (True, False) if step == 3 else (False,):
                inject(case.run, chunk, step)
                if is_bad:
                    its = (p for n, p in chunk.named_parameters() if n.endswith(BIASED))
                    next(its).main_grad.view(-1)[0] = math.nan
                try:
                    optimizer.step()
                    if is_bad:
                        # the next step reads the norm, and does nothing else
                        optimizer.zero_grad()
                        inject(case.run, chunk, step)
                        optimizer.step()
                except NonFiniteError as error:
                    raised.append(error.names)
            norms.append(counts_of(chunk, optimizer))
        optimizer.zero_grad()
    steps = [link.steps for link in optimizer.chained_optimizers]
    return raised, norms, steps, full_state(case, chunk, optimizer)


def spoil(name: str) -> None:
    forget_megatron()
    *expected, state = spoiled(name, graph=False)
    forget_megatron()
    *found, ours = spoiled(name, graph=True)
    assert found == expected
    assert len(expected[0]) == 1
    for key, value in state.items():
        assert not isinstance(value, torch.Tensor) or torch.equal(ours[key], value), key


@pytest.mark.parametrize("name", ["NorMuon, sharded", "Muon, replicated", "Muon, int8 momentum"])
def test_a_replay_on_gradients_that_are_not_finite_changes_nothing(name):
    run_ranks(1, spoil, name)


def reloaded(name: str, form: str, folder: Path, *, graph: bool) -> Any:
    """Return the end of a run that goes back to the checkpoint of its third step."""
    case = with_graph(CASES[name]) if graph else CASES[name]
    chunk, optimizer = build(case)
    folder.mkdir()
    with recorded_graphs() if graph else nullcontext():
        if graph:
            wrap(optimizer)
        train(case, chunk, optimizer, range(3))
        weights = write_as(form, case, chunk, optimizer, folder)
        train(case, chunk, optimizer, range(3, 5))
        if form == "rank files":
            unwrapped(chunk).load_state_dict(weights, strict=False)
            optimizer.load_state_dict_from_file(str(folder / "state.pt"))
        else:
            wanted = sharded(replace(case, form=form), chunk, optimizer, is_loading=True)
            loaded = checkpoints.load(wanted, str(folder / "distributed"))
            unwrapped(chunk).load_state_dict(loaded["model"], strict=False)
            optimizer.load_state_dict(loaded["optimizer"])
        norms = train(case, chunk, optimizer, range(3, STEPS))
        if graph:
            del optimizer.step
    found = norms, counts_of(chunk, optimizer), full_state(case, chunk, optimizer)
    forget_megatron()
    return found


def reload(name: str, form: str, folder: Path) -> None:
    *expected, state = reloaded(name, form, folder / "plain", graph=False)
    *found, ours = reloaded(name, form, folder / "graph", graph=True)
    assert found == expected
    for key, value in state.items():
        assert not isinstance(value, torch.Tensor) or torch.equal(ours[key], value), key


LOADS = {
    "Muon, int8 momentum": "fully_reshardable",
    "NorMuon, replicated": "rank files",
    "Adam, sharded": "dp_reshardable",
}


@pytest.mark.parametrize("name", LOADS)
def test_replays_go_on_from_a_load(name, tmp_path):
    run_ranks(1, reload, name, LOADS[name], tmp_path)


def other_values(key: str, value: Any) -> list[Any]:
    """Return values that a setting of a parameter group may be changed to."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, tuple):
        return [tuple(0.5 * number for number in value)]
    off = [0.0] if key in ("lr", "weight_decay") else []
    return [0.5 * value + 0.01, *off] if isinstance(value, float) else []


def changed(name: str) -> set[str]:
    """Change each setting of groups once a step is captured; return those that are refused."""
    refused = set()
    pairs = [build(case) for case in (CASES[name], with_graph(CASES[name]))]
    plain, captured = (optimizer for _, optimizer in pairs)
    groups = list(zip(plain.param_groups, captured.param_groups, strict=True))
    with recorded_graphs():
        wrap(captured)
        for chunk, optimizer in pairs:
            train(CASES[name], chunk, optimizer, range(2))
        settings = {key: value for group, _ in groups for key, value in group.items()}
        for key, other in ((k, v) for k, value in settings.items() for v in other_values(k, value)):
            for group in (group for both in groups for group in both if key in group):
                group[key] = other
            for chunk, _ in pairs:
                inject(CASES[name].run, chunk, 3)
            try:
                captured.step()
            except ConfigurationError:
                refused.add(key)
                for group in (group for both in groups for group in both if key in group):
                    group[key] = settings[key]
                continue
            plain.step()
            for one, another in zip(
                *(whole(optimizer) for optimizer in (plain, captured)), strict=True
            ):
                assert torch.equal(one, another), (key, other)
        del captured.step
    return refused


def whole(optimizer: Any) -> list[torch.Tensor]:
    """Return main weights and state."""
    items = [(link, item) for link in optimizer.chained_optimizers for item in link.main_shards()]
    states = [{"": item.main, **link.optimizer.state[item.main]} for link, item in items]
    return [
        value for state in states for value in state.values() if isinstance(value, torch.Tensor)
    ]


OF_ADAM = {"amsgrad", "maximize"}
REFUSED_CHANGES = {
    "Muon, replicated": OF_ADAM,
    "NorMuon, replicated": OF_ADAM | {"beta2", "eps"},
    "Adam, replicated": OF_ADAM,
}


@pytest.mark.parametrize("name", REFUSED_CHANGES)
def test_every_setting_of_a_group_counts_in_a_replay_or_is_refused(name):
    assert run_ranks(1, changed, name)[0] == REFUSED_CHANGES[name]


def rule_of(words: str, function: Any) -> None:
    with pytest.raises(ConfigurationError, match=words):
        function()


def moved() -> None:
    """Change what a replay cannot follow, once a step has been captured."""
    case = with_graph(CASES["NorMuon, replicated"])
    chunk, optimizer = build(case)
    with recorded_graphs():
        wrap(optimizer)
        train(case, chunk, optimizer, range(3))
        state = next(iter(optimizer.chained_optimizers[0].optimizer.state.values()))
        kept = state["momentum_buffer"]
        state["momentum_buffer"] = kept.double()
        rule_of("tensors have changed since the CUDA graph", optimizer.step)
        # but those that fit are copied to where the graph reads them
        state["momentum_buffer"] = kept.clone()
        train(case, chunk, optimizer, range(3, 4))
        group = next(group for group in optimizer.param_groups if "beta2" in group)
        group["beta2"] = 0.5
        rule_of("settings of optimizers have changed", optimizer.step)
        del optimizer.step
        train(case, chunk, optimizer, range(4, 5))
        # settings of a run that a step reads on the host
        optimizer.collects_stats = True
        rule_of("log_optimizer_stats", optimizer.step)
        optimizer.collects_stats = False
        optimizer.config.log_num_zeros_in_grad = True
        rule_of("log_num_zeros_in_grad", optimizer.step)
        optimizer.config.log_num_zeros_in_grad = False
        optimizer.settings.config.log_optimizer_memory = True
        rule_of("log_optimizer_memory", optimizer.step)
    with pytest.raises(AttributeError):
        del optimizer.step


def test_a_graph_whose_tensors_or_settings_have_changed_is_not_replayed():
    run_ranks(1, moved)


def alone() -> None:
    """Capture a step without megatron-core's way, or before there has been one."""
    _, optimizer = build(with_graph(CASES["Muon, sharded"]))
    capturing = mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True)
    with capturing:
        rule_of("cannot be captured by itself", optimizer.step)
    with recorded_graphs():
        optimizer.step = OptimizerCudaGraphWrapper(optimizer.step, cuda_graph_warmup_steps=0)
        rule_of("cuda_graph_warmup_steps=0: must be at least 1", optimizer.step)


def test_a_step_is_captured_by_its_replacement_after_a_first_one():
    run_ranks(1, alone)


REFUSED: dict[str, Case] = {
    ".* but not of .*Adaptive": Case(
        "adaptive_muon", config={"adaptive_muon_moment2_method": "namo"}
    ),
    ".* but not of SOAP": Case("soap"),
    ".* but not of Lion": Case("muon", config={"muon_scalar_optimizer": "lion"}),
    ".* but not of SGD": Case("sgd"),
    "needs fp16=False": Case("muon", config={"fp16": True}),
    "needs loss_scale=None": Case("muon", config={"loss_scale": 8.0}),
    "needs optimizer_cpu_offload=False": Case("muon", config={"optimizer_cpu_offload": True}),
    "needs muon_check_fraction=0.0": Case("muon", config={"muon_check_fraction": 0.1}),
    "needs log_num_zeros_in_grad=False": Case("muon", config={"log_num_zeros_in_grad": True}),
    "needs grad_norm_skip_threshold=inf": Case("muon", config={"grad_norm_skip_threshold": 0.0}),
    "needs log_optimizer_stats=False": Case("muon", config={"log_optimizer_stats": True}),
    "needs log_optimizer_memory=False": Case("muon", config={"log_optimizer_memory": True}),
}


def refused(words: str) -> None:
    rule_of(f"optimizer_cuda_graph=True: {words}", lambda: build(with_graph(REFUSED[words])))


@pytest.mark.parametrize("words", REFUSED)
def test_what_a_replay_would_leave_out_is_refused_when_the_optimizer_is_built(words):
    run_ranks(1, refused, words)
