import math

import pytest

from megatron_eopt.math.scaling import scale_factor


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
