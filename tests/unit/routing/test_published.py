"""Weights of published models get the optimizers and splits that their authors describe."""

from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
import yaml
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.fsdp2 import build, build_optimizer
from tests.harness import run_ranks
from tests.harness.tiers import mostly_long

MODELS = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text())


def built(case: dict[str, Any]) -> torch.nn.Module:
    config, model = (getattr(transformers, name) for name in case["classes"])
    torch.manual_seed(0)
    found = model(config(**case["config"]))
    for param in found.parameters():
        torch.nn.init.normal_(param, std=0.02)
    return found


def settings(case: dict[str, Any]) -> EmergingOptimizerConfig:
    return EmergingOptimizerConfig(
        optimizer="muon", lr=5e-2, params_dtype=torch.float32, **case["flags"]
    )


def route_text(route: Any, split: Any) -> str:
    """Return a route as ``published.yaml`` writes it."""
    stack, shape = route.parameter.shape[:-2], route.parameter.shape[-2:]
    if route.optimizer == "muon" and stack and split is None:
        return f"muon: {stack[0]} x {tuple(shape)}"
    if route.optimizer != "muon" or split is None:
        return route.optimizer
    shapes: Counter[tuple[int, int]] = Counter()
    for part in split.parts:
        shapes[part.shape[-2:]] += part.count
    if sum(shapes.values()) == 1:
        return "muon"
    return "muon: " + ", ".join(f"{count} x {shape}" for shape, count in shapes.items())


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_is_updated_as_a_sentence_says(name):
    case = MODELS[name]
    with patch.object(build, "log_routing") as logged:
        build_optimizer(built(case), settings(case))
    _, routing = logged.call_args.args
    said = {}
    for sentence in case["sentences"]:
        said |= dict.fromkeys(sentence["weights"].items(), f"{sentence['at']}: {sentence['says']}")
    used = set()
    for route in routing.routes:
        param = route.parameter
        matching = [key for key in said if fnmatchcase(param.name.removeprefix("model."), key[0])]
        assert matching, f"no sentence names {param.name}"
        found = route_text(route, routing.splits.get(param.param))
        assert {want for _, want in matching} == {found}, (param.name, [said[k] for k in matching])
        used.update(matching)
    assert used == set(said), "a sentence names no weight"


def trained(case: dict[str, Any], ranks: int) -> list[float]:
    model = built(case)
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = build_optimizer(model, settings(case))
    tokens = torch.randint(3, 64, (2, 32), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(5):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", mostly_long(MODELS, "DeepSeek-V4"))
def test_two_ranks_train_as_one_does(name):
    (alone,) = run_ranks(1, trained, MODELS[name], 1)
    assert alone[-1] < 0.95 * alone[0]
    for found in run_ranks(2, trained, MODELS[name], 2):
        assert found == pytest.approx(alone, rel=1e-4)
