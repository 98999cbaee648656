"""The command ``megatron-eopt`` as people call it."""

import contextlib
import io
import json
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megatron_eopt.tools.command import main
from megatron_eopt.tools.recipe import NAMES, name_of, recipe
from tests.harness import run_ranks

SMALL = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --vocab-size 64 "
    "--swiglu"
).split()


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
    plan = ["plan", *SMALL, "--dp", "4", "--muon-max-ranks-per-matrix", "1"]
    # with tp 1, a rank needs 0.00078 GiB, with tp 2 0.00055; activations of 8 tokens need little
    sweep = ["sweep", *SMALL, "--ranks", "4", "--tp", "1", "2", "8", "--gpu-capacity", "0.00065"]
    sweep += ["--seq-length", "8"]
    one, data, many = run_ranks(1, printed, plan, [*plan, "--json"], sweep, cpu=False)[0]
    for words in ("on 4 x H100", "alltoall_base", "transient", "step, without gather", "are left"):
        assert words in one[1]
    assert json.loads(data[1])["ranks"] == 4
    assert "on 4 x H100" in many[1]
    assert "left out: tp 8" in many[2]
    assert "1 fit; 1 do not fit (0.00065 GiB" in many[1]
    assert "that fit: tp 2" in many[1]
    assert one[0] == many[0] == 0


MIXED = ["--num-experts", "4", "--moe-ffn-hidden-size", "32"]


def test_a_sweep_without_sizes_searches_what_the_model_allows():
    sweep = ["sweep", *SMALL, "--ranks", "4"]
    little, mixed = [*sweep, "--gpu-capacity", "0.0001"], [*sweep, *MIXED, "--json"]
    apart = ["sweep", *SMALL, *MIXED, "--ranks", "8", "--tp", "2", "--ep", "4", "--etp", "1", "2"]
    found = run_ranks(1, printed, sweep, little, mixed, apart, cpu=False, timeout=200)[0]
    assert [status for status, *_ in found] == [0] * 4, found
    dense, unfit, data, (_, shown, left_out) = found
    assert "The shortest iteration of those that fit: tp 1" in dense[1]
    for words in ("tokens/s", "40% of the peak (--gpu-utilization)", "arXiv:2205.05198"):
        assert words in " ".join(dense[1].split())
    # tp 1, 2 and 4 with pp 1, 2
    assert "5 fit (80 GiB, with activations)." in dense[1]
    assert "0 fit; 5 do not fit (0.0001 GiB" in unfit[1]
    assert "Larger tp, pp or ep" in unfit[1]
    plans = json.loads(data[1])
    assert len(plans) == 10
    seconds = [one["iteration_seconds"] for one in plans]
    assert seconds == sorted(seconds)
    assert {one["layout"]["expert"] for one in plans} > {1, 2}
    # experts whose tensors are cut, too, need 2 x 4 ranks of each
    assert "tp 2, pp 1, dp 4, ep 4, etp 1" in " ".join(shown.split())
    assert "left out" not in left_out


@pytest.mark.parametrize("command", ["plan", "sweep --ranks 4", "explain x", "recipe", "rate 1"])
def test_an_unknown_flag_shows_the_usage_of_its_command(command, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*command.split(), "--unknown"])
    error = capsys.readouterr().err
    assert error.startswith(f"usage: megatron-eopt {command.split()[0]} ")
    assert "unrecognized arguments: --unknown" in error


SHORT = "--num-layers 16 --moe-layer-freq [0]*1+[1]*15 --num-experts 16 --hidden-size 256"


def test_plans_of_recipes_take_what_the_recipe_says():
    recipe = ["plan", "--model", "kimi-k2", *SHORT.split()]
    longer = [*recipe, "--seq-length", "8192", "--pp", "16"]
    other = ["plan", *SMALL, "--json"]
    given = [*recipe, "--pp", "16", "--tokens", "5000", "--json"]
    sparse = ["plan", "--model", "glm-5.2", *SHORT.split(), "--pp", "16", "--json"]
    commands = (recipe, [*longer, "--json"], other, given, sparse)
    texts = run_ranks(1, printed, *commands, cpu=False, timeout=200)[0]
    assert [status for status, *_ in texts] == [0] * 5, texts
    shown = " ".join(texts[0][1].split())
    for words in (
        "tokens per step: 67,108,864 tokens from: 16,384 sequences of 4,096, recipe kimi-k2",
        "layout from: recipe kimi-k2",
        "muon_coefficient_type simple",
        "left out: QK-clip",
        "holds most memory",
    ):
        assert words in shown
    pipeline, unknown, few, glm = (json.loads(text[1]) for text in texts[1:])
    assert any("indexer" in text for text in glm["left_out"])
    assert pipeline["tokens"] == 16384 * 8192
    assert pipeline["layout"]["data"] == 1
    assert "not given are 1" in pipeline["taken"]["layout"]
    held = pipeline["fullest_rank"]["memory"]["weights"]
    assert held >= pipeline["busiest_rank"]["memory"]["weights"]
    assert (unknown["tokens"], few["tokens"]) == (2**22, 5000)
    assert "no recipe" in unknown["taken"]["tokens"]
    # a smaller batch, a larger share
    assert few["share_of_iteration"] > 100 * pipeline["share_of_iteration"]


def test_a_recipe_is_found_by_the_models_name_at_hugging_face():
    names = {
        "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b",
        "Qwen/Qwen3-30B-A3B-Instruct-2507": "qwen3-30b-a3b",
        "deepseek-ai/DeepSeek-V3": "deepseek-v3",
        "meta-llama/Llama-3.1-405B-Instruct": "llama-3-405b",
        "Kimi-K2": "kimi-k2",
        "Qwen/Qwen3-0.6B": "qwen/qwen3-0.6b",  # of which there is none
    }
    assert {name: name_of(name) for name in names} == names


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("small", [False, True], ids=["whole", "small"])
def test_recipes_can_be_pasted_and_substituted(name, small, capsys, tmp_path):
    words = recipe(name).words(small=small)
    flags = ["--small"] if small else []
    for terminal in (True, False):
        with patch.object(sys.stdout, "isatty", return_value=terminal):
            assert main(["recipe", name, *flags]) == 0
        text = capsys.readouterr().out
        commands = [f"printf '%s\\n' {text}"]
        if not terminal:
            (tmp_path / "flags").write_text(text)
            commands.append("printf '%s\\n' $(cat flags)")
        for command in commands:
            done = subprocess.run(
                ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True
            )
            assert done.stdout.split("\n")[:-1] == words


GPT = (
    "--num-layers 8 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16 "
    "--vocab-size 32768 --untie-embeddings-and-output-weights --seq-length 1024 --dp 1"
).split()


def test_what_a_step_does_is_counted():
    plan = ["plan", *GPT]
    data, shown = run_ranks(1, printed, [*plan, "--json"], plan, cpu=False)[0]
    counted = json.loads(data[1])["counted"]
    # 8 layers of 4 + 2 x 4 squares of 2048; embedding, output layer and 17 norms
    weights = {"TensorParallelMuon": 96 * 2048**2, "AdamW": 2 * 32768 * 2048 + 17 * 2048}
    assert counted["elements"] == weights
    in_all, phases = counted["in_all"], counted["phases"]
    for kind, total in in_all.items():
        assert total == sum(phase[kind] for phase in phases)
    amounts = {(phase["optimizer"], phase["name"]): phase for phase in phases}
    assert {name for name, phase in amounts.items() if phase["flops"]} == {
        ("TensorParallelMuon", "orthogonalization")
    }
    # the norm reads all gradients, which are as large as main weights
    assert amounts[None, "norm"]["bytes"] == pytest.approx(4 * sum(weights.values()), rel=1e-3)
    moved = sum(counted["bytes_per_element"][name] * count for name, count in weights.items())
    assert moved == pytest.approx(in_all["bytes"])
    # what a step takes may become less, and not more
    assert in_all["host_waits"] == 0
    assert in_all["kernels"] <= 229
    assert in_all["kernels_in_all"] <= 577
    assert counted["bytes_per_element"]["TensorParallelMuon"] <= 41.7
    assert counted["bytes_per_element"]["AdamW"] <= 34.1
    for phase in ("norm", "TensorParallelMuon: orthogonalization", "AdamW: update", "total"):
        assert phase in shown[1]
    assert f"{in_all['kernels']:,}" in shown[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("plan --hidden-size 64", "--num-layers"),
        ("plan --model Llama-3-8B --tp 3", "num_attention_heads (32) must be a multiple"),
        ("plan --model Moonlight --num-layers 2", "layer pattern"),
        ("plan --model Llama-3-8B --tokens -5", "--tokens"),
        ("plan --model Llama-3-8B --optimizer-config nowhere", "nowhere"),
        ("plan --model Llama-3-8B --data-parallel-size 0", "data=0: must be"),
        ("plan --model Llama-3-8B --pp 33", "pipeline=33: must leave"),
        ("plan --model Llama-3-8B --gpu-efficiency 2", "efficiency=2.0: must be"),
        ("sweep --model Llama-3-8B --ranks 4 --tp 0", "--tp"),
        ("sweep --model Llama-3-8B --ranks 3 --tp 2", "must be a multiple"),
        ("sweep --model Llama-3-8B --ranks 0", "--ranks=0"),
        ("plan --model Llama-3-8B --gpu-utilization 2", "utilization=2.0: must be"),
        ("plan --model Llama-3-8B --micro-batch-size 0", "--micro-batch-size"),
        ("rate 0.02 --from shape_scaling", "--model=None: is missing"),
        ("rate 0.02 --from shape_scaling --from-tp-mode blockwise", "--tp=None: is missing"),
        ("rate 0.02 --from-tp-mode blockwise --model Llama-3-8B", "--tp=None: is missing"),
        ("explain nowhere", "nowhere"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, words, capsys):
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
