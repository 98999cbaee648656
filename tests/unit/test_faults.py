"""The faults that are tried by hand still fit the package."""

import pytest

from tests.faults import ROOT, faults


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: f"{fault.room}: {fault.why}")
def test_a_fault_can_be_put_in(fault):
    text = (ROOT / fault.file).read_text()
    changed = fault.applied(text)
    assert changed != text
    compile(changed, fault.file, "exec")  # a fault that cannot be imported proves nothing
    assert all((ROOT / place.partition("::")[0]).exists() for place in fault.tests)
