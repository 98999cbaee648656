"""Gradients that are not finite: refused by name on all ranks, or skipped; nothing else changes."""

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_eopt
from megatron_eopt.base.errors import NonFiniteError
from megatron_eopt.wrappers.chain import OptimizerChain
from megatron_eopt.wrappers.config import EmergingOptimizerConfig
from tests.harness import run_ranks
from tests.harness.tiers import mostly_long
from tests.unit.storage import runs
from tests.unit.storage.runs import BF16, DENSE, FP16, MOE, NORMUON, Run, gradients, make_chunk

FIRST, SECOND = "decoder.layers.0.mlp.linear_fc2.weight", "decoder.layers.1.mlp.linear_fc2.weight"
BAD = (math.nan, math.inf, -math.inf)
NORM = "decoder.final_layernorm.weight"


PLAIN = "stock"
"""The same DDP as for megatron-core's own, here with our optimizer, whose state is whole."""

STORAGES = pytest.mark.parametrize("storage", ["layer_wise", PLAIN])


def build(run: Run) -> tuple[Any, Any]:
    chunk = make_chunk(run)
    if run.optimizer != PLAIN:
        return chunk, runs.make_optimizer(run, chunk)
    optimizer = megatron_eopt.get_megatron_optimizer(runs.make_config(run), [chunk])
    runs.set_lr(optimizer, optimizer.config)
    return chunk, optimizer


def snapshot(chunk: Any, optimizer: Any) -> list[torch.Tensor]:
    """Copy all that a step may change, the loss scale apart."""
    held = [*chunk.parameters(), *optimizer.get_parameters()]
    for child in optimizer.chained_optimizers:
        values = (value for state in child.optimizer.state.values() for value in state.values())
        held += [value for value in values if isinstance(value, torch.Tensor)]
        held.append(torch.tensor(child.steps))
    return [tensor.detach().clone() for tensor in held]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def poison(chunk: Any, optimizer: Any, name: str, value: float) -> None:
    """Put ``value`` into what this rank holds of the gradients whose names end like this."""
    for long_name, param in chunk.named_parameters():
        if not long_name.endswith(name):
            continue
        for child in optimizer.chained_optimizers:
            for item in child.shards:
                if item.param is param and item.start < item.stop:
                    param.main_grad.view(-1)[item.stop - 1] = value


def refused(
    run: Run, local: str, ranks: list[int], values: tuple[float, ...] = (math.nan,)
) -> list[dict[str, Any]]:
    """For each value do a good step, a bad one and a good one; return what this rank saw."""
    chunk, optimizer = build(run)
    results = []
    for number, value in enumerate(values):
        gradients(run, chunk, optimizer, 2 * number)
        result: dict[str, Any] = {"good": optimizer.step()[0], "message": None, "names": None}
        gradients(run, chunk, optimizer, 2 * number + 1)
        before = snapshot(chunk, optimizer)
        if torch.distributed.get_rank() in ranks:
            poison(chunk, optimizer, local, value)
        try:
            optimizer.step()
        except NonFiniteError as error:
            result |= {"message": str(error), "names": error.names}
        result["unchanged"] = equal(before, snapshot(chunk, optimizer))
        results.append(result)
    gradients(run, chunk, optimizer, 1)
    assert optimizer.step()[0]
    return results


def check_refused(ranks: list[list[dict[str, Any]]], name: str, what: str = "gradients") -> None:
    for results in ranks:
        for result in results:
            assert result["good"]
            assert result["names"] == [name]
            assert result["message"].startswith(f"non-finite {what} of {name}:")
            assert result["unchanged"]


@pytest.mark.parametrize(
    "fields", [pytest.param({}, marks=pytest.mark.long), BF16], ids=["fp32", "bf16"]
)
# the norm's weight lies in the first half of the buffer, the embedding in the second
@pytest.mark.parametrize("name", [NORM, "embedding.word_embeddings.weight"])
def test_a_fragment_of_one_data_parallel_rank(fields, name):
    results = run_ranks(2, refused, Run(**fields), name, [0, 1], BAD)
    check_refused(results, name)


def test_finite_gradients_whose_norm_is_not():
    results = run_ranks(1, refused, Run(), "weight", [0], (1.5e19,))
    check_refused(results, "all gradients", "norm")


CUTS = {
    # parallel, model, local name, poisoned ranks, global name
    "one tensor-parallel rank": ({"tp": 2}, DENSE, SECOND, [1], SECOND),
    "the first pipeline stage": ({"pp": 2}, DENSE, FIRST, [0], FIRST),
    "the last pipeline stage": ({"pp": 2}, DENSE, FIRST, [1], SECOND),
    "an expert": (
        {"ep": 2},
        MOE,
        "layers.0.mlp.experts.local_experts.1.linear_fc1.weight",
        [1],
        "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight",
    ),
}


@STORAGES
@pytest.mark.parametrize("case", mostly_long(CUTS, "the last pipeline stage", "an expert"))
def test_one_rank_of_a_model_that_is_cut(storage, case):
    parallel, model, local, ranks, name = CUTS[case]
    run = Run(storage, model, parallel)
    check_refused(run_ranks(2, refused, run, local, ranks), name)


def skipped(
    run: Run, bad: tuple[float, ...], name: str = SECOND, *, late: bool = False
) -> list[dict[str, Any]]:
    """Do a good step, and a bad one for each value; return what this rank saw of the bad ones."""
    chunk, optimizer = build(run)
    optimizer.has_kernels = late
    gradients(run, chunk, optimizer, 0)
    assert optimizer.step()[0]
    results = []
    for value in bad:
        gradients(run, chunk, optimizer, 1)
        if torch.distributed.get_rank() == 1:
            poison(chunk, optimizer, name, value)
        before = snapshot(chunk, optimizer)
        done, norm, _ = optimizer.step()
        unchanged = equal(before, snapshot(chunk, optimizer))
        scale = float(optimizer.get_loss_scale())
        results.append({"done": done, "norm": norm, "unchanged": unchanged, "scale": scale})
    return results


@STORAGES
@pytest.mark.parametrize("late", [False, True])
def test_a_norm_above_the_threshold_skips_the_step(storage, late):
    """Whenever the host reads norms."""
    run = Run(storage, parallel={"tp": 2}, config={"grad_norm_skip_threshold": 1e3})
    for results in run_ranks(2, partial(skipped, late=late), run, (1e4, math.inf)):
        for result in results:
            assert not result["done"]
            assert result["norm"] > 1e3
            assert result["unchanged"]


@STORAGES
@pytest.mark.parametrize("cut", mostly_long(["one tensor-parallel rank", "an expert"], "an expert"))
def test_with_a_loss_scale_all_ranks_skip_and_change_the_scale_alone(storage, cut):
    parallel, model, name, *_ = CUTS[cut]
    run = Run(storage, model | {"dtype": torch.float16}, parallel, config=FP16)
    for results in run_ranks(2, skipped, run, BAD, name):
        # halved once, although dense and experts' parameters have it together
        assert [result["scale"] for result in results] == [512, 256, 128]
        for result in results:
            assert not result["done"]
            assert result["norm"] is None
            assert result["unchanged"]


def values(chunk: Any, optimizer: Any) -> list[torch.Tensor]:
    """Copy all but the numbers of steps."""
    return [tensor for tensor in snapshot(chunk, optimizer) if tensor.is_floating_point()]


def read_late(late: bool, fields: dict[str, Any], storage: bool, bad: float) -> dict[str, Any]:
    """Step with good gradients, with clipped ones, with a bad one, and with good ones again."""
    of_ddp = {"use_distributed_optimizer": storage, **fields.get("ddp", {})}
    run = Run(**fields | {"ddp": of_ddp})
    chunk = make_chunk(run)
    given = {"optimizer": "muon", "lr": 0.01, "use_distributed_optimizer": storage}
    config = EmergingOptimizerConfig(**given | fields.get("config", {}))
    optimizer = megatron_eopt.get_megatron_optimizer(config, [chunk])
    optimizer.has_kernels = late
    found: dict[str, Any] = {"norms": []}
    for step, limit in enumerate((1e9, 0.5, 1e9, 1e9)):
        gradients(run, chunk, optimizer, step)
        config.clip_grad = limit
        before = values(chunk, optimizer)
        try:
            if step == 2:
                poison(chunk, optimizer, NORM, bad)
                optimizer.step()
                found["kept"] = equal(before, values(chunk, optimizer))
                # a training loop drops gradients and makes others before it steps again
                gradients(run, chunk, optimizer, step)
                optimizer.step()
            found["norms"].append(optimizer.step()[1])
        except NonFiniteError as error:
            found["names"] = error.names
            found.setdefault("kept", equal(before, values(chunk, optimizer)))
    return found | {"end": snapshot(chunk, optimizer)}


LATE: dict[str, tuple[bool, dict[str, Any]]] = {
    "sharded, fp32": (True, {}),
    "sharded, bf16": (True, BF16),
    "replicated, bf16": (False, BF16),
    # copies of gradients in float32 live for one step
    "bf16 gradients": (True, BF16 | {"ddp": {"grad_reduce_in_fp32": False}}),
    **{
        f"momentum in {dtype}": (True, {"config": {"muon_momentum_dtype": dtype}})
        for dtype in ("bf16", "int8")
    },
    "NorMuon": (True, {"config": {"optimizer": "adaptive_muon", **NORMUON}}),
    # a rule that does not clip by itself, for which the host reads the norm before the step
    "SOAP": (True, {"config": {"optimizer": "soap"}}),
    "off-loaded": (
        True,
        {"config": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}},
    ),
}


@pytest.mark.parametrize(
    ("case", "bad"),
    mostly_long(
        [*((case, math.nan) for case in LATE), ("sharded, fp32", math.inf)],
        ("replicated, bf16", math.nan),
        ("bf16 gradients", math.nan),
        ("NorMuon", math.nan),
        ("SOAP", math.nan),
        ("momentum in int8", math.nan),
        ("off-loaded", math.nan),
    ),
)
def test_a_host_that_reads_the_norm_a_step_later_sees_the_same(case, bad):
    storage, fields = LATE[case]
    early = run_ranks(2, read_late, False, fields, storage, bad)
    late = run_ranks(2, read_late, True, fields, storage, bad)
    for expected, found in zip(early, late, strict=True):
        assert found["kept"]
        assert found["names"] == expected["names"] == [NORM]
        assert {isinstance(norm, torch.Tensor) for norm in found["norms"]} == {case != "SOAP"}
        assert list(map(float, found["norms"])) == expected["norms"]
        assert equal(found["end"], expected["end"])


def test_of_several_norms_the_host_knows_all_before_the_step():
    original = SimpleNamespace(grad_norm_skip_threshold=math.inf)
    chain: Any = SimpleNamespace(settings=SimpleNamespace(original=original), _fuses=True)
    assert OptimizerChain._may_read_late(chain, {None: 1.0})
    assert not OptimizerChain._may_read_late(chain, {None: 1.0, "mtp": 1.0})
