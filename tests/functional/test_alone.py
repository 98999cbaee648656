"""The optimizer of one's own loop needs torch alone, and the core none of the outside rooms."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.functional.script import ROOT, TINY, losses
from tests.harness.programs import output_of

HERE = Path(__file__).parent
OUTSIDE = ("contrib", "tools", "testing")


def run(*command: object, path: Path = ROOT) -> str:
    # what emerging-optimizers compiles would take a minute
    variables = {"PYTHONPATH": str(path), "TORCHDYNAMO_DISABLE": "1"}
    return output_of(sys.executable, *command, folder=path, **variables)


def test_without_megatron_five_optimizers_train_save_and_load_on_another_number(tmp_path):
    norms: dict[str, dict[str, float]] = {"resumed": {}, "whole": {}}
    for line in run(HERE / "torch_alone.py", tmp_path).splitlines():
        kind, optimizer, weight, norm = line.split()
        norms[kind][f"{optimizer} {weight}"] = float(norm)
    resumed, expected = norms.values()
    assert len(resumed) > 40
    assert resumed.keys() == expected.keys()
    for name, norm in expected.items():
        # a batch that is cut otherwise changes float32 rounding: 5e-8 at most in 12 batches. Where
        # gradients have no rank, it picks the basis in which SOAP divides: 2.3e-4 in 42 batches
        tolerance = 1e-3 if name.startswith("soap") else 1e-6
        assert resumed[name] == pytest.approx(norm, rel=tolerance), name


@pytest.fixture
def core(tmp_path) -> Path:
    """A copy of the package without outside rooms; the CPU back end is a package of its own."""
    package = tmp_path / "megatron_eopt"
    shutil.copytree(ROOT / "megatron_eopt", package, ignore=shutil.ignore_patterns("__pycache__"))
    for room in OUTSIDE:
        shutil.rmtree(package / room)
    (package / "cpu").rename(tmp_path / "cpu_back_end")
    for file in (tmp_path / "cpu_back_end").glob("*.py"):
        file.write_text(file.read_text().replace("megatron_eopt.cpu", "cpu_back_end"))
    return tmp_path


OWN_LOOP = """
import torch, megatron_eopt
from megatron_eopt import TorchOptimizerConfig, build_optimizer
model = torch.nn.Linear(4, 4)
optimizer = build_optimizer(model, TorchOptimizerConfig(optimizer="muon", lr=0.1))
model(torch.ones(4)).sum().backward()
optimizer.step()
print("an own loop has stepped with", megatron_eopt.__file__)
"""


def test_the_core_needs_no_outside_room(core):
    text = (ROOT / "scripts" / "pretrain_gpt.py").read_text()
    line = "from megatron_eopt import cpu, megatron_lm\n"
    assert line in text
    own = "import cpu_back_end as cpu\nfrom megatron_eopt import megatron_lm\n"
    # in the same processes, which need seconds to import what they do
    (core / "pretrain.py").write_text(OWN_LOOP + text.replace(line, own))
    flags = [*TINY, "--optimizer", "muon", "--use-distributed-optimizer", "--exit-interval", "4"]
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", 2)
    printed = run(*torchrun, core / "pretrain.py", *flags, path=core)
    assert len(losses(printed)) == 4
    assert printed.count(f"an own loop has stepped with {core}") == 2
