"""The lines of trainer flags in README.md and docs/*.md, cells of tables included.

A flag line is code that begins with a flag: between backquotes in running text or in a table, or a
block of its own; and what follows the script in a command that trains. Flags of other programs are
none, and neither is the name of a flag that needs a value, without one.
"""

import argparse
import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.functional.doc_commands import ROOT, blocks, commands_of

VALUES = {
    "LR_OF_ADAMW": "1e-3",
    "FILE": str(ROOT / "examples" / "muon.yaml"),
    "KEY": "momentum_buffer",
    "NAME": "torch",
    "N": "2",
    "...": "",
}
"""What stands for a value, and one."""

ADDED = {
    "fsdp2.md": "--use-torch-fsdp2 --ckpt-format torch_dist",
    "megatron_fsdp.md": "--use-megatron-fsdp --ckpt-format fsdp_dtensor",
    "--overlap-param-gather": "--use-distributed-optimizer --overlap-grad-reduce",
    "--optimizer-cpu-offload": "--use-distributed-optimizer",
    "--log-optimizer-stats": "--tensorboard-dir runs/tensorboard",
    "--muon-tp-mode": "--tensor-model-parallel-size 2",
    "--adaptive-muon-bias-correction": "--optimizer adaptive_muon",
    "--exp-avg-dtype": "--optimizer adam --use-precision-aware-optimizer",
}
"""What a flag or a page asks for besides in words."""

REMOVED = frozenset(["--sequence-parallel"])
"""What needs a GPU; the rest of the line does not."""

REFUSED = {
    "--use-precision-aware-optimizer": "this Adam is Transformer Engine's, which needs a GPU",
    "--exp-avg-dtype": "this Adam is Transformer Engine's, which needs a GPU",
    "--optimizer-cuda-graph": "a CPU has no CUDA graphs",
    "--muon-backend gram_newton_schulz": "backend='gram_newton_schulz': needs",
    "--enable-msc": "the multistorageclient package is not installed",
    "--ckpt-format torch_dcp": "does not hold the state of muon",
    "--calculate-per-token-loss": "does not divide gradients of torch FSDP2",
}
"""What comes of lines that are refused, here or everywhere; the page says so or says why."""

RANKS = 2
TRAINS = re.compile(
    r"(?:torchrun .*?(?:scripts/pretrain_gpt\.py|megatron_eopt\.launch \S+\.py)"
    r"|\./scripts/(?:quickstart|pretrain_gpu)\.sh(?: --(?:steps|out) \S+)*"
    r"|.*sbatch .*pretrain\.sbatch) (?!--help|--dry-run)(.*)"
)
"""A command that trains; its flags are captured."""

_ALTERNATIVES = re.compile(r"[a-z_0-9]+(?:\|[a-z_0-9]+)+")
_SIZE = re.compile(r"--(?:tensor|pipeline|expert|context)-model-parallel-size (\d+)")
_NEEDS_RANKS = re.compile(
    r"-parallel-size|--use-(distributed-optimizer|torch-fsdp2|megatron-fsdp)|--overlap-"
)


@dataclass(frozen=True)
class FlagLine:
    """One flag line: where it is, and its words, one value chosen where it leaves several."""

    page: str
    line: int
    flags: tuple[str, ...]

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}: {' '.join(self.flags)}"

    @property
    def all_flags(self) -> tuple[str, ...]:
        """The words with those that are asked for besides, these first."""
        added = [more for key, more in ADDED.items() if key in (self.page, *self.flags)]
        kept = (word for word in self.flags if word not in REMOVED)
        return (*" ".join(added).split(), *kept)

    @property
    def ranks(self) -> int:
        """How many ranks the line needs to mean something."""
        return RANKS if _NEEDS_RANKS.search(" ".join(self.all_flags)) else 1

    @property
    def refusal(self) -> str | None:
        """What the error says that is expected; None for lines that train."""
        line = f"{' '.join(self.flags)} "
        return next((words for part, words in REFUSED.items() if f"{part} " in line), None)


def flag_lines_of(page: Path, parser: argparse.ArgumentParser) -> Iterator[FlagLine]:
    """Yield the flag lines of a page, one for each alternative that they leave."""
    for line, text in _texts(page):
        for flags in _alternatives(_few_ranks(text)):
            if not _is_name(flags, parser):
                yield FlagLine(page.name, line, tuple(flags))


def _texts(page: Path) -> Iterator[tuple[int, str]]:
    text = page.read_text()
    # blocks are blanked out, so that lines keep their numbers
    prose = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), text, flags=re.M | re.S)
    for match in re.finditer(r"`(--[^`]+)`", prose):
        yield prose[: match.start()].count("\n") + 1, " ".join(match[1].split())
    for line, block in blocks(text, "text"):
        if block.startswith("--"):
            yield line, " ".join(block.split())
    for command in commands_of(page):
        if match := TRAINS.fullmatch(command.text):
            yield command.line, match[1]


def _few_ranks(text: str) -> str:
    """Return a line with parallel sizes that the ranks here can have."""
    return _SIZE.sub(lambda m: m[0].replace(m[1], str(min(RANKS, int(m[1])))), text)


def _alternatives(text: str) -> Iterator[list[str]]:
    words = [VALUES.get(word, word) for word in shlex.split(text)]
    choices = [
        word.split("|") if _ALTERNATIVES.fullmatch(word) else [word] for word in words if word
    ]
    for chosen in itertools.product(*choices):
        yield list(chosen)


def _is_name(flags: list[str], parser: argparse.ArgumentParser) -> bool:
    """Return whether this is a flag of another or any program, or one that lacks its value."""
    if flags == ["--help"]:
        return True
    action = parser._option_string_actions.get(flags[0])
    return action is None or (len(flags) == 1 and action.nargs != 0)
