"""What callers do to an optimizer, or ask of it, either counts or is refused."""

import copy
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.optimizer import emerging_optimizers as upstream
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import distributed

from megatron_eopt import (
    ConfigurationError,
    EmergingOptimizerConfig,
    emerging_optimizers,
    get_megatron_optimizer,
)
from megatron_eopt.checkpoint.keys import kind_of
from megatron_eopt.matrices import gated
from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon
from megatron_eopt.optimizers.muon import TensorParallelMuon
from megatron_eopt.settings.registry import entry_of
from megatron_eopt.storage import LayerWiseDistributedOptimizer
from megatron_eopt.stores.shard import Fragment, Ranks, Shard, fragment_layouts
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.unit.stores import runs
from tests.unit.stores.full_state import Case, build, differences, full_state, steps
from tests.unit.stores.runs import Run, inject, make_chunk

STORAGES = {
    "replicated": {"use_distributed_optimizer": False},
    "sharded": {"use_distributed_optimizer": True},
}


def case_of(storage: str, optimizer: str = "muon", **fields: Any) -> Case:
    kept = STORAGES[storage]
    return Case(optimizer, ddp=kept, config={**kept, **fields})


def rebound(storage: str, dtype: torch.dtype) -> list[str]:
    """Step with gradients where DDP keeps them, and with others that a caller assigns."""
    found = []
    for assigns in (False, True):
        case = case_of(storage, bf16=dtype == torch.bfloat16)
        case.model["dtype"] = dtype
        chunk, optimizer = build(case)
        inject(case.run, chunk, 0)
        if assigns:
            for param in chunk.parameters():
                param.main_grad = param.main_grad.clone()
            for buffer in chunk.buffers:
                buffer.grad_data.zero_()
        optimizer.step()
        found.append([param.detach().clone() for param in chunk.parameters()])
    pairs = zip(*found, chunk.named_parameters(), strict=True)
    return [name for one, other, (name, _) in pairs if not torch.equal(one, other)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("storage", STORAGES)
def test_gradients_that_a_caller_assigns_are_stepped_with(storage, dtype):
    assert run_ranks(1, rebound, storage, dtype) == [[]]


def test_pieces_that_do_not_fill_what_a_rank_stores_are_refused():
    fragments = (Fragment(0, 0, 32), Fragment(1, 0, 32))
    # the split of one slab, for a weight that is cut in two
    layouts = fragment_layouts(gated((8, 4)), 0, 2, fragments)
    with pytest.raises(ConfigurationError, match=r"stores 32 elements of it.*covers 16"):
        Shard("w", gated((8, 4)), layouts, Ranks(None, 0, 2), (32,))


def declared(storage: str, optimizer: str) -> list[str]:
    """Build over a weight that is declared to be several matrices; return where it went."""
    chunk = make_chunk(case_of(storage).run)
    name, weight = next((n, p) for n, p in chunk.named_parameters() if "linear_qkv.weight" in n)
    weight.eopt_split = gated(tuple(weight.shape))
    config = EmergingOptimizerConfig(optimizer=optimizer, lr=0.01, **STORAGES[storage])
    try:
        groups = get_megatron_optimizer(config, [chunk]).param_groups
    except ConfigurationError as error:
        return [word for word in (f"{name}.eopt_split",) if word in str(error)]
    return sorted({group["optimizer"] for group in groups})


def test_declared_matrices_are_stepped_one_by_one_or_refused():
    def found(*arguments):
        return run_ranks(1, declared, *arguments)[0]

    (refused,) = found("replicated", "soap")
    assert refused.endswith("linear_qkv.weight.eopt_split")
    assert found("sharded", "soap") == ["adam", "soap"]
    assert found("replicated", "muon") == ["adam", "muon"]
    assert found("replicated", "lion") == ["adam", "lion"]


def test_nested_state_has_a_name_for_every_path():
    assert kind_of(("a", "b")) != kind_of(("a.b",)) != kind_of(("a/b",)) != kind_of(("a", "b"))


def loaded_twice(storage: str) -> list[str]:
    case = case_of(storage)
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 1)
    first = copy.deepcopy(optimizer.state_dict())
    state = full_state(case, chunk, optimizer)
    steps(case, chunk, optimizer, 1, 2)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.load_state_dict(first)
    again = full_state(case, chunk, optimizer)
    return [key for key in differences(state, again) if "momentum_buffer" in key]


def changed_later(storage: str) -> dict[str, Any]:
    """Change what holds for every step after the optimizer was built."""
    case = case_of(storage, clip_grad=1.0)
    chunk, optimizer = build(case)
    config = optimizer.config
    found = {}
    for name, value in {
        "log_num_zeros_in_grad": True,
        "grad_norm_skip_threshold": 1e-9,
    }.items():
        setattr(config, name, value)
        inject(case.run, chunk, 0)
        try:
            found[name] = optimizer.step()
        except ConfigurationError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("storage", STORAGES)
def test_settings_of_every_step_may_change(storage):
    (found,) = run_ranks(1, changed_later, storage)
    done, _, zeros = found["log_num_zeros_in_grad"]
    assert done
    assert zeros > 0
    assert not found["grad_norm_skip_threshold"][0]


def alone(partial: bool) -> str:
    """Build with groups of one rank each, of which the tensor-parallel one is left out."""
    initialize_megatron()
    groups = [distributed.new_group([rank]) for rank in range(2)]
    mine = parallel_state.get_data_parallel_group() if partial else groups[distributed.get_rank()]
    collection = ProcessGroupCollection(dp=mine)
    config = EmergingOptimizerConfig(optimizer="muon", lr=0.01)
    chunk = make_chunk(Run(ddp={"use_distributed_optimizer": False}))
    try:
        get_megatron_optimizer(config, [chunk], pg_collection=collection)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_process_groups_that_lack_the_tensor_parallel_one():
    assert run_ranks(2, alone, True) == ["", ""]
    for error in run_ranks(2, alone, False):
        assert "pg_collection.tp=None: must be given where dp is another group" in error


def test_an_entry_of_megatron_cores_class_is_one_of_ours(monkeypatch):
    entry = upstream.EmergingOptimizerEntry(torch.optim.Adagrad)
    monkeypatch.setitem(emerging_optimizers._EMERGING_OPTIMIZERS, "adagrad", entry)
    assert entry_of("adagrad").optimizer_cls is torch.optim.Adagrad
    assert entry_of("muon").state_layout == "matrix_update"


def test_a_second_state_dict_is_taken_over_as_the_first():
    assert run_ranks(1, loaded_twice, "replicated") == [[]]


def additions(storage: str) -> list[str]:
    """Add parameters in every way after the optimizer was built; return the errors."""
    case = case_of(storage)
    chunk, optimizer = build(case)
    inner = optimizer.chained_optimizers[0].optimizer
    more = {"params": [torch.nn.Parameter(torch.ones(4, 4))], "lr": 0.1}
    inject(case.run, chunk, 0)
    errors = []
    for act in (lambda: inner.add_param_group(dict(more)), lambda: appended(inner, more)):
        try:
            act()
            optimizer.step()
        except ConfigurationError as error:
            errors.append(str(error))
    return errors


def appended(inner: Any, more: dict[str, Any]) -> None:
    inner.param_groups.append({**inner.param_groups[0], **more})


def test_a_group_that_is_added_later_is_refused():
    (errors,) = run_ranks(1, additions, "sharded")
    assert len(errors) == 2
    assert all("Build the optimizer again" in error for error in errors)


def wrapped_bases() -> None:
    """Do to base optimizers what would reach nobody once they are wrapped."""
    run = Run()
    chunk = make_chunk(run)
    config = runs.make_config(run)
    matrices, others = runs.param_groups(run, config, chunk)
    muon, adam = runs.muon_over(matrices, config, chunk), runs.adam_over(others, config)
    LayerWiseDistributedOptimizer([muon, adam], config, None, None, [chunk])
    with pytest.raises(ConfigurationError, match="add_param_group"):
        adam.add_param_group({"params": [torch.nn.Parameter(torch.ones(4))]})


def test_base_optimizers_that_are_wrapped_take_nothing_more():
    run_ranks(1, wrapped_bases)


def plans_of_resting_parameters() -> tuple[int, int]:
    """Let other parameters rest in every step; return how many plans there were, and calls."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(8, 6)) for _ in range(4)]
    muon = TensorParallelMuon(params, lr=0.1)
    before = {id(item.plan) for item in muon.plan().schedules}
    for step in range(6):
        for number, param in enumerate(params):
            param.grad = None if number == step % 4 else torch.randn(8, 6)
        rests = params[step % 4].detach().clone()
        muon.step()
        assert torch.equal(params[step % 4], rests)
    return len(before), len(before | {id(item.plan) for item in muon.plan().schedules})


def test_one_plan_serves_every_set_of_gradients():
    first, all_of_them = plans_of_resting_parameters()
    assert first == all_of_them == 1


def normuon_over_rows_apart() -> str:
    """NorMuon in mode distributed, with rows of a matrix that lie apart on a rank."""
    initialize_megatron(tp=2)
    from megatron.core.process_groups_config import ProcessGroupCollection

    param = torch.nn.Parameter(torch.ones(8, 32))
    param.partition_dim, param.tensor_model_parallel = 0, True
    param.is_qkv = True
    try:
        TensorParallelAdaptiveMuon(
            [param],
            moment2_method="normuon",
            tp_mode="distributed",
            qkv_split_shapes=[2, 2, 4],
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
    except ConfigurationError as error:
        return str(error)
    return ""


def test_what_normuon_cannot_do_is_refused_when_it_is_built():
    messages = run_ranks(2, normuon_over_rows_apart)
    assert messages[0] == messages[1]
    assert messages[0] == "" or "Use exchange" in messages[0]


def without_chunks(given: bool) -> list[torch.Tensor]:
    """Train in fragments, with and without the wrapped model at hand."""
    run = Run(ddp={"use_distributed_optimizer": False})
    chunk = make_chunk(run)
    config = runs.make_config(run)
    matrices, others = runs.param_groups(run, config, chunk)
    bases = [runs.muon_over(matrices, config, chunk), runs.adam_over(others, config)]
    chunks = [chunk] if given else None
    optimizer = LayerWiseDistributedOptimizer(bases, config, None, [None, None], chunks)
    assert not optimizer.overlap_param_gather
    runs.set_lr(optimizer, config)
    for step in range(3):
        inject(run, chunk, step)
        if not given:
            for param in chunk.parameters():
                param.grad = param.main_grad
        optimizer.step()
    optimizer.allgather_params()
    optimizer.broadcast_params()
    return [param.detach().clone() for param in chunk.parameters()]


def test_the_wrapped_model_is_not_needed():
    for one, other in zip(
        run_ranks(2, without_chunks, True), run_ranks(2, without_chunks, False), strict=True
    ):
        for a, b in zip(one, other, strict=True):
            # fragments are others, and with them the order of the norm's float32 sum
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def overlapped(how: str) -> list[torch.Tensor]:
    """Train on a DDP that all-reduces, whose hooks gather parameters."""
    overlap = (
        {} if how == "without" else {"overlap_param_gather": True, "overlap_grad_reduce": True}
    )
    if how == "buckets":
        overlap["bucket_size"] = 3000
    run = Run(ddp={"use_distributed_optimizer": False, **overlap})
    chunk = make_chunk(run)
    config = runs.make_config(Run(config={"overlap_param_gather": how != "without"}))
    matrices, others = runs.param_groups(run, config, chunk)
    bases = [runs.muon_over(matrices, config, chunk), runs.adam_over(others, config)]
    optimizer = LayerWiseDistributedOptimizer(bases, config, None, None, [chunk])
    runs.set_lr(optimizer, config)
    for step in range(3):
        inject(run, chunk, step)
        optimizer.step()
        if how == "off and on":
            chunk.disable_forward_pre_hook()
            chunk.enable_forward_pre_hook()
        elif how == "by itself":
            chunk.start_param_sync(force_sync=True)
    if how not in ("without", "by itself"):
        chunk.disable_forward_pre_hook()
    return [param.detach().clone() for param in chunk.parameters()]


@pytest.mark.parametrize("how", ["hooks", "buckets", "by itself", "off and on"])
def test_parameters_are_gathered_by_a_ddp_that_all_reduces(how):
    plain = run_ranks(2, overlapped, "without")
    for one, other in zip(plain, run_ranks(2, overlapped, how), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_configurations_are_read_once():
    config = EmergingOptimizerConfig(
        optimizer="muon", lr=0.1, clip_grad=0.0, use_distributed_optimizer=True
    )
    assert run_ranks(1, _changed_afterwards, config) == [True]


def _changed_afterwards(config: Any) -> bool:
    run = Run(ddp={"use_distributed_optimizer": True})
    chunk = make_chunk(run)
    optimizer = get_megatron_optimizer(config, [chunk])
    config.clip_grad = 1e-6
    inject(run, chunk, 0)
    before = [param.detach().clone() for param in chunk.parameters()]
    runs.set_lr(optimizer, config)
    optimizer.step()
    return any(
        float((p - b).norm()) > 1e-3 for p, b in zip(chunk.parameters(), before, strict=True)
    )
