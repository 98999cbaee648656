"""Every kernel is compiled for GPUs that are not here, down to its machine code."""

import json
from importlib.metadata import version

import pytest

from benchmarks.compiled import RESULT, TARGETS, cases, compiling_for, measured
from tests.harness.tiers import mostly_long

NARROW = [name for name in cases() if "odd" in name]
WIDE = [name for name in cases() if name not in NARROW and "product" not in name]


@pytest.mark.parametrize("target", mostly_long(TARGETS, "sm_90"))
def test_no_kernel_keeps_registers_in_memory_and_the_page_has_what_each_uses(target):
    found = {name: uses[target] for name, uses in measured([target]).items()}
    assert {name: uses.spilled for name, uses in found.items() if uses.spilled} == {}
    page = json.loads(RESULT.read_text())
    # another compiler may choose other registers
    if version("triton") == page["triton"]:
        assert {name: list(uses) for name, uses in found.items()} == {
            name: uses[target] for name, uses in page["kernels"].items()
        }


def instructions(name: str) -> str:
    with compiling_for(TARGETS["sm_90"]) as kernels:
        cases()[name]()
    return str(kernels[0].asm["ptx"])


@pytest.mark.parametrize("name", [*WIDE, *NARROW])
def test_tensors_are_read_16_bytes_at_a_time_where_they_are_aligned(name):
    assert ("v4" in instructions(name)) == (name in WIDE)


@pytest.mark.parametrize("name", [name for name in cases() if name.startswith("product")])
def test_products_use_the_matrix_units(name):
    found = instructions(name)
    assert "wgmma.mma_async" in found
    assert "st.global.v4" in found
