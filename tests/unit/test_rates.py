"""Rates that are carried over keep the size of updates, by upstream's formulas."""

import json
import math
from itertools import permutations, product

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers.muon import get_muon_scale_factor
from torch.optim._muon import _adjust_lr

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.math import orthogonalize
from megatron_eopt.math.orthogonalize import scale_factor
from megatron_eopt.tools.command import main
from megatron_eopt.tools.rates import MODES, Scale, carried
from tests.harness import run_ranks
from tests.unit.test_command import SMALL, printed

# of Llama 3 8B, Kimi K2 and DeepSeek-V4: projections, experts, a router
SHAPES = [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (7168, 2048), (384, 7168)]
TORCHS = ("original", "match_rms_adamw", "spectral_unclamped")
UPSTREAM = ("spectral", "shape_scaling", "unit_rms_norm")


@pytest.mark.parametrize("shape", SHAPES)
def test_updates_keep_their_size_by_upstreams_formulas(shape):
    for old, new in product(UPSTREAM, UPSTREAM):
        rate = carried(0.02, Scale(old), Scale(new, 0.5), shape, shape)
        before = 0.02 * get_muon_scale_factor(*shape, old)
        assert rate * get_muon_scale_factor(*shape, new) * 0.5 == pytest.approx(before)
    # torch.optim.Muon's names
    for old, new in permutations(TORCHS, 2):
        rate = carried(0.02, Scale(old), Scale(new), shape, shape)
        expected = _adjust_lr(0.02, old, torch.Size(shape))
        assert _adjust_lr(rate, new, torch.Size(shape)) == pytest.approx(expected)
    # these two differ by a number, whatever the shape
    assert carried(1.0, Scale("spectral"), Scale("adamw_rms"), shape, shape) == pytest.approx(5)
    assert carried(3e-4, Scale("adamw"), Scale("adamw_rms"), shape, shape) == pytest.approx(3e-4)
    for mode in MODES:
        assert carried(0.02, Scale(mode), Scale(mode), shape, shape) == pytest.approx(0.02)


@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("mode", UPSTREAM)
def test_blocks_of_tensor_parallel_ranks_update_as_much_as_whole_matrices(mode, dim):
    torch.manual_seed(0)
    gradient = torch.randn(48, 32, dtype=torch.float64)

    def update(matrix):
        scale = scale_factor(*matrix.shape, mode)
        return orthogonalize(matrix, coefficients=((1.5, -0.5, 0.0),), steps=40) * scale

    blocks = gradient.chunk(4, dim)
    rate = carried(0.02, Scale(mode), Scale(mode), tuple(blocks[0].shape), (48, 32))
    blockwise = 0.02 * torch.cat([update(block) for block in blocks], dim)
    assert (rate * update(gradient)).norm() == pytest.approx(blockwise.norm().item(), rel=1e-3)


MODEL = [*SMALL, "--num-experts", "4", "--moe-layer-freq", "[0]*1+[1]*1"]


def test_the_command_converts_the_rate_of_each_weight():
    to = ["rate", "0.02", *MODEL, "--to", "shape_scaling", "--json"]
    cut = ["--tp", "2", "--from", "shape_scaling", "--from-tp-mode", "blockwise"]
    other = ["rate", "0.02", *MODEL, "--to", "adamw_rms", "--to-extra", "2"]
    plain, blockwise, shown = run_ranks(1, printed, to, [*to, *cut], other, cpu=False)[0]
    found = json.loads(plain[1])
    by_end = {name.partition("layers.*.")[2]: rate for name, rate in found["rates"].items()}
    assert by_end["mlp.router.weight"] == pytest.approx(0.02 * 64**0.5)
    for name, rate in by_end.items():
        if "linear_fc2" in name:  # (64, 96)
            assert rate == pytest.approx(0.02 * 96**0.5), name
    assert min(by_end.values()) < found["one_rate"] < max(by_end.values())
    rates = json.loads(blockwise[1])["rates"]
    # columns are cut: each rank's square block is scaled by 1, and has norms of its own
    proj = next(rate for name, rate in rates.items() if "linear_proj" in name)
    assert proj == pytest.approx(0.02 * math.sqrt(2) * math.sqrt(64 / 64))
    assert "All updates stay the same with --muon-lr 0.05" in shown[1]
    names = {name for name in by_end if len(name) < 30}  # longer ones are folded
    assert any("[" in name for name in names)
    assert not [name for name in names if name not in shown[1]]


@pytest.mark.parametrize(
    ("arguments", "rate"),
    [
        ("3e-4 --from adamw", "6e-05"),
        ("3e-4 --from adamw --to adamw_rms", "0.0003"),
        ("3e-4 --from match_rms_adamw --to spectral --to-extra 0.5", "0.00012"),
        ("2e-2 --from original --to shape_scaling --from-extra 3", "0.06"),
        ("2e-2 --from spectral --from-tp-mode blockwise --to adamw_rms", "0.1"),
    ],
)
def test_a_factor_of_all_shapes_needs_no_model(arguments, rate, capsys):
    assert main(["rate", *arguments.split()]) == 0
    assert capsys.readouterr().out == f"All updates stay the same with --muon-lr {rate}\n"


@pytest.mark.parametrize("more", [[], ["--moe-shared-expert-intermediate-size", "32"]])
def test_a_rate_that_goes_to_blocks_and_back_is_the_same(more):
    way = ["rate", "0.02", *MODEL, *more, "--tp", "2", "--from", "shape_scaling", "--json"]
    way += ["--to", "shape_scaling"]
    ways = ([*way, f"--{side}-tp-mode", "blockwise"] for side in ("to", "from"))
    there, back = (json.loads(text) for _, text, _ in run_ranks(1, printed, *ways, cpu=False)[0])
    for name, rate in there["rates"].items():
        assert rate * back["rates"][name] == pytest.approx(0.02**2), name
        # a router is not cut
        assert "router" not in name or rate == pytest.approx(0.02)
    # means count each matrix as often, whether ranks have blocks of it or all of it
    assert there["one_rate"] * back["one_rate"] == pytest.approx(0.02**2)


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigurationError, match="scale mode"):
        Scale("spectrl")
    with pytest.raises(ConfigurationError, match="extra scale factor"):
        Scale(extra=0)
