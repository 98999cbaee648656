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
def test_a_sweep_is_printed_and_drawn(tmp_path):
    png = tmp_path / "sweep.png"
    many = subprocess.run(
        [*RUN, "sweep", *SMALL, "--ranks", "4", "--tp", "1", "2", "8", "--png", str(png)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "on 4 x H100" in many.stdout
    assert "left out: tp 8" in many.stderr
    assert png.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("plan --hidden-size 64", "num-attention-heads"),
        ("plan --model Llama-3-8B --tp 3", "must divide"),
        ("plan --model Llama-3-8B --num-layers 2", "no meaning beside --model"),
        ("plan --hugging-face nowhere --swiglu", "no meaning beside --hugging-face"),
        ("plan --model Llama-3-8B --tokens -5", "--tokens"),
        ("sweep --model Llama-3-8B --ranks 4 --tp 0", "--tp"),
        ("sweep --model Llama-3-8B --ranks 4 --png nowhere/x.png", "in a folder that there is"),
        (
            "plan --hidden-size 8 --num-attention-heads 2 --vocab-size 8 --num-layers 2 "
            "--num-experts 2 --moe-layer-freq [0]*99999999999",
            "moe-layer-freq",
        ),
        ("sweep --model Llama-3-8B --ranks 3 --tp 2", "must be divided"),
        ("explain nowhere", "nowhere"),
        ("plan --hugging-face nowhere", "--hugging-face='nowhere'"),
        ("plan --model Llama-3-8B --muon-team-size 0", "--muon-team-size=0"),
        ("plan --model Llama-3-8B --optimizer-config nowhere", "--optimizer-config='nowhere'"),
        ("plan --model Llama-3-8B --seq-length 0", "--seq-length=0: has no meaning"),
        ("plan --model Llama-3-8B --data-parallel-size 0", "--dp=0: must be"),
        ("plan --model Llama-3-8B --instances 3", "--instances=3: must divide"),
        ("plan --model Llama-3-8B --ep 3", "ep x etp=3: must divide"),
        ("plan --model Llama-3-8B --pp 33", "--pp=33: must leave"),
        ("plan --model Llama-3-8B --gpu-link 0", "--gpu-link=0.0: must be"),
        ("plan --model Llama-3-8B --gpu-flops nan", "--gpu-flops=nan: must be"),
        ("plan --model Llama-3-8B --gpu-efficiency 2", "--gpu-efficiency=2.0: must be"),
        (
            "plan --hidden-size 8 --num-attention-heads 3 --vocab-size 8 --num-layers 2",
            "--num-attention-heads=3: must divide",
        ),
        (
            "plan --hidden-size 8 --num-attention-heads 4 --vocab-size 8 --num-layers 2 "
            "--group-query-attention --num-query-groups 3",
            "--num-query-groups=3: must divide",
        ),
        # nobody gave it
        ("plan --model Llama-3-8B --tp 3", ": num_query_groups=8: must divide"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, words, capsys):
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
