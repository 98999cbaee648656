"""The command ``megatron-eopt`` as people call it."""

import contextlib
import io
import json

import pytest
import torch.distributed as dist

from megatron_eopt.command import main
from tests.harness import run_ranks

SMALL = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --vocab-size 64 "
    "--swiglu"
).split()


def test_help_says_what_there_is(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for word in ("plan", "sweep", "explain"):
        assert word in text


def printed(*commands: list[str]) -> list[tuple[int, str, str]]:
    """Return the status and both outputs of commands, in a process without process groups."""
    dist.destroy_process_group()
    found = []
    for command in commands:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(command)
        found.append((status, out.getvalue(), err.getvalue()))
    return found


def test_plans_are_printed():
    plan = ["plan", *SMALL, "--dp", "4", "--muon-team-size", "1", "--json"]
    sweep = ["sweep", *SMALL, "--ranks", "4", "--tp", "1", "2", "8"]
    one, many = run_ranks(1, printed, plan, sweep, cpu=False)[0]
    assert json.loads(one[1])["ranks"] == 4
    assert "on 4 x H100" in many[1]
    assert "left out: tp 8" in many[2]
    assert one[0] == many[0] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("plan --hidden-size 64", "--num-layers"),
        ("plan --model Llama-3-8B --tp 3", "num_attention_heads (32) must be a multiple"),
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
