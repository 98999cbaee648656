"""A script that knows nothing of us, started by the launcher."""

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable

import pytest

from megatron_eopt import launch
from tests.functional.script import EXPERTS, ROOT, TINY, losses
from tests.harness import run_ranks
from tests.harness.scene import forget_megatron

SCRIPT = ROOT / "tests" / "functional" / "upstream_style_gpt.py"

# learned position embeddings go to Adam here and to Muon upstream
LIKE_STOCK = [*TINY, "--position-embedding-type", "rope", "--optimizer", "muon"]
NO_DROPOUT = ["--hidden-dropout", "0", "--attention-dropout", "0"]
# what the launcher does by itself on a CPU
STOCK_ON_CPU = """
    --distributed-backend gloo --transformer-impl local --no-masked-softmax-fusion
    --no-bias-swiglu-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --no-gradient-accumulation-fusion --no-persist-layer-norm --use-cpu-initialization
""".split()
LAYER_WISE = [*TINY, *NO_DROPOUT, "--optimizer", "muon", "--use-distributed-optimizer"]


def run_here(run: Callable[..., object], *args: object) -> str:
    """Run something that takes this process over, and put the process back; return its output."""
    os.environ["MEGATRON_EOPT_DEVICE"] = "cpu"
    argv, path, main = sys.argv[:], sys.path[:], sys.modules["__main__"]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            run(*args)
    finally:
        from megatron_eopt import megatron_lm

        megatron_lm.uninstall()
        sys.argv[:], sys.path[:], sys.modules["__main__"] = argv, path, main
        forget_megatron()
    return printed.getvalue()


def launched(*arguments: str) -> str:
    return run_here(launch.main, list(arguments))


def _stock(flags: list[str]) -> None:
    from megatron_eopt import cpu

    cpu.enable_if_chosen()
    sys.argv[1:] = [*flags, *STOCK_ON_CPU]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def _stock_and_launched(flags: list[str], ours: list[str]) -> tuple[str, str]:
    return run_here(_stock, flags), launched(str(SCRIPT), *flags, *ours)


@pytest.mark.parametrize(
    ("flags", "ours"),
    [
        (["--model-from", "provider"], ["--optimizer-defaults", "megatron"]),
        pytest.param(["--model-from", "config", *EXPERTS], [], marks=pytest.mark.long),
    ],
    ids=["provider-dense", "config-experts"],
)
def test_losses_equal_those_of_the_script_alone(flags, ours):
    ours = [*ours, "--print-optimizer-routing"]
    outputs = run_ranks(2, _stock_and_launched, [*LIKE_STOCK, *flags], ours, timeout=180, cpu=False)
    stock, mine = ("".join(texts) for texts in zip(*outputs, strict=True))
    assert ("model provider was called" in mine) == ("provider" in flags)
    assert len(losses(mine)) == 6
    assert losses(mine) == losses(stock)


def assert_resumed(resumed: list[str], whole: list[str]) -> None:
    """Compare the losses of steps 4 to 6 with those of the run that was not interrupted."""
    # the trainer prints the mean of its first two steps in place of the second
    assert len(resumed) == 3
    assert (resumed[0], resumed[2]) == (whole[3], whole[5])


def assert_learns(losses_of_run: list[str]) -> None:
    assert len(losses_of_run) == 6
    assert float(losses_of_run[-1]) < float(losses_of_run[0]) - 0.05


def _save_and_resume(folder: str) -> tuple[str, str]:
    arguments = [str(SCRIPT), *LAYER_WISE]
    whole = launched(*arguments, "--save", folder, "--save-interval", "3")
    return whole, launched(*arguments, "--load", folder, "--ckpt-step", "3")


def test_layer_wise_saves_and_resumes(tmp_path):
    outputs = run_ranks(2, _save_and_resume, str(tmp_path), timeout=180, cpu=False)
    whole, resumed = (losses("".join(texts)) for texts in zip(*outputs, strict=True))
    assert_learns(whole)
    assert_resumed(resumed, whole)


FACTS = """
'''what it is'''
import json, sys
def double(number):
    return 2 * number
facts = {name: globals()[name] for name in ("__name__", "__file__", "__doc__", "__package__")}
facts["argv"], facts["folder"] = sys.argv, sys.path[0]
facts["is main"] = getattr(sys.modules["__main__"], "double", None) is double
print(json.dumps(facts))
"""


@pytest.fixture
def package(tmp_path):
    """A package with two modules, one of which imports the other by a relative name."""
    folder = tmp_path / "facts"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "helper.py").write_text("ANSWER = 42\n")
    (folder / "relative.py").write_text(f"from .helper import ANSWER\n{FACTS}")
    (folder / "script.py").write_text(FACTS)
    return folder


def facts(printed: str) -> dict[str, object]:
    return json.loads(re.findall(r"^\{.*\}$", printed, re.M)[-1])


def _module(folder: str, *arguments: str) -> str:
    sys.path.insert(0, folder)
    try:
        return launched(*arguments)
    finally:
        sys.path.remove(folder)


@pytest.mark.parametrize("how", ["script", "module"])
def test_runs_as_if_python_had_started_it(package, how):
    target = [str(package / "script.py")] if how == "script" else ["-m", "facts.relative"]
    target += ["--flag", "-m", "value"]
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    alone = subprocess.run(
        [sys.executable, *target],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        cwd=package.parent,
    )
    (ours,) = run_ranks(1, _module, str(package.parent), *target, cpu=False)
    assert facts(ours) == facts(alone.stdout)


def _again_in_a_child(script: str) -> dict[str, object]:
    from megatron_eopt import cpu, megatron_lm

    launched(script, "argument")
    cpu.disable()
    # what a child does that multiprocessing starts afresh
    sys.argv = [script, "argument"]
    module = runpy.run_module("megatron_eopt.launch", run_name="__mp_main__", alter_sys=True)
    try:
        return {**module["facts"], "double": module["double"](2), "cpu": cpu.is_enabled(),
                "installed": megatron_lm.is_installed()}  # fmt: skip
    finally:
        megatron_lm.uninstall()


def test_child_processes_import_the_script_under_the_launcher(package):
    path = str(package / "script.py")
    (found,) = run_ranks(1, _again_in_a_child, path, cpu=False)
    assert found["__name__"] == "__mp_main__"
    assert (found["__file__"], found["argv"]) == (path, [path, "argument"])
    assert found["double"] == 4
    assert found["cpu"]
    assert found["installed"]
