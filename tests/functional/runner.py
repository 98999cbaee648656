"""Runs a case where it is told to.

On CPUs the training script runs in worker processes that are kept from case to case; on GPUs
torchrun starts it.
"""

import contextlib
import importlib.util
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from tests.functional.case_files import Case, Environment, Variant
from tests.functional.metrics import Metrics, last_steps, metrics_of
from tests.functional.script import ROOT, SCRIPT, TINY, _run_once
from tests.harness import run_ranks
from tests.harness.last_bits import other_last_bits
from tests.harness.scene import forget_megatron

STEPS = 6
TIMEOUT_S = 280.0
"""For one run, which takes three seconds where nothing else runs."""

PLAIN = [*TINY, *"--log-params-norm --hidden-dropout 0 --attention-dropout 0".split()]
"""Flags of every case: two layers, hidden size 64, six steps on data that repeats a pattern.

Without dropout, whose masks depend on the layout; cases that go on in the same layout turn it on.
"""

SHARED = [*PLAIN, *"--muon-fp32-matmul-prec highest".split()]
"""The same, with exact matrix products.

The default precision of matrix products allows bfloat16 where the processor has it, so that results
would depend on the processor in the third digit.
"""

STOCKS = "--muon-fp32-matmul-prec high".split()
"""The most precise products that megatron-core's command line has, for all variants alike."""

ONE_GPU = """
    --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-rope-fusion
""".split()
"""What lets the script run on GPUs without Transformer Engine and Apex."""


def run_golden(
    case: Case, environment: Environment, *further: str, seed: int | None = None
) -> Metrics:
    """Return the metrics of a golden case, with further flags if there are any.

    Args:
        case: The case.
        environment: Where to run.
        further: Flags after the case's own.
        seed: Of other last bits; None leaves them as they are.
    """
    return _run(case, Variant(further), environment, seed)


def run_measured(case: Case, environment: Environment, seed: int | None) -> Metrics:
    """Return the metrics of the run whose spread is recorded, with other last bits if asked.

    That is a golden case's run, the first variant of a parity case, and a resume case in one go.
    """
    first = next(iter(case.variants.values()), Variant())
    return _run(case, first, environment, seed)


def run_resume(case: Case, folder: Path) -> tuple[Metrics, Metrics]:
    """Return the second half of a run in one go, and of one that went on from a checkpoint.

    Args:
        case: The case.
        folder: Empty folder for the checkpoints.
    """
    half = STEPS // 2
    saving = f"--save {folder} --save-interval {half} --ckpt-format torch_dist".split()
    going_on = f"--load {folder} --ckpt-step {half} --ckpt-format torch_dist".split()
    whole = _run(case, Variant(tuple(saving)), "cpu_gloo")
    rest = _run(case, Variant((*going_on, *case.resumed_flags)), "cpu_gloo")
    return last_steps(whole, STEPS - half), rest


def run_parity(case: Case) -> dict[str, Metrics]:
    """Return the metrics of each variant."""
    return {name: _run(case, run, "cpu_gloo") for name, run in case.variants.items()}


def _run(
    case: Case, variant: Variant, environment: Environment, seed: int | None = None
) -> Metrics:
    flags = [*case.flags, *variant.flags]
    if any(run.trainer == "stock" for run in case.variants.values()):
        flags = [*STOCKS, *flags]
    if environment == "gpu_nccl":
        return metrics_of(_start(case.ranks, [*SHARED, *flags, *ONE_GPU], seed))
    stock = variant.trainer == "stock"
    flags = [*(PLAIN if stock else SHARED), *flags]
    function = _train_as_stock if stock else _train
    return metrics_of(
        "".join(run_ranks(case.ranks, function, flags, seed, timeout=TIMEOUT_S, cpu=False))
    )


def _start(ranks: int, flags: list[str], seed: int | None) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    if seed is not None:
        command += ["-m", "tests.harness.last_bits", str(seed)]
    environment = {**os.environ, "MEGATRON_EOPT_DEVICE": "cuda", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*command, str(SCRIPT), *flags],
        env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"training failed:\n{done.stderr[-4000:]}")
    return done.stdout


def _train(flags: list[str], seed: int | None) -> str:
    """Train with the script as it is."""
    with other_last_bits(seed):
        return _run_once(flags)


def _train_as_stock(flags: list[str], seed: int | None) -> str:
    """Train with the script's model and data but megatron-core's own optimizers."""
    os.environ["MEGATRON_EOPT_DEVICE"] = "cpu"
    printed = io.StringIO()
    arguments, sys.argv = sys.argv, [str(SCRIPT), *flags]
    try:
        with contextlib.redirect_stdout(printed), _without_compiling(), other_last_bits(seed):
            _pretrain(_script())
    finally:
        sys.argv = arguments
        forget_megatron()
    return printed.getvalue()


def _pretrain(script: ModuleType) -> None:
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    from megatron_eopt import cpu

    def defaults_for_cpus(parser):
        cpu.set_defaults(parser)
        return parser

    args = parse_and_validate_args(defaults_for_cpus)
    config = pretrain_cfg_container_from_args(args, model_cfg=gpt_config_from_args(args))
    pretrain(config, script.datasets_provider, ModelType.encoder_or_decoder, script.forward_step)


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stock_pretrain_gpt", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _without_compiling() -> Iterator[None]:
    """Keep the trainer from compiling data set helpers, for which the wheel has no Makefile."""
    from megatron.core.datasets import utils

    original, utils.compile_helpers = utils.compile_helpers, lambda: None
    try:
        yield
    finally:
        utils.compile_helpers = original
