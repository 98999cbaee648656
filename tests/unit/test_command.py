"""The command ``megatron-eopt`` as people call it."""

import json
import subprocess
import sys

import pytest

from megatron_eopt.command import main

SMALL = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --vocab-size 64 "
    "--swiglu"
).split()


RUN = [sys.executable, "-m", "megatron_eopt"]
"""In processes without process groups, as people do."""


def test_help_says_what_there_is(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for word in ("plan", "sweep", "explain"):
        assert word in text


def test_a_plan_is_printed():
    one = subprocess.run(
        [*RUN, "plan", *SMALL, "--dp", "4", "--muon-team-size", "1", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(one.stdout)
    assert found["ranks"] == 4


@pytest.mark.long
def test_a_sweep_is_printed():
    many = subprocess.run(
        [*RUN, "sweep", *SMALL, "--ranks", "4", "--tp", "1", "2", "8"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "on 4 x H100" in many.stdout
    assert "left out: tp 8" in many.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("plan --hidden-size 64", "--num-layers"),
        ("plan --model Llama-3-8B --tp 3", "num_query_groups=8: must divide"),
        ("plan --model Llama-3-8B --num-layers 2", "no meaning beside --model"),
        ("plan --model Llama-3-8B --tokens -5", "--tokens"),
        ("plan --model Llama-3-8B --optimizer-config nowhere", "nowhere"),
        ("plan --model Llama-3-8B --data-parallel-size 0", "data=0: must be"),
        ("plan --model Llama-3-8B --pp 33", "pipeline=33: must leave"),
        ("plan --model Llama-3-8B --gpu-efficiency 2", "efficiency=2.0: must be"),
        ("sweep --model Llama-3-8B --ranks 4 --tp 0", "--tp"),
        ("sweep --model Llama-3-8B --ranks 3 --tp 2", "must be divided"),
        ("explain nowhere", "nowhere"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, words, capsys):
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
