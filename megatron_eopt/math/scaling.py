"""Factors that put orthogonal updates of differently shaped matrices on one scale."""

import math
from typing import Literal, get_args

from megatron_eopt.base.errors import check_choice, check_number

ScaleModeT = Literal["spectral", "unit_rms_norm", "shape_scaling", "adamw_rms"]
"""How an update is scaled by the shape ``(out, in)`` of its whole logical matrix:

* ``spectral``: ``sqrt(max(out, in))``.
* ``unit_rms_norm``: ``sqrt(out / in)``.
* ``shape_scaling``: ``sqrt(max(1, out / in))``.
* ``adamw_rms``: ``0.2 sqrt(max(out, in))``, the typical size of AdamW's update, so that AdamW's
  learning rate and weight decay carry over (Moonlight, arXiv:2502.16982, section 2.2).
"""

SCALE_MODES: tuple[ScaleModeT, ...] = get_args(ScaleModeT)

ADAMW_RMS = 0.2
"""Root mean square of AdamW's updates that Moonlight matches."""


def scale_factor(
    rows: int, columns: int, mode: ScaleModeT = "spectral", extra_scale_factor: float = 1.0
) -> float:
    """Return what to multiply an orthogonal update with, by the shape of the whole logical matrix.

    Raises:
        ConfigurationError: If the mode is unknown or the factor is not finite.
        ConfigurationTypeError: If the factor is not a number.
    """
    check_choice("scale_mode", mode, SCALE_MODES)
    check_number("extra_scale_factor", extra_scale_factor)
    match mode:
        case "spectral":
            factor = math.sqrt(max(rows, columns))
        case "unit_rms_norm":
            factor = math.sqrt(rows / columns)
        case "shape_scaling":
            factor = math.sqrt(max(1.0, rows / columns))
        case "adamw_rms":
            factor = ADAMW_RMS * math.sqrt(max(rows, columns))
    return factor * extra_scale_factor
