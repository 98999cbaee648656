"""The pages say what is true: links, file names, flags, messages, Python, and the new optimizer."""

import argparse
import ast
import importlib.util
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

import megatron_eopt
from megatron_eopt import EmergingOptimizerConfig, TorchOptimizerConfig, get_megatron_optimizer
from megatron_eopt.arguments import add_arguments
from megatron_eopt.base.imports import import_file
from megatron_eopt.config.registry import is_registered, optimizer_names
from megatron_eopt.tools.command import command_parser
from tests.functional.doc_commands import PAGES, ROOT, blocks
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import synthetic_batch, tiny_gpt, train_step, wrap_ddp

CONFIGS = {cls.__name__: cls for cls in (EmergingOptimizerConfig, TorchOptimizerConfig)}
EXAMPLE = ROOT / "examples" / "my_optimizer.py"
VARIANT = ROOT / "examples" / "cautious_muon.py"

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def prose(text: str) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """Return the anchors that a page's headings make."""
    headings = re.findall(r"^#+ (.*)", prose(page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_relative_links_lead_somewhere(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text())):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert not broken


@pages
def test_files_that_are_named_exist(page):
    # a name that begins with one of the repository's folders is one of its files
    folders = "arguments|benchmarks|docker|docs|examples|megatron_eopt|scripts|tests"
    named = re.findall(rf"`(?:python |\./)?((?:{folders})/[\w./*-]+)`", page.read_text())
    missing = [name for name in named if not (ROOT / name).exists() and not any(ROOT.glob(name))]
    assert not missing


@pages
def test_python_compiles(page):
    for line, block in blocks(page.read_text(), "python", "py"):
        try:
            ast.parse(block)
        except SyntaxError as error:
            raise AssertionError(f"{page.name}:{line + error.lineno}: {error}") from error


# flags of the programs that commands start
OF_TOOLS = {
    "torchrun": "--standalone --nproc-per-node --nnodes --rdzv-backend --rdzv-id --rdzv-endpoint "
    "--rdzv-conf --local-addr --max-restarts",
    "pip": "--no-deps --wheel-dir",
    "docker": "--build-arg --gpus --ipc --ulimit",
    "sbatch": "--nodes --signal",
    "tensorboard": "--logdir",
    "mkdocs": "--strict",
    "launch and tests": "--help --all --all-rooms --tests --environment",
    "megatron-core 0.20": "--megatron-fsdp-version",
}


@cache
def flags_of_scripts() -> frozenset[str]:
    """Return the flags that our own scripts and benchmarks define."""
    found: set[str] = set()
    for folder in ("scripts", "benchmarks", "examples", "tests/functional"):
        for path in (ROOT / folder).rglob("*.py"):
            found.update(re.findall(r"add_argument\(\s*\"(--[\w-]+)\"", path.read_text()))
    launcher = (ROOT / "scripts/pretrain_gpu.sh").read_text()
    found.update(re.findall(r"^ +(--[\w-]+)\)", launcher, re.M))
    return frozenset(found)


def _flags_of_trainer() -> list[str]:
    from megatron.training.arguments import add_megatron_arguments

    parser = add_arguments(add_megatron_arguments(argparse.ArgumentParser()))
    return [option for action in parser._actions for option in action.option_strings]


def named_flags(text: str) -> set[str]:
    # not the rule of a table, not a wildcard such as --foo-*, and not a part of a word
    return set(re.findall(r"(?<![\w-])(--[a-z][\w-]*\w)(?![\w*-])", text))


@pytest.fixture(scope="module")
def known_flags() -> set[str]:
    (trainer,) = run_ranks(1, _flags_of_trainer, timeout=240)
    tools = {flag for flags in OF_TOOLS.values() for flag in flags.split()}
    return {*trainer, *flags_of_scripts(), *tools, *flags_of_command()}


def flags_of_command() -> set[str]:
    """Return the flags of ``megatron-eopt`` and its parts."""
    (parts,) = (a.choices for a in command_parser()._actions if isinstance(a.choices, dict))
    return {flag for part in parts.values() for a in part._actions for flag in a.option_strings}


@pages
def test_flags_exist(page, known_flags):
    assert not named_flags(page.read_text()) - known_flags


@pytest.mark.parametrize("script", ["pretrain_gpu.sh", "slurm/pretrain.sbatch", "slurm/node.sh"])
def test_flags_in_launchers_exist(script, known_flags):
    text = (ROOT / "scripts" / script).read_text()
    text = re.sub(r"^#SBATCH.*|^options\+?=.*|    options\+=.*", "", text, flags=re.M)
    assert not named_flags(text) - known_flags


@cache
def texts_of_code() -> str:
    """Return every string in the code but docstrings, f-strings without their values."""
    found: list[str] = []
    folders = [ROOT / "megatron_eopt", ROOT / "scripts"]
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts = [n for n in nodes if isinstance(n, ast.Constant) and id(n) not in docs]
        found += [node.value for node in texts if isinstance(node.value, str)]
    return "\n".join(found)


# messages of others, and the modules that say them
OTHERS = {
    "Unexpected result": "megatron.core.rerun_state_machine",
    "Missing key in checkpoint state_dict": "torch.distributed.checkpoint.default_planner",
    "Global shape mismatch": "megatron.core.dist_checkpointing.strategies.torch",
    "class input value": "megatron.core.optimizer_param_scheduler",
    "invalid choice": "argparse",
    "(TP, PP) mismatch": "megatron.training.checkpointing",
    "--ckpt-fully-parallel-save": "megatron.training.checkpointing",
    "different number of parameter groups": "torch.optim.optimizer",
    "Failed to compile the C++ dataset helper functions": "megatron.core.datasets.utils",
}
OF_C = {"malloc(): unaligned tcache chunk", "zip() argument 2 is shorter"}


def test_quoted_messages_are_in_the_code():
    text = (ROOT / "docs/how_to/troubleshooting.md").read_text()
    seen = re.findall(r"^\| (.+?) \|", text, re.M)
    quoted = {fragment for one in seen for fragment in re.findall(r"`([^`]+)`", one)}
    assert len(quoted) > 20
    for fragment, module in OTHERS.items():
        assert fragment in Path(importlib.util.find_spec(module).origin).read_text()
    ours = quoted - OTHERS.keys() - OF_C
    assert not [fragment for fragment in ours if fragment.strip(".") not in texts_of_code()]


def test_the_support_matrix_has_every_optimizer_and_a_test_in_each_row():
    text = (ROOT / "docs/reference/support.md").read_text()
    rows = re.findall(r"^\| (.*)(?<!Test) \|$", text, re.M)
    assert len(rows) > 50
    assert not [row for row in rows if "`tests/" not in row]
    assert set(re.findall(r"`(\w+)`", rows[0].split("|")[0])) == set(optimizer_names())


@pytest.mark.parametrize("name", ["front", "redistribution"])
def test_the_figures_are_what_the_scripts_draw(name, tmp_path):
    drawn = tmp_path / "drawn.svg"
    script = ROOT / "scripts" / f"draw_{name}.py"
    subprocess.run([sys.executable, str(script), str(drawn)], check=True, timeout=240)
    assert drawn.read_bytes() == (ROOT / "docs" / "figures" / f"{name}.svg").read_bytes()


@pytest.mark.parametrize(("example", "lines"), [(EXAMPLE, 30), (VARIANT, 60)])
def test_extending_shows_the_examples_as_they_are(example, lines):
    text = example.read_text()
    page = (ROOT / "docs/how_to/extending.md").read_text()
    assert text in (block for _, block in blocks(page, "python"))
    assert len(text.splitlines()) <= lines


def _train_with_the_example(distributed: bool) -> tuple[list[float], bool]:
    if not is_registered("sign_per_matrix"):
        import_file(str(EXAMPLE))
    initialize_megatron()
    torch.manual_seed(1)
    chunk = wrap_ddp(tiny_gpt(layers=1), use_distributed_optimizer=distributed)
    fields = {"lr": 0.02, "min_lr": 0.02, "use_distributed_optimizer": distributed}
    config = EmergingOptimizerConfig(optimizer="sign_per_matrix", **fields)
    optimizer = get_megatron_optimizer(config, [chunk])
    used = {group["optimizer"] for group in optimizer.param_groups}
    losses = [train_step([chunk], optimizer, [synthetic_batch(0)]) for _ in range(8)]
    return losses, used == {"sign_per_matrix", "adam"}


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "sharded"])
def test_the_example_trains_on_two_ranks_as_on_one(distributed):
    ((alone, _),) = run_ranks(1, _train_with_the_example, distributed)
    for losses, routed in run_ranks(2, _train_with_the_example, distributed):
        assert routed
        assert losses[-1] < losses[0] - 0.1
        # signs of gradients that are nearly zero depend on rounding
        assert losses == pytest.approx(alone, rel=1e-3)


def muon_configurations() -> dict[str, TorchOptimizerConfig]:
    """Return Muon's configurations in the pages' snippets and in the examples' files."""
    files = (ROOT / "examples").glob("*.yaml")
    found = {path.name: megatron_eopt.load_optimizer_config(path) for path in files}
    for page in PAGES:
        for line, block in blocks(page.read_text(), "python"):
            for call in ast.walk(ast.parse(block)):
                if not isinstance(call, ast.Call) or not call.keywords:
                    continue
                fields = {word.arg: word.value for word in call.keywords}
                cls = CONFIGS.get(ast.unparse(call.func))
                if cls is not None and None not in fields:
                    values = {name: ast.literal_eval(value) for name, value in fields.items()}
                    found[f"{page.name}:{line}"] = cls(**values)
    return {name: config for name, config in found.items() if config.optimizer == "muon"}


def test_all_snippets_recommend_one_size_of_updates():
    """AdamW's: whoever copies from two pages gets the same."""
    found = muon_configurations()
    migration = {name for name in found if name.startswith("choosing.md")}
    assert len(found) > 7
    for name in found.keys() - {"muon_like_megatron.yaml"} - migration:
        config = found[name]
        assert (config.muon_scale_mode, config.muon_nesterov) == ("adamw_rms", True), name
        assert (config.lr, config.muon_lr) == (1e-3, None), name
