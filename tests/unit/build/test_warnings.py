"""Who gets an update that depends on the number of ranks, or far too long a one, is told so."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_eopt.build import differences
from tests.harness import run_ranks
from tests.harness.scene import forget_megatron
from tests.unit.stores.full_state import Case, build


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def heard(work: Callable[[], Any]) -> list[str]:
    handler = _Lines()
    logger = logging.getLogger("megatron_eopt.build.differences")
    logger.addHandler(handler)
    differences._said.clear()  # each is said once in a process
    try:
        work()
    finally:
        logger.removeHandler(handler)
    return handler.lines


def plain(name: str, overrides: dict[str, str] | None = None, **fields: Any) -> Case:
    where = {"use_distributed_optimizer": False}
    return Case(name, ddp=where, config=where | fields, overrides=overrides or {})


DEPENDS = "depends on the number of ranks"
ONE_MATRIX = "as one matrix without use_distributed_optimizer"
UNSPLIT = dict.fromkeys(
    [f"muon_split_{kind}" for kind in ("qkv", "gated", "mla", "linear_attention")], False
)
BLOCKWISE = {"muon_tp_mode": "blockwise"}
TENSOR_PARALLEL = [
    # what is built, what is said of it, and how often
    (plain("muon", **BLOCKWISE), DEPENDS, 1),
    (plain("muon", muon_tp_mode="duplicated"), DEPENDS, 0),
    (plain("soap"), DEPENDS, 1),
    (Case("soap"), DEPENDS, 0),
    (plain("lion"), DEPENDS, 0),
    (plain("adam", overrides={"*linear_fc1.weight": "muon"}, **BLOCKWISE), DEPENDS, 1),
]
HUGE, ADAMUON = "such an update is huge", {"adaptive_muon_moment2_method": "adamuon"}
SCALE, SCION = "muon_scale_mode=", "takes the place of Scion's own"
ALONE = [
    (plain("muon", **BLOCKWISE), DEPENDS, 0),
    (plain("soap"), ONE_MATRIX, 1),
    (plain("soap", **UNSPLIT), ONE_MATRIX, 0),
    (Case("soap"), ONE_MATRIX, 0),
    (plain("muon"), ONE_MATRIX, 0),
    (plain("muon", muon_coefficient_type="cans", muon_fp32_matmul_prec="medium"), HUGE, 1),
    (plain("muon", muon_coefficient_type="cans", muon_fp32_matmul_prec="highest"), HUGE, 0),
    (plain("muon", muon_fp32_matmul_prec="medium"), HUGE, 0),
    (plain("adaptive_muon", **ADAMUON, muon_scale_mode="adamw_rms"), SCALE, 1),
    (plain("adaptive_muon", **ADAMUON, muon_scale_mode="shape_scaling"), SCALE, 0),
    (Case("scion", config={"weight_decay": 0.1}), SCION, 1),
    (Case("scion", config={"weight_decay": 1.0}), SCION, 0),
]


def said(table: list[tuple[Case, str, int]], parallel: dict[str, int]) -> list[int]:
    counts = []
    for case, words, _ in table:
        cut = replace(case, parallel=parallel)
        lines = heard(lambda cut=cut: build(cut))
        counts.append(sum(words in line for line in lines))
        forget_megatron()
    return counts


def check(table: list[tuple[Case, str, int]], found: list[int]) -> None:
    for (case, words, expected), count in zip(table, found, strict=True):
        assert count == expected, (case, words)


def test_what_depends_on_the_number_of_ranks_is_told():
    check(TENSOR_PARALLEL, run_ranks(2, said, TENSOR_PARALLEL, {"tp": 2})[0])


def test_what_else_differs_from_megatron_core_or_papers_is_told():
    check(ALONE, run_ranks(1, said, ALONE, {})[0])
