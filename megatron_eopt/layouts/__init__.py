"""Where matrices are stored, where they are computed, and how they move between the two.

* A **layout** says which rank holds which **piece** of a **logical matrix**, and where.
* An **owner** is the rank that computes a whole matrix; :func:`assign_owners` chooses it.
* A **plan** has the split sizes and copies that move matrices to their compute layout and back.
* A **wave** is a set of matrices that travel together; :func:`plan_waves` forms them.
* A **redistribution** runs a plan: one all-to-all in and one out per wave.

Shapes and ranks are all it knows, so whoever changes who computes what reads no other room.
"""

from megatron_eopt.layouts import copy_checks as _copy_checks  # noqa: F401  registers cases
from megatron_eopt.layouts.assignment import assign_owners, plan_waves
from megatron_eopt.layouts.dtensor import block_layout, dtensor_layout
from megatron_eopt.layouts.layout import Layout
from megatron_eopt.layouts.plan import ExchangePlan, Matrix, build_plan
from megatron_eopt.layouts.redistribution import Redistribution, WaveBatch

__all__ = [
    "ExchangePlan",
    "Layout",
    "Matrix",
    "Redistribution",
    "WaveBatch",
    "assign_owners",
    "block_layout",
    "build_plan",
    "dtensor_layout",
    "plan_waves",
]
