"""Every command in README.md and docs/*.md is run, or at least parsed: ``doc_commands.RULES``."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional.doc_commands import COMMANDS, ROOT, Command, how_of
from tests.harness.programs import finished

# what "..." stands for in a command that is run
MODEL = """
    --num-layers 1 --hidden-size 64 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 3
    --tokenizer-type NullTokenizer --vocab-size 257 --num-workers 0 --attention-backend unfused
    --disable-bias-linear --log-interval 1 --eval-interval 1000 --eval-iters 1
"""


def those(how: str) -> list[object]:
    """Return each command of this kind once, for parametrize."""
    found: dict[str, Command] = {}
    for command in COMMANDS:
        if how_of(command.text) == how:
            found.setdefault(command.text, command)
    return [pytest.param(command, id=command.name) for command in found.values()]


def shell(text: str, timeout: float = 60, **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return finished("bash", "-c", text, timeout=timeout, PATH=path, **variables)


def test_every_command_has_a_rule():
    unknown = [f"{c.name}: {c.text}" for c in COMMANDS if how_of(c.text) is None]
    assert not unknown, "add a rule to tests/functional/doc_commands.py"
    assert len(COMMANDS) > 20


def test_all_commands_and_scripts_parse():
    texts = ["\n".join(command.text for command in COMMANDS)]
    texts += [path.read_text() for path in (ROOT / "scripts").rglob("*.s[hb]*")]
    for text in texts:
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", those("run"))
def test_runs(command):
    done = shell(command.text, GPUS="2")
    assert done.returncode == 0, done.stderr[-3000:]
    if "--help" in command.text:
        assert "usage:" in done.stdout
    if "--dry-run" in command.text:
        assert "--nproc-per-node 2" in done.stdout


def program(command: Command) -> str:
    """Return the part of a command before its arguments."""
    return re.match(r"(python -m \S+|\S+)", command.text)[0]


@pytest.mark.parametrize("name", sorted({program(c) for c in COMMANDS if how_of(c.text) == "help"}))
def test_helps(name, capsys):
    if name.startswith("python -m "):
        # in this process, which has imported what takes its time
        module = importlib.import_module(name.split()[-1])
        if not hasattr(module, "main"):  # a package
            module = importlib.import_module(f"{module.__name__}.__main__")
        with pytest.raises(SystemExit):
            module.main(["--help"])
        printed = capsys.readouterr().out
    else:
        printed = shell(f"{name} --help", timeout=240).stdout
    assert "usage:" in printed


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """A folder of text, and one that stands for ``runs``."""
    text = tmp_path_factory.mktemp("text")
    for number in range(60):
        (text / f"{number}.txt").write_text(f"Line {number} of a small corpus.\n" * 200)
    return text, tmp_path_factory.mktemp("runs")


def filled_in(text: str, texts: Path, runs: Path) -> str:
    """Return a command as it is run: with a real folder, in a folder that is thrown away."""
    flags = MODEL
    if "--optimizer-config" not in text:
        flags += " --lr 1e-2"
    if "--train-data-path" in text:
        flags += f" --test-data-path {runs}/my-corpus/test --data-cache-path {runs}/cache"
    else:
        flags += " --mock-data --split 90,5,5"
    text = re.sub(r"^torchrun \.\.\.", "torchrun --nproc-per-node 2", text)
    text = text.replace(" pretrain_gpt.py", " tests/functional/upstream_style_gpt.py")
    text = text.replace("torchrun ", "torchrun --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 ")
    if "quickstart" in text and "--out" not in text:
        text += " --out runs/quickstart"
    text = text.replace(" ...", f" {' '.join(flags.split())}").replace("FOLDER", str(texts))
    return text.replace("runs/", f"{runs}/")


# after the page's corpus, whose commands come first
@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("command", those("long"))
def test_trains(command, folders):
    texts, runs = folders
    if "my-corpus/train" in command.text and not (runs / "my-corpus" / "train.idx").exists():
        prepare = next(c for c in COMMANDS if "prepare_corpus" in c.text)
        assert shell(filled_in(prepare.text, texts, runs), timeout=200).returncode == 0
    text = filled_in(command.text, texts, runs)
    done = shell(text, timeout=1400)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-3000:]
    if "prepare_corpus" in text:
        assert (runs / "my-corpus" / "train.bin").stat().st_size > 0
    elif "quickstart" in text:
        assert re.search(r"Held-out loss: \d+\.\d+", output)
    else:
        assert re.findall(r"\bloss:? \d+\.\d+", output)
