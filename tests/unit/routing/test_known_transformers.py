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
from torch.nn.utils import parametrize

from megatron_eopt.matrices import gated, transposed
from megatron_eopt.megatron_fsdp import build_optimizer
from megatron_eopt.routing import known_transformers
from megatron_eopt.routing.known_transformers import inputs_first
from megatron_eopt.routing.places import places_in
from megatron_eopt.routing.splits import find_splits
from tests.harness import run_ranks
from tests.harness.log import listening
from tests.unit.fsdp2.models import config, cut, eager, far, set_gradients, weights
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


def classes_of(
    package: str = "transformers.models", files: str = "*/modeling_*.py", word: str = ""
) -> Iterator[tuple[str, ast.ClassDef, str]]:
    """Yield the classes in a package's files with a word: module, tree, and text of the file."""
    (folder,) = pytest.importorskip(package).__path__
    for file in sorted(Path(folder).glob(files)):
        text = file.read_text()
        home = ".".join((package, *file.relative_to(folder).with_suffix("").parts))
        for tree in ast.parse(text).body if word in text else ():
            if isinstance(tree, ast.ClassDef):
                yield home, tree, text


def classes(*, of_each_text: bool) -> Iterator[tuple[str, str]]:
    """Yield the classes of transformers that have 3-D weights, with their modules.

    With ``of_each_text`` only the first of those that differ in their names alone.
    """
    texts = set()
    for home, tree, _ in classes_of(word="nn.Parameter("):
        text = has_three_dimensions(tree) and "\n".join(map(ast.dump, tree.body))
        if text and not (of_each_text and text in texts):
            texts.add(text)
            yield home, tree.name


def make(home: str, name: str, tiny: type[Tiny] = Tiny) -> nn.Module:
    cls = getattr(importlib.import_module(home), name)
    arguments = list(inspect.signature(cls.__init__).parameters.values())[1:]
    needed = [item.name for item in arguments if item.default is item.empty]
    module: nn.Module = cls(**{n: tiny() if n == "config" else size(n) for n in needed})
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


@pytest.mark.parametrize(
    ("of_each_text", "least"), [(True, 30), pytest.param(False, 50, marks=pytest.mark.long)]
)
@eager
def test_experts_of_transformers_step_as_linear_layers(of_each_text, least):
    found = list(classes(of_each_text=of_each_text))
    assert len([name for _, name in found if "Experts" in name]) > least
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
        pair = (as_layers(its, leaf, has_two=fused) for its in (param.detach().clone(), param.grad))
        for weight, grad in zip(*pair, strict=True):
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


def of_package(package: str, name: str, base: type[nn.Module] = nn.Module) -> type[nn.Module]:
    return type(name, (base,), {"__module__": f"{package}.models"})


def test_classes_are_known_by_name_and_package_along_the_method_order():
    assert inputs_first(of_package("transformers", "Conv1D")(), 2) is True
    assert inputs_first(of_package("mine", "Conv1D")(), 2) is False
    derived: Any = of_package("mine", "Mine", of_package("transformers", "GptOssExperts"))()
    # of experts only the 3-D weights, not the biases
    assert [inputs_first(derived, dims) for dims in (2, 3)] == [False, True]
    derived.is_transposed = False
    assert inputs_first(derived, 3) is False
    assert inputs_first(of_package("transformers", "Step3p7Experts")(), 3) is False
    assert inputs_first(of_package("mine", "Step3p7Experts")(), 3) is None


@pytest.mark.parametrize("package", ["transformers", "diffusers", "timm"])
def test_tables_name_classes_that_are_there(package):
    (folder,) = pytest.importorskip(package, exc_type=ImportError).__path__
    text = "".join(file.read_text() for file in Path(folder).rglob("*.py"))
    there = set(re.findall(r"^class (\w+)", text, re.MULTILINE))
    tables = [table for table in vars(known_transformers).values() if isinstance(table, dict)]
    names = {name for table in tables for name in table.get(package, ())}
    assert names
    assert not names - there


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


@eager
def routed(cls: type[nn.Module], declared: str | bool | None = None) -> tuple[str, list[str]]:
    """Return the row of an expert's weight in the routing table, and warnings of its order."""
    model = nn.ModuleDict({"experts": cls()})
    if isinstance(declared, bool):
        model.experts.is_transposed = declared  # type: ignore[union-attr,assignment]
    elif declared:
        model.experts.weight.eopt_split = declared
    with listening() as lines:
        build_optimizer(model, config(print_optimizer_routing=True))
    (table,) = (line for line in lines if "optimizer routing" in line)
    (row,) = (line for line in table.splitlines() if "experts.weight" in line)
    return row, [line for line in lines if "the classes of their modules are not known" in line]


def test_of_unknown_experts_a_warning_says_what_is_taken_and_the_user_decides():
    row, (line,) = routed(Unknown)
    assert "inputs or outputs first?: weight 2 x 4 x 12" in row
    assert "(experts, out, in): experts.weight" in line
    assert "'transposed'" in line
    for cls, declared, split in [
        (Unknown, "whole", "experts: weight 2 x 4 x 12"),
        (Unknown, "transposed", "transposed: weight 2 x 4 x 12"),
        (Unknown, True, "transposed: weight 2 x 4 x 12"),
        (Unknown, False, "muon      | -"),
        (of_package("transformer_engine", "GroupedLinear", Unknown), None, "experts: weight"),
    ]:
        row, lines = routed(cls, declared)
        assert split in row
        assert not lines


class InputsFirst(nn.Module):
    """Experts as Llama 4 has them, under a name of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(5, 6, 8))
        self.down_proj = nn.Parameter(torch.randn(5, 4, 6))


class Declared(InputsFirst):
    """Says what experts of transformers say."""

    is_transposed = True
    is_concatenated = True


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(gate * up)  # type: ignore[no-any-return]


class InTurn(of_package("transformers", "Phi3MLP", Dense)):  # type: ignore[misc]
    """What a class says of itself has precedence."""

    is_concatenated = False


@pytest.mark.parametrize(
    ("cls", "is_known"),
    [
        (Declared, True),
        (of_package("transformers", "Phi3MLP", Dense), True),
        (of_package("mine", "Phi3MLP", Dense), False),
        (InTurn, False),
    ],
)
@eager
def test_gate_and_up_are_halves_only_where_that_is_known(cls, is_known):
    model = nn.ModuleDict({"experts": cls()})
    with listening() as lines:
        build_optimizer(model, config())
    found = {split.kind for split in find_splits(places_in([model]), which=["gated"]).values()}
    assert ("gated" in found) == is_known
    assert any("look fused" in line for line in lines) != is_known


@eager
def test_experts_in_one_2d_weight_look_fused():
    # all experts in rows of one matrix
    flat: Any = nn.ParameterDict({"weight": torch.randn(12, 6)})
    flat.num_local_experts = 3
    weights = [("experts.weight", flat)]
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
    def __init__(self, experts: type[nn.Module] = Declared) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = experts()
        self.proj = nn.Linear(6, 6)


@eager
def train(layout: str, experts: type[nn.Module] = Declared) -> dict[str, torch.Tensor]:
    model = Network(experts)
    if experts is InputsFirst:
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
        {*find_splits(places_in([its]), which=["gated"]).values()} for its in (Network(), model)
    )
    assert found == plain
    assert {split.kind for split in found} == {"gated", "transposed"}
    build_optimizer(nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 4)), config())
    for whole in (torch.jit.script(nn.LSTM(6, 4)), torch.jit.trace(Dense(), torch.randn(2, 6))):
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
    assert far(train("plain", InputsFirst), alone)[0] == 0
    for found in run_ranks(2, train, layout):
        # the order of sums in products
        assert far(found, alone)[0] < 1e-6


@pytest.mark.parametrize(
    ("sizes", "heads"),
    [
        ({"head_dim": 4}, 2),
        ({"num_heads": 4}, 4),
        ({"num_heads": 0, "n_head": 2}, 2),
        *((sizes, None) for sizes in ({"head_dim": 5}, {"num_heads": -1}, {"num_heads": 2.0}, {})),
    ],
)
def test_heads_need_a_whole_number_that_divides_the_rows(sizes, heads):
    model = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("q_proj", "k_proj", "v_proj")})
    vars(model).update(sizes)
    splits = find_splits(places_in([model]), which=["per_head"]).values()
    assert [split.parts[0].count for split in splits] == ([] if heads is None else [heads] * 3)


LATENT = {"qk_nope_head_dim": 2, "qk_rope_head_dim": 1, "v_head_dim": 3, "kv_lora_rank": 4}
LATENT["num_heads"] = 2


@pytest.mark.parametrize("lacking", [None, *LATENT])
def test_latent_attention_needs_all_of_its_sizes(lacking):
    rows = {"q_proj": 6, "kv_b_proj": 10, "kv_a_proj_with_mqa": 5}
    model = nn.ModuleDict({name: nn.Linear(4, its) for name, its in rows.items()})
    vars(model).update({name: size for name, size in LATENT.items() if name != lacking})
    splits = find_splits(places_in([model]), which=["mla"]).values()
    assert [split.kind for split in splits] == ([] if lacking else ["mla"] * 3)


def test_attention_over_other_inputs_has_no_fused_weight():
    assert not find_splits(places_in([nn.MultiheadAttention(8, 2, kdim=4)]), which=["qkv"])
