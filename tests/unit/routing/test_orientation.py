"""Experts' weights step as layers of their own do, whichever dimension is stored first."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

from megatron_eopt.fsdp2 import build_optimizer
from megatron_eopt.matrices import gated, transposed
from megatron_eopt.routing.orientation import inputs_first
from megatron_eopt.routing.places import places_in
from megatron_eopt.routing.splits import find_splits
from tests.harness import run_ranks
from tests.harness.log import listening
from tests.unit.fsdp2.model import config, cut, eager, far, set_gradients, weights
from tests.unit.routing.test_wrapping import Same

HIDDEN, INNER = 16, 24
SIZES = [
    # pattern of an argument's or a setting's name, and its value
    (r"act(ivation)?(_fn|_function)?$|hidden_act", "silu"),
    (r"dropout|prob|drop$", 0.0),
    (r"(?=.*experts|.*num_local)(?!.*per_tok)", 2),
    (r"latent", None),
    (r"intermediate|output_size|ffn|expert_dim", INNER),
    (r"hidden|input_size|d_model|embed_dim", HIDDEN),
]
LARGE = {"EsmFold2ConfidenceHead", "Gemma4UnifiedVisionEmbedder", "ZambaMambaMixer"}
LARGE |= {"FunnelRelMultiheadAttention", "NeighborhoodAttention", "XLNetRelativeAttention"}
"""Classes with 3-D parameters that have configurations in their configurations; none are experts.
"""

INTERLEAVED = {"GptOssExperts"}


def size(name: str) -> Any:
    return next((value for pattern, value in SIZES if re.search(pattern, name)), 2)


class Tiny:
    """A configuration of any model."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return size(name)


def has_three_dimensions(tree: ast.ClassDef) -> bool:
    """Whether a class makes a 3-D parameter, other than a single table."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Parameter"):
            sizes = node.args[0].args if node.args and isinstance(node.args[0], ast.Call) else []
            if len(sizes) == 1 and isinstance(sizes[0], ast.Tuple | ast.List):
                sizes = sizes[0].elts
            if len(sizes) == 3 and ast.unparse(sizes[0]) != "1":
                return True
    return False


def classes() -> Iterator[tuple[str, str]]:
    """Yield the classes of transformers that have 3-D weights, with their modules."""
    (folder,) = pytest.importorskip("transformers.models").__path__
    for file in sorted(Path(folder).glob("*/modeling_*.py")):
        for tree in ast.parse(file.read_text()).body:
            if isinstance(tree, ast.ClassDef) and has_three_dimensions(tree):
                yield f"transformers.models.{file.parent.name}.{file.stem}", tree.name


def make(home: str, name: str) -> nn.Module:
    cls = getattr(importlib.import_module(home), name)
    arguments = list(inspect.signature(cls.__init__).parameters.values())[1:]
    needed = [item.name for item in arguments if item.default is item.empty]
    module: nn.Module = cls(**{n: Tiny() if n == "config" else size(n) for n in needed})
    torch.manual_seed(0)
    for param in module.parameters():
        nn.init.normal_(param)
    return module


def as_layers(tensor: torch.Tensor, leaf: str, *, has_two: bool) -> list[torch.Tensor]:
    """Return the matrices (out, in) of all experts, found by the hidden size alone."""
    hidden_last = tensor.shape[-1] == HIDDEN
    if hidden_last == ("down" in leaf):
        tensor = tensor.mT
    return [part for one in tensor for part in (one.chunk(2) if has_two else [one])]


@eager
def test_experts_of_transformers_step_as_linear_layers():
    found = list(classes())
    assert len([name for _, name in found if "Experts" in name]) > 50
    assert not any("Experts" in name for name in LARGE)
    for home, name in found:
        if name not in LARGE:
            check_steps(home, name)


def check_steps(home: str, name: str) -> None:
    module = make(home, name)
    stacks = {p.leaf: p.param for p in places_in([module]) if p.is_stack}
    assert bool(stacks) == ("Experts" in name), name
    settings = config(muon_scale_mode="unit_rms_norm")
    model = nn.Sequential(module)
    with listening() as lines:
        optimizer = build_optimizer(model, settings)
    expected, mine = [], []
    for leaf, param in stacks.items():
        fused = leaf == "gate_up_proj" and name not in INTERLEAVED
        param.grad = torch.randn_like(param)
        for weight, grad in zip(
            as_layers(param.detach().clone(), leaf, has_two=fused),
            as_layers(param.grad, leaf, has_two=fused),
            strict=True,
        ):
            layer = nn.Linear(*reversed(weight.shape), bias=False)
            layer.weight.data, layer.weight.grad = weight.contiguous(), grad.contiguous()
            expected.append(layer)
    assert any("look fused" in line for line in lines) == (name in INTERLEAVED), name
    optimizer.step()
    if expected:
        build_optimizer(nn.ModuleList(expected), settings).step()
    for leaf, param in stacks.items():
        fused = leaf == "gate_up_proj" and name not in INTERLEAVED
        mine += as_layers(param.detach(), leaf, has_two=fused)
    for ours, layer in zip(mine, expected, strict=True):
        # float32 products of a batch and of one matrix round differently
        assert torch.allclose(ours, layer.weight, rtol=1e-5, atol=1e-6), name


def run_experts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    for w in weight:
        x = x @ w.to(x.dtype)
    return x


class Written(nn.Module):
    """Weights ``w0`` to ``w9`` used in every way, of which the names of the answers tell."""

    flag = True

    def __init__(self) -> None:
        super().__init__()
        for number in range(14):
            self.register_parameter(f"w{number}", nn.Parameter(torch.zeros(2, 4, 4)))

    def forward(this, x: torch.Tensor) -> Any:  # noqa: N805  a name as good as any
        return this.compute(x)

    def compute(self, x: torch.Tensor) -> Any:
        a, b = self.w2, self.w3.mT
        first = functional.linear(x, self.w0[0])
        second = x @ self.w1[0]
        third = torch.bmm(x, a.float()), x.bmm(b)
        fourth = torch.baddbmm(x, x, self.w4), torch.einsum("bd,edf->ebf", x, self.w5)
        fifth = torch.einsum("bd,efd->ebf", x, self.w6), self.run(self.w7, x)
        sixth = run_experts(x, weight=self.w8), [x @ w.transpose(0, 1) for w in self.w9]
        for one, other in zip(x, self.w10, strict=True):
            first += torch.matmul(one, other.T)
        seventh = x @ self.w11.flatten(0, 1), x @ self.w12[0] + functional.linear(x, self.w12[1])
        return first, second, third, fourth, fifth, sixth, seventh, x * self.w13

    @staticmethod
    def run(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x, weight.bfloat16().transpose(-2, -1), offs=None)


def test_how_code_multiplies_tells_which_dimension_is_the_input():
    found = [inputs_first(Written(), f"w{number}", 3) for number in range(14)]
    first_two = [False, True]
    assert found[:2] == first_two
    assert found[2:11] == [True, False, True, True, False, False, True, False, False]
    # reshaped, used in both ways, not multiplied as a matrix
    assert found[11:] == [None, None, None]
    assert inputs_first(nn.Linear(2, 2), "weight", 2) is False
    assert inputs_first(nn.ConvTranspose1d(2, 2, 2), "weight", 3) is True


class Unreadable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts_weight = nn.Parameter(torch.randn(2, 4, 12))


Experts = type("Experts", (Unreadable,), {"forward": eval("lambda self, x: x @ self.w")})


@eager
def test_where_the_code_does_not_tell_the_table_says_so_and_the_user_decides():
    def build(declared: str | None) -> tuple[str, list[str]]:
        model = nn.ModuleDict({"block": Experts()})
        if declared:
            model.block.experts_weight.eopt_split = declared
        with listening() as lines:
            build_optimizer(model, config(print_optimizer_routing=True))
        (table,) = (line for line in lines if "optimizer routing" in line)
        (row,) = (line for line in table.splitlines() if "experts_weight" in line)
        return row, [line for line in lines if "does not show which dimension" in line]

    row, (line,) = build(None)
    assert "inputs or outputs first?: weight 2 x 4 x 12" in row
    assert "block.experts_weight" in line
    assert "'transposed'" in line
    row, lines = build("whole")
    assert "experts: weight 2 x 4 x 12" in row
    assert not lines
    row, lines = build("transposed")
    assert "transposed: weight 2 x 4 x 12" in row
    assert not lines


class InputsFirst(nn.Module):
    """Experts as Llama 4 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(5, 6, 8))
        self.down_proj = nn.Parameter(torch.randn(5, 4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.bmm(x, self.gate_up_proj).chunk(2, dim=-1)
        return torch.bmm(gate * up, self.down_proj)


class GatedExperts(InputsFirst):
    """Subclasses cut gate and up apart."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.parts(torch.bmm(x, self.gate_up_proj))
        return torch.bmm(gate * up, self.down_proj)

    def parts(self, y: torch.Tensor) -> Any:
        return y.split(4, dim=-1)


class BySlices(GatedExperts):
    def parts(self, y: torch.Tensor) -> Any:
        return y[..., :4], y[..., 4:]


def cut_apart(y: torch.Tensor) -> Any:
    return torch.chunk(y, 2, -1)


class ByFunction(GatedExperts):
    def parts(self, y: torch.Tensor) -> Any:
        return cut_apart(y)


class BySteps(GatedExperts):
    def parts(self, y: torch.Tensor) -> Any:
        y, _ = y.split([8, 0], dim=-1)
        return y[..., ::2], y[..., 1::2]


class ByView(GatedExperts):
    def parts(self, y: torch.Tensor) -> Any:
        y = y[..., :8]  # of this module's other tensors
        return y.view(*y.shape[:-1], -1, 2).unbind(-1)


class ByIndex(GatedExperts):
    def parts(self, y: torch.Tensor) -> Any:
        even = torch.arange(0, 8, 2)
        return y.index_select(-1, even), y.index_select(-1, even + 1)


class InTurn(nn.Module):
    """A dense layer whose outputs alternate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).unflatten(-1, (4, 2)).unbind(-1)
        return self.down_proj(gate * up)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("cls", "is_known"),
    [(cls, True) for cls in (GatedExperts, BySlices, ByFunction)]
    + [(cls, False) for cls in (BySteps, ByView, ByIndex, InTurn)],
)
@eager
def test_gate_and_up_are_halves_only_where_the_code_cuts_them(cls, is_known):
    model = nn.ModuleDict({"experts": cls()})
    with listening() as lines:
        build_optimizer(model, config())
    found = {split.kind for split in find_splits(places_in([model]), which=["gated"]).values()}
    assert ("gated" in found) == is_known
    assert any("look fused" in line for line in lines) != is_known


class FlatExperts(nn.Module):
    """All experts in rows of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.num_local_experts = 3
        self.weight = nn.Parameter(torch.randn(12, 6))


@eager
def test_experts_in_one_2d_weight_look_fused():
    weights = [("experts.weight", FlatExperts())]
    if find_spec("transformers"):
        home = importlib.import_module("transformers.models.dbrx.modeling_dbrx")
        sizes = {"hidden_size": 6, "ffn_hidden_size": 4, "moe_num_experts": 3, "ffn_act_fn": {}}
        dbrx = home.DbrxExperts(SimpleNamespace(**sizes))
        for param in dbrx.parameters():
            nn.init.normal_(param)
        weights += [(f"experts.mlp.{name}", dbrx) for name in ("w1", "v1", "w2")]
    for name, module in weights:
        with listening() as lines:
            build_optimizer(nn.ModuleDict({"experts": module}), config())
        (line,) = (line for line in lines if "look fused" in line)
        assert name in line


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = InputsFirst()
        self.proj = nn.Linear(6, 6)


@eager
def train(layout: str, declared: bool = False) -> dict[str, torch.Tensor]:
    model = Network()
    if declared:
        model.experts.forward = None
        model.experts.gate_up_proj.eopt_split = transposed(gated((5, 8, 6)))
        model.experts.down_proj.eopt_split = "transposed"
    model = cut(model, layout, "proj")
    optimizer = build_optimizer(model, config(muon_scale_mode="unit_rms_norm"))
    for step in range(3):
        set_gradients(model, step)
        optimizer.step()
    return weights(model)


@eager
def test_parametrized_and_scripted_modules():
    model = Network()
    for name in ("gate_up_proj", "down_proj"):
        parametrize.register_parametrization(model.experts, name, Same())
    plain, found = (
        find_splits(places_in([Network()]), which=["gated"]),
        find_splits(places_in([model]), which=["gated"]),
    )
    assert {*found.values()} == {*plain.values()}
    assert {split.kind for split in found.values()} == {"gated", "transposed"}
    build_optimizer(nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 4)), config())
    for whole in (torch.jit.script(nn.LSTM(6, 4)), torch.jit.trace(InTurn(), torch.randn(2, 6))):
        biases = [param for param in whole.parameters() if param.dim() == 1]
        for bias in biases:
            bias.requires_grad = False
        with listening() as lines:
            optimizer = build_optimizer(whole, config())
        assert any("look fused" in line for line in lines)
        for param in whole.parameters():
            param.grad = torch.ones_like(param) if param.requires_grad else None
        optimizer.step()


@pytest.mark.parametrize("layout", ["fsdp", "units", "optim_grads_params"])
def test_they_step_alike_on_two_ranks(layout):
    alone = train("plain")
    assert far(train("plain", declared=True), alone)[0] == 0
    for found in run_ranks(2, train, layout):
        # the order of sums in products
        assert far(found, alone)[0] < 1e-6
