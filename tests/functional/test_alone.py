"""The optimizer of one's own loop needs torch alone, and the core none of the outside rooms."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional.script import ROOT, TINY, losses

HERE = Path(__file__).parent
OUTSIDE = ("contrib", "tools", "testing")


def run(*command: object, path: Path = ROOT) -> str:
    env = os.environ | {"PYTHONPATH": str(path), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=env, cwd=path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def train(ranks: int, *arguments: object) -> dict[str, float]:
    """Return the norm of each weight, by optimizer and name."""
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", ranks)
    lines = run(*torchrun, HERE / "torch_alone.py", *arguments).splitlines()
    return {name: float(norm) for name, _, norm in (line.rpartition(" ") for line in lines)}


def test_without_megatron_five_optimizers_train_save_and_load_on_another_number(tmp_path):
    """Two processes with FSDP2, then one without, against one all the way."""
    train(2, tmp_path / "sharded", 3)
    resumed, expected = train(1, tmp_path / "sharded", 2), train(1, tmp_path / "whole", 5)
    assert resumed.keys() == expected.keys()
    for name, norm in expected.items():
        # the bias of keys has no gradient but rounding, which Adam and SOAP divide by its own size
        tolerance = 1e-3 if name.startswith("soap") else 1e-4
        assert resumed[name] == pytest.approx(norm, rel=tolerance), name


def test_without_megatron_the_trainer_of_hugging_face_trains(tmp_path):
    run(HERE / "trainer_alone.py", tmp_path)


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


def test_the_core_needs_no_outside_room(core):
    text = (ROOT / "scripts" / "pretrain_gpt.py").read_text()
    line = "from megatron_eopt import cpu, megatron_lm\n"
    assert line in text
    own = "import cpu_back_end as cpu\nfrom megatron_eopt import megatron_lm\n"
    (core / "pretrain.py").write_text(text.replace(line, own))
    flags = [*TINY, "--optimizer", "muon", "--use-distributed-optimizer", "--exit-interval", "4"]
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", 2)
    assert len(losses(run(*torchrun, core / "pretrain.py", *flags, path=core))) == 4
    loop = "import torch\nfrom megatron_eopt import TorchOptimizerConfig, build_optimizer\n"
    loop += "model = torch.nn.Linear(4, 4)\n"
    loop += "optimizer = build_optimizer(model, TorchOptimizerConfig(optimizer='muon', lr=0.1))\n"
    loop += "model(torch.ones(4)).sum().backward()\noptimizer.step()\n"
    loop += "import megatron_eopt\nprint(megatron_eopt.__file__)"
    assert run("-c", loop, path=core).startswith(str(core))
