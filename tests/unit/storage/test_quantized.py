"""Weights in 8 bits: what a step gathers is exactly the quantized main weight."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_eopt.testing.scene import forget_megatron
from tests.harness import run_ranks
from tests.harness.models import wrap_ddp
from tests.harness.quantized import QuantizedTensor, quantize_weights, quantized_weights
from tests.unit.storage.full_state import Case, build, optimizer_over, resume, steps, write
from tests.unit.storage.runs import DENSE, Slab, make_chunk, slab_of

MODEL = {**DENSE, "layers": 1, "bias": False, "dtype": torch.bfloat16}
EXACT = {"muon_fp32_matmul_prec": "highest"}
CASES = [Case("muon", MODEL, config=EXACT), Case("soap", MODEL), Case("adam", MODEL)]
REUSES = "reuse_grad_buf_for_mxfp8_param_ag"
LONG = pytest.mark.long
MODES: dict[str, dict[str, Any]] = {
    "gathered": {"fp8_param_gather": True},
    "in gradient buffers": {"fp8_param_gather": True, REUSES: True},
}


def quantized(case: Case, mode: str) -> Case:
    own = {"fp8_recipe": "mxfp8", REUSES: True} if REUSES in MODES[mode] else {}
    return replace(case, ddp=MODES[mode], config=case.config | own)


def make(case: Case, _: Any = None) -> tuple[Any, Any]:
    def wrap(model: Any, **flags: Any) -> Any:
        quantize_weights(model, ["linear_"])
        return wrap_ddp(model, **flags)

    chunk = make_chunk(case.run, wrap)
    return chunk, optimizer_over(case, [chunk])


def in_8_bits(cases: list[Case], folder: str) -> list[tuple[dict[str, Any], set[int]]]:
    """Train and save; return each quantized weight, and the bytes of one gathered element."""
    found = []
    for number, case in enumerate(cases):
        with quantized_weights(scaled_in_blocks=REUSES in case.ddp):
            chunk, optimizer = make(case)
            steps(case, chunk, optimizer, 0, 2)
            sizes = {buffer.param_data.element_size() for buffer in chunk.buffers}
            found.append((codes_of(chunk), sizes))
            write(case, chunk, optimizer, Path(folder, str(number)))
        forget_megatron()
    return found


def codes_of(chunk: Any) -> dict[str, tuple[Slab, torch.Tensor]]:
    """Return the bytes of each quantized weight, with its place."""
    return {
        name: (slab_of(name, param, True), param._data.clone())
        for name, param in chunk.named_parameters()
        if isinstance(param, QuantizedTensor)
    }


def mains(cases: list[Case], saved: str | None = None) -> list[dict[str, torch.Tensor]]:
    """Train without 8 bits in one process, or load what was saved; return the main weights."""
    found = []
    for number, case in enumerate(cases):
        if saved is None:
            chunk, optimizer = build(case)
            steps(case, chunk, optimizer, 0, 2)
        else:
            chunk, optimizer = resume(case, Path(saved, str(number)))
        names = {param: name for name, param in chunk.named_parameters()}
        items = [item for link in optimizer.chained_optimizers for item in link.shards]
        found.append({names[i.param]: i.main.detach().view(i.param.shape).clone() for i in items})
        forget_megatron()
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (2, {}),
        pytest.param(2, {"tp": 2}, marks=LONG),
        pytest.param(2, {"gtp": 2}, marks=LONG),
        pytest.param(4, {"gtp": 2, "tp": 2}, marks=LONG),
    ],
    ids=["dp", "tp", "gtp", "gtp, tp"],
)
def test_weights_are_quantized_main_weights(tmp_path, mode, world, parallel):
    cases = [replace(quantized(case, mode), parallel=parallel) for case in CASES]
    expected = run_ranks(1, mains, CASES)[0]
    for found in run_ranks(world, in_8_bits, cases, str(tmp_path)):
        for (codes, sizes), main, case in zip(found, expected, cases, strict=True):
            assert len(codes) == 4
            assert sizes == ({1, 2} if mode == "gathered" else {2})
            for name, (slab, code) in codes.items():
                exact = slab.of(main[name])
                # gradient buffers hold bfloat16 for the gather
                sent = exact if mode == "gathered" else exact.bfloat16()
                wanted = QuantizedTensor.of(sent)._data
                assert torch.equal(code, wanted), (case.optimizer, name)
    if "gtp" in parallel:  # which loads at the same size only
        return
    read = run_ranks(1, mains, CASES, str(tmp_path))[0]
    for its, main, case in zip(read, expected, CASES, strict=True):
        for name, value in main.items():
            assert (its[name] - value).norm() <= 2e-6 * value.norm(), (case.optimizer, name)


def reloaded(case: Case, folder: str) -> dict[str, Any]:
    with quantized_weights():
        return codes_of(resume(case, folder, make=make)[0])


def test_8_bit_weights_load_at_another_cut_of_their_rows(tmp_path):
    case = quantized(CASES[0], "gathered")
    run_ranks(2, in_8_bits, [case], str(tmp_path))
    (main,) = run_ranks(1, mains, [CASES[0]], str(tmp_path))[0]
    for found in run_ranks(2, reloaded, replace(case, parallel={"tp": 2}), str(tmp_path / "0")):
        assert len(found) == 4
        for name, (slab, code) in found.items():
            assert torch.equal(code, QuantizedTensor.of(slab.of(main[name]))._data), name
