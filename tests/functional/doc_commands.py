"""The commands in README.md and docs/*.md, and what can be done with each of them here."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.harness.programs import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

How = Literal["run", "long", "help", "parse"]
"""Run in the normal tier, run in the long tier, run with ``--help`` instead, or parse alone."""


@dataclass(frozen=True)
class Rule:
    """What is done with the commands that match."""

    pattern: str  # of the whole command, its lines joined
    how: How  # what is done
    why: str = ""  # why no more, where the command itself is not run


_FIRST_DAYS = "tests/functional/long/test_first_days.py runs them in order"

RULES = (
    Rule(r".*(runs/(adam|muon)\b|--stop|--resume|hugging_face|--import).*", "parse", _FIRST_DAYS),
    Rule(r"\./scripts/quickstart\.sh\b.*", "long"),
    Rule(r"\./scripts/compare_optimizers\.sh\b.*", "parse", "its test trains smaller models"),
    Rule(r"python -m benchmarks\.head_to_head .*", "help", "it would train for 40 minutes"),
    Rule(r"(UPSTREAM=\S+ )?\./scripts/test\.sh( --all(-rooms)?| \w+)?", "parse", "it runs tests"),
    Rule(r"source \.venv/bin/activate", "run"),
    Rule(r"python -m pytest .*", "parse", "it runs tests"),
    Rule(r"python scripts/prepare_corpus\.py .*", "long"),
    Rule(r"torchrun (--nproc-per-node 2|\.\.\.) (scripts|examples)/\w*pretrain\w*\.py .*", "long"),
    Rule(r"torchrun --nproc-per-node 2 -m megatron_eopt\.launch pretrain_gpt\.py .*", "long"),
    Rule(
        r"torchrun (--nnodes \d+ )?--nproc-per-node 8 .*-m megatron_eopt\.launch .*",
        "parse",
        "more GPUs or machines than there are",
    ),
    Rule(r"megatron-eopt .*", "parse", "tests/unit/test_command.py runs smaller ones"),
    Rule(r"python -m tests\.functional\.record .*", "help", "it would record new values"),
    Rule(r"python -m tests\.faults(\.seeds)? .*", "help", "it would run tests for minutes"),
    Rule(r"python -m scripts\.mutation .*", "help", "it would run tests for an hour"),
    Rule(r"\./scripts/pretrain_gpu\.sh .*(--help|--dry-run)\b.*", "run"),
    Rule(
        r"\./scripts/(pretrain_gpu|gpu_check|transformer_engine)\.sh\b.*", "help", "there is no GPU"
    ),
    Rule(r"python -m pip wheel .*", "parse", "it would download packages"),
    Rule(r"docker (build|run) .*", "parse", "there is no container engine"),
    Rule(r"RUN_DIR=\S+ sbatch .*", "parse", "there is no cluster"),
)


@dataclass(frozen=True)
class Command:
    """One command of a page: its text on one line, without comments."""

    page: str
    line: int
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(text: str, *languages: str) -> list[tuple[int, str]]:
    """Return (line of its first line, text) of a page's fenced blocks in these languages."""
    found = re.finditer(rf"^```(?:{'|'.join(languages)})\n(.*?)^```", text, re.M | re.S)
    return [(text[: match.start(1)].count("\n") + 1, match[1]) for match in found]


def commands_of(page: Path) -> list[Command]:
    """Return the commands in the fenced shell blocks of a page."""
    commands = []
    for first, block in blocks(page.read_text(), "bash", "sh", "shell", "console"):
        # a line that ends with a backslash goes on in the next one
        for match in re.finditer(r"(?:.*\\\n)*.+", block):
            text = re.sub(r"\s*\\\n\s*", " ", match[0])
            text = re.sub(r"(^|\s+)#.*", "", text).strip()
            if text:
                line = first + block[: match.start()].count("\n")
                commands.append(Command(page.name, line, text))
    return commands


COMMANDS = [command for page in PAGES for command in commands_of(page)]


def how_of(text: str) -> How | None:
    """Return what the first rule that matches a whole command says; None if there is none."""
    return next((rule.how for rule in RULES if re.fullmatch(rule.pattern, text)), None)
