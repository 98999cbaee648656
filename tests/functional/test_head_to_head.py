"""The comparison with torch.optim.Muon: tuning, what a run leaves behind, and its figures."""

import json
from itertools import pairwise

import pytest
import torch

from benchmarks.head_to_head.__main__ import main
from benchmarks.head_to_head.models import TASKS, made
from benchmarks.head_to_head.results import steps_to, tuned
from benchmarks.head_to_head.training import ARMS, hidden


@pytest.mark.parametrize("best", [2.5e-4, 4e-3, 0.128])
def test_the_grid_grows_until_the_best_rate_is_inside(best):
    losses = tuned(lambda rate: abs(rate - best))
    rates = list(losses)
    assert min(losses, key=losses.get) == pytest.approx(best)
    assert best == pytest.approx(rates[1]) or best == pytest.approx(rates[-2])
    assert all(b == pytest.approx(2 * a) for a, b in pairwise(rates))


def test_steps_to_a_loss():
    curve = [(10, 4.0), (20, 3.0), (30, 2.0)]
    assert [steps_to(curve, loss) for loss in (5.0, 2.5, 2.0, 1.0)] == [10, 25, 30, None]


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("arm", ARMS)
def test_each_weight_is_stepped_once_by_the_optimizer_that_the_page_names(name, arm):
    model = made(TASKS[name], 16, seed=0)
    optimizers = ARMS[arm](model, 1e-3)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    stepped = [id(param) for group in groups for param in group["params"]]
    assert sorted(stepped) == sorted(map(id, model.parameters()))
    muons = {
        "ours": lambda: [group for group in groups if group["optimizer"] == "muon"],
        "torch": lambda: optimizers[0].param_groups,
        "adamw": list,
    }[arm]()
    matrices = hidden(model) if arm != "adamw" else []
    if arm == "ours" and name == "convnet":
        matrices += [model.conv2.weight, model.conv3.weight, model.conv4.weight]
    assert {id(p) for group in muons for p in group["params"]} == set(map(id, matrices))
    for group in groups:
        assert (group["weight_decay"] > 0) == all(p.dim() > 1 for p in group["params"])


def test_a_small_comparison(tmp_path, capsys):
    flags = ["--models", "gpt", "--steps", "2", "--width", "16", "--rounds", "2", "--seeds", "1"]
    assert main([*flags, "--out", str(tmp_path)]) == 0
    runs = capsys.readouterr().out.count("held-out loss")
    figures = json.loads((tmp_path / "figures.json").read_text())
    arms = figures["models"]["gpt"]["arms"]
    assert list(arms) == ["ours", "torch", "adamw"]
    for arm in arms.values():
        assert min(arm["grid"].values()) == arm["grid"][str(arm["rate"])]
        assert arm["losses"][0] < arm["curve"][0][1] < 7
        assert 0 < arm["seconds"]["optimizer"] < arm["seconds"]["step"]
    assert runs == sum(len(arm["grid"]) + 1 for arm in arms.values())
    for found in figures["deviations"].values():
        # sums of at most 64 float32 products, five steps of growth 3.4
        assert found["ours, float32"] < 1e-5
        assert torch.finfo(torch.bfloat16).eps < found["torch, 16 bits"] < 0.1
    # a second call trains nothing, and other settings are an error
    assert main([*flags, "--out", str(tmp_path)]) == 0
    assert "held-out loss" not in capsys.readouterr().out
    assert main(["--steps", "3", "--out", str(tmp_path)]) == 2
    assert "--steps 2 --width 16" in capsys.readouterr().err
