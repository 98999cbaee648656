import math

import pytest
import torch

from megatron_eopt.base.errors import ConfigurationError, ConfigurationTypeError
from megatron_eopt.math.orthogonalize import orthogonalize
from megatron_eopt.math.scaling import scale_factor
from tests.unit.math.spectra import gaussian


@pytest.mark.parametrize(
    ("mode", "wide", "tall"),
    [
        ("spectral", math.sqrt(32), math.sqrt(32)),
        ("unit_rms_norm", math.sqrt(8 / 32), math.sqrt(32 / 8)),
        ("shape_scaling", 1.0, math.sqrt(32 / 8)),
        ("adamw_rms", 0.2 * math.sqrt(32), 0.2 * math.sqrt(32)),
    ],
)
def test_factors(mode: str, wide: float, tall: float) -> None:
    assert scale_factor(8, 32, mode) == pytest.approx(wide)  # type: ignore[arg-type]
    assert scale_factor(32, 8, mode) == pytest.approx(tall)  # type: ignore[arg-type]
    assert scale_factor(32, 8, mode, 0.5) == pytest.approx(tall / 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (128, 128)])
def test_adamw_rms_gives_updates_a_root_mean_square_of_a_fifth(shape: tuple[int, int]) -> None:
    update = orthogonalize(gaussian(*shape), coefficients="polar_express", steps=8)
    update *= scale_factor(*shape, "adamw_rms")
    # exact for orthogonal rows: the squares of an m x n update sum to m
    assert torch.isclose(update.square().mean().sqrt(), torch.tensor(0.2), rtol=1e-2)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="scale_mode='spectrl'"):
        scale_factor(4, 4, "spectrl")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="columns=0"):
        scale_factor(4, 0)
    with pytest.raises(ConfigurationError, match="extra_scale_factor"):
        scale_factor(4, 4, "spectral", float("inf"))
    with pytest.raises(ConfigurationTypeError, match="extra_scale_factor"):
        scale_factor(4, 4, "spectral", "2")  # type: ignore[arg-type]
