"""A run of torch.optim.Muon is the same run here, setting by setting, as the page says."""

import copy
import inspect
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.head_to_head.deviation import torch_multiplies_in
from megatron_eopt import EmergingOptimizerConfig, TorchOptimizerConfig
from megatron_eopt.fsdp2 import ParamKey, build_optimizer
from megatron_eopt.optimizers.muon import TensorParallelMuon
from tests.functional.doc_commands import ROOT, blocks
from tests.harness.log import listening
from tests.reference.muon import newton_schulz
from tests.unit.fsdp2.models import by_torch, load

SHAPES = ((16, 24), (24, 16), (20, 20), (5, 40), (140, 130))
COEFFICIENTS = ((3.4445, -4.775, 2.0315), (2.0, -1.5, 0.5), (1.875, -1.25, 0.375))
IN_16_BITS = 3e-2
"""Relative. Each of torch's products is rounded to 2^-9, and (3.4, -4.8, 2.0) makes errors of small
singular values up to 3.4 times as large in each step."""

IN_FLOAT32 = 1e-5
"""Relative, likewise: products are rounded to 2^-24, and so is each change of a weight."""

HEADING = "### From torch.optim.Muon\n"
PAGE = (ROOT / "docs/how_to/choosing.md").read_text().partition(HEADING)[2]
SETTINGS, TAKE_OVER = (text for _, text in blocks(PAGE, "python"))
ROWS = re.findall(r"(?m)^\| `(\w+=.+?)`(?: \(default\))? \| `(.+?)`", PAGE)
"""A setting there, and here."""


def matrices() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(cols, rows, bias=False) for rows, cols in SHAPES)


def stepped(model: nn.Module, optimizer: Any, size: float = 1.0, steps: int = 3) -> list[Tensor]:
    """Return by how much gradients of a size have changed the weights."""
    before = [param.detach().clone() for param in model.parameters()]
    for step in range(steps):
        for number, param in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(10 * number + step)
            param.grad = size * torch.randn(param.shape, generator=generator)
        optimizer.step()
    return [param.detach() - old for param, old in zip(model.parameters(), before, strict=True)]


def of_torch(size: float = 1.0, steps: int = 3, **settings: Any) -> list[Tensor]:
    model = matrices()
    return stepped(model, torch.optim.Muon(model.parameters(), **settings), size, steps)


def of_ours(
    overrides: Any = None, size: float = 1.0, steps: int = 3, **fields: Any
) -> list[Tensor]:
    model = matrices()
    config = EmergingOptimizerConfig(optimizer="muon", **fields)
    return stepped(model, build_optimizer(model, config, overrides), size, steps)


def far(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


RATES = {"lr": 0.02, "weight_decay": 0.1}
ALIKE = RATES | {"muon_scale_mode": "shape_scaling", "muon_nesterov": True}


@pytest.mark.parametrize("steps", [4, 5])
@pytest.mark.parametrize("triple", COEFFICIENTS)
def test_its_coefficients_give_its_updates(triple: tuple[float, ...], steps: int) -> None:
    theirs = of_torch(**RATES, ns_coefficients=triple, ns_steps=steps)
    for precision in ("medium", "highest"):
        given = {"muon_num_ns_steps": steps, "muon_fp32_matmul_prec": precision}
        assert far(of_ours(**ALIKE, **given, muon_coefficient_type=triple), theirs) < IN_16_BITS
        # the named set with other numbers does not
        assert far(of_ours(**ALIKE, **given, muon_coefficient_type="aol"), theirs) > IN_16_BITS


@pytest.mark.parametrize("triple", COEFFICIENTS)
@pytest.mark.parametrize(
    ("theirs", "ours"), [("original", "shape_scaling"), ("match_rms_adamw", "adamw_rms")]
)
def test_in_float32_both_are_equal(triple: tuple[float, ...], theirs: str, ours: str) -> None:
    for size, eps in ((1.0, 1e-7), (1e-9, 1e-8)):  # only norms near eps show it
        with torch_multiplies_in(torch.float32):
            given = {"ns_coefficients": triple, "adjust_lr_fn": theirs, "eps": eps}
            expected = of_torch(size, 10, **RATES, **given)
        fields = ALIKE | {"muon_scale_mode": ours, "muon_fp32_matmul_prec": "highest"}
        overrides = {ParamKey(name="*"): {"ns_eps": eps}}
        found = of_ours(overrides, size, 10, **fields, muon_coefficient_type=triple)
        assert far(found, expected) < IN_FLOAT32


def test_single_parameters_may_have_coefficients_of_their_own() -> None:
    overrides = {ParamKey(name="[12].weight"): {"coefficient_type": COEFFICIENTS[1]}}
    both = [of_ours(**ALIKE, muon_coefficient_type=triple) for triple in COEFFICIENTS[:2]]
    found = of_ours(overrides, **ALIKE, muon_coefficient_type=COEFFICIENTS[0])
    for number, weight in enumerate(found):
        assert torch.equal(weight, both[number in (1, 2)][number])


@pytest.mark.parametrize("coefficients", [*COEFFICIENTS, COEFFICIENTS, list(COEFFICIENTS[1:])])
@pytest.mark.parametrize("algorithm", ["standard", "gram"])
def test_coefficients_of_ones_own_are_exact(coefficients: Any, algorithm: str) -> None:
    model = matrices()
    gradients = [torch.randn_like(param) for param in model.parameters()]
    how = {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.0, "fp32_matmul_prec": "highest"}
    how |= {"coefficient_type": coefficients, "num_ns_steps": 5, "algorithm": algorithm}
    muon = TensorParallelMuon(model.parameters(), **how)
    before = [param.detach().clone() for param in model.parameters()]
    for param, gradient in zip(model.parameters(), gradients, strict=True):
        param.grad = gradient
    muon.step()
    triples = np.reshape(coefficients, (-1, 3)).tolist()
    for param, old, gradient in zip(model.parameters(), before, gradients, strict=True):
        update = newton_schulz(gradient.numpy(), 5, triples) * max(param.shape) ** 0.5
        found = (old - param.detach()).double().numpy()
        # float32 products of at most 140 terms, five steps of growth 3.4
        assert np.linalg.norm(found - update) < 1e-4 * np.linalg.norm(update)


def of_the_page() -> TorchOptimizerConfig:
    names: dict[str, Any] = {"TorchOptimizerConfig": TorchOptimizerConfig}
    exec(SETTINGS, names)
    return names["config"]


def values(text: str) -> dict[str, Any]:
    return eval(f"dict({text})")


def test_the_page_has_all_settings() -> None:
    (_, *arguments) = list(inspect.signature(torch.optim.Muon).parameters)
    assert list(dict.fromkeys(theirs.partition("=")[0] for theirs, _ in ROWS)) == arguments
    assert len(ROWS) == len(arguments) + 2  # three kinds of scale


@pytest.mark.parametrize("row", [None, *ROWS], ids=str)
def test_a_setting_of_the_page_does_the_same(row: tuple[str, str] | None) -> None:
    given = RATES | (values(row[0]) if row else {})
    # only norms near eps show it
    size = 1e-9 if "eps" in given else 1.0
    theirs = of_torch(size, **given)
    config, overrides = of_the_page(), None
    if row and row[1].startswith("{"):
        overrides = {ParamKey(name="*"): eval(row[1])}
    elif row:
        vars(config).update(values(row[1]))
    model = matrices()
    ours = stepped(model, build_optimizer(model, config, overrides), size)
    assert far(ours, theirs) < IN_16_BITS
    is_default = row is None or "original" in row[0]
    assert (far(of_torch(size, **RATES), theirs) > IN_16_BITS) != is_default


class Whole(nn.Module):
    """Matrices, and what AdamW steps; nothing that can be run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 12)
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12, bias=False)
        self.norm, self.lm_head = nn.LayerNorm(12), nn.Linear(12, 16, bias=False)


class Pair:
    """Steps two optimizers."""

    def __init__(self, *optimizers: Any) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def test_what_adamw_held_of_the_pair_starts_fresh_with_muon() -> None:
    model = Whole()
    # torch's Muon cannot update it
    model.experts = nn.ParameterDict({"weight": torch.randn(3, 8, 8)})
    muon = torch.optim.Muon([model.up.weight], lr=0.02)
    rest = [param for param in model.parameters() if param is not model.up.weight]
    adamw = torch.optim.AdamW(rest, lr=1e-3)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    Pair(muon, adamw).step()
    state = by_torch(model, [muon, adamw])
    with listening() as lines:
        optimizer = build_optimizer(model, EmergingOptimizerConfig(optimizer="muon", lr=1e-3))
        load(by_torch, model, optimizer, state)
    assert optimizer.state[model.up.weight]["momentum_buffer"].any()
    assert optimizer.state[model.lm_head.weight]["exp_avg"].any()
    assert not optimizer.state[model.experts["weight"]]["momentum_buffer"].any()
    (line,) = (line for line in lines if "fresh" in line)
    assert "experts.weight" in line
    assert "adam" in line


def test_a_run_of_the_pair_goes_on() -> None:
    model = Whole()
    mine = [model.up.weight, model.down.weight]
    rest = [param for param in model.parameters() if not any(param is one for one in mine)]
    vectors = {"params": [param for param in rest if param.dim() == 1], "weight_decay": 0.0}
    others = {"params": [param for param in rest if param.dim() > 1]}
    muon = torch.optim.Muon(mine, lr=0.02, weight_decay=0.1)
    adamw = torch.optim.AdamW([others, vectors], lr=3e-4, weight_decay=0.1)
    stepped(model, Pair(muon, adamw))
    other, *pair = copy.deepcopy((model, muon, adamw))
    for group in (*muon.param_groups, *adamw.param_groups):
        group["lr"] = 1.0  # which does not count
    names = {"config": of_the_page(), "build_optimizer": build_optimizer}
    names |= {"model": model, "muon": muon, "adamw": adamw}
    exec(TAKE_OVER, names)
    ours, theirs = stepped(model, names["optimizer"]), stepped(other, Pair(*pair))
    for (name, _), a, b in zip(model.named_parameters(), ours, theirs, strict=True):
        # Adam rounds moves of 3e-4 to float32 weights of about 1
        limit = IN_16_BITS if name in ("up.weight", "down.weight") else 1e-3
        assert (a - b).norm() <= limit * b.norm(), name
