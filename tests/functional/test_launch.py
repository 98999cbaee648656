"""A script that knows nothing of us, started by the launcher."""

import json
import re
import runpy
import sys
from unittest import mock

import pytest

from megatron_eopt import cpu, launch, megatron_lm
from megatron_eopt.base.errors import ConfigurationError
from tests.functional.script import EXPERTS, STOCK_SCRIPT, TINY, losses, run_here, run_stock
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.harness.programs import output_of

LAYER_WISE = """
    --hidden-dropout 0 --attention-dropout 0 --optimizer muon --use-distributed-optimizer
""".split()


def launched(*arguments: str) -> str:
    return run_here(launch.main, list(arguments))


def _stock_and_launched(flags: list[str], ours: list[str]) -> tuple[str, str]:
    return run_here(run_stock, flags), launched(str(STOCK_SCRIPT), *flags, *ours)


@pytest.mark.parametrize(
    ("flags", "ours"),
    [
        (["--model-from", "provider"], ["--optimizer-defaults", "megatron"]),
        pytest.param(["--model-from", "config", *EXPERTS], [], marks=pytest.mark.long),
    ],
    ids=["provider-dense", "config-experts"],
)
def test_losses_equal_those_of_the_script_alone(flags, ours):
    # learned position embeddings go to Adam here and to Muon upstream
    flags = [*TINY, "--position-embedding-type", "rope", "--optimizer", "muon", *flags]
    outputs = run_ranks(2, _stock_and_launched, flags, ours, timeout=180, cpu=False)
    stock, mine = ("".join(texts) for texts in zip(*outputs, strict=True))
    assert ("model provider was called" in mine) == ("provider" in flags)
    assert len(losses(mine)) == 6
    assert losses(mine) == losses(stock)


def _save_and_resume(folder: str) -> tuple[str, str]:
    arguments = [str(STOCK_SCRIPT), *TINY, *LAYER_WISE]
    whole = launched(*arguments, "--save", folder, "--save-interval", "3")
    return whole, launched(*arguments, "--load", folder, "--ckpt-step", "3")


def test_layer_wise_saves_and_resumes(tmp_path):
    outputs = run_ranks(2, _save_and_resume, str(tmp_path), timeout=180, cpu=False)
    whole, resumed = (losses("".join(texts)) for texts in zip(*outputs, strict=True))
    assert float(whole[5]) < float(whole[0]) - 0.05
    # the trainer prints the mean of its first two steps in place of the second
    assert len(resumed) == 3
    assert (resumed[0], resumed[2]) == (whole[3], whole[5])


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
    with mock.patch.object(sys, "path", [folder, *sys.path]):
        return launched(*arguments)


@pytest.mark.parametrize("how", ["script", "module"])
def test_runs_as_if_python_had_started_it(package, how):
    target = [str(package / "script.py")] if how == "script" else ["-m", "facts.relative"]
    target += ["--flag", "-m", "value"]
    folder = package.parent
    alone = output_of(sys.executable, *target, folder=folder, PYTHONPATH=str(folder))
    (ours,) = run_ranks(1, _module, str(folder), *target, cpu=False)
    assert facts(ours) == facts(alone)


@on_ranks(1, cpu=False)
def test_child_processes_import_the_script_under_the_launcher(package):
    script = str(package / "script.py")
    launched(script, "argument")
    cpu.disable()
    # what a child does that multiprocessing starts afresh
    sys.argv = [script, "argument"]
    module = runpy.run_module("megatron_eopt.launch", run_name="__mp_main__", alter_sys=True)
    try:
        assert module["double"](2) == 4
        assert cpu.is_enabled()
        assert megatron_lm.is_installed()
    finally:
        megatron_lm.uninstall()
    expected = {"__name__": "__mp_main__", "__file__": script, "argv": [script, "argument"]}
    assert module["facts"] == module["facts"] | expected, module["facts"]


def _without_a_rate() -> None:
    told = r"^--lr=None: training needs a learning rate\. Pass --lr\.$"
    with pytest.raises(ConfigurationError, match=told) as caught:
        launched(str(STOCK_SCRIPT), *[flag for flag in TINY if flag not in ("--lr", "1e-2")])
    assert caught.value.is_on_all_ranks


def test_a_missing_rate_is_named_before_the_model_is_built(capfd):
    run_ranks(2, _without_a_rate, cpu=False)
    assert "number of parameters" not in capfd.readouterr().out
