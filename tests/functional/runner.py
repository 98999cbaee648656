"""Runs a case: on CPUs in worker processes that are kept, on GPUs by torchrun."""

import sys
from pathlib import Path

from tests.functional.case_files import Case, Environment, Variant
from tests.functional.metrics import Metrics, last_steps, metrics_of
from tests.functional.script import SCRIPT, TINY, run_here, run_script, run_stock
from tests.harness import run_ranks
from tests.harness.last_bits import other_last_bits
from tests.harness.programs import output_of

STEPS = 6
TIMEOUT_S = 280.0
"""For one run, which takes three seconds where nothing else runs."""

PLAIN = [*TINY, *"--log-params-norm --hidden-dropout 0 --attention-dropout 0".split()]
"""Flags of every case, without dropout, whose masks depend on the layout."""

SHARED = [*PLAIN, *"--muon-fp32-matmul-prec highest".split()]
"""The same with exact products: by default they are of bfloat16 where the processor has it."""

AS_RECORDED = "--muon-scale-mode spectral --no-muon-nesterov".split()
"""What was the default when values were recorded."""

STOCKS = "--muon-fp32-matmul-prec high".split()
"""The most precise products that megatron-core's command line has, for all variants alike."""

ONE_GPU = """
    --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-rope-fusion
""".split()
"""What lets the script run on GPUs without Transformer Engine and Apex."""


def run_measured(case: Case, environment: Environment, seed: int | None) -> Metrics:
    """Return the metrics of the run whose spread is recorded, of parity cases the first variant."""
    return run_variant(case, next(iter(case.variants.values()), Variant()), environment, seed)


def run_resume(case: Case, folder: Path) -> tuple[Metrics, list[Metrics]]:
    """Return the second half of a run in one go, and of those that went on from its checkpoint."""
    half = STEPS // 2
    written, *wanted = case.formats
    saving = f"--save {folder} --save-interval {half} --ckpt-format {written}".split()
    whole = run_variant(case, Variant(tuple(saving)))
    rests = []
    for form in wanted:
        going_on = f"--load {folder} --ckpt-step {half} --ckpt-format {form}".split()
        rests.append(run_variant(case, Variant((*going_on, *case.resumed_flags))))
    return last_steps(whole, STEPS - half), rests


def run_variant(
    case: Case, variant: Variant, environment: Environment = "cpu_gloo", seed: int | None = None
) -> Metrics:
    """Return the metrics of a run with a variant's flags, and other last bits if it has a seed."""
    flags = [*case.flags, *variant.flags]
    if any(run.trainer == "stock" for run in case.variants.values()):
        flags = [*STOCKS, *flags]
    if environment == "gpu_nccl":
        given = [*SHARED, *AS_RECORDED, *flags, *ONE_GPU]
        return metrics_of(_start(case.ranks, given, seed))
    stock = variant.trainer == "stock"
    flags = [*(PLAIN if stock else [*SHARED, *AS_RECORDED]), *flags]
    outputs = run_ranks(case.ranks, _train, flags, stock, seed, timeout=TIMEOUT_S, cpu=False)
    return metrics_of("".join(outputs))


def _start(ranks: int, flags: list[str], seed: int | None) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    if seed is not None:
        command += ["-m", "tests.harness.last_bits", str(seed)]
    return output_of(*command, SCRIPT, *flags, timeout=TIMEOUT_S, MEGATRON_EOPT_DEVICE="cuda")


def _train(flags: list[str], stock: bool, seed: int | None) -> str:
    """Train with our script, or with one that knows nothing of us."""
    with other_last_bits(seed):
        if stock:
            return run_here(run_stock, [*flags, "--model-from", "config"])
        # recorded values are of all mock data
        return run_here(run_script, SCRIPT, flags)
