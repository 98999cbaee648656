"""The faults that are tried by hand still fit the package, and the rooms the tests."""

import pytest

from tests.faults import ROOT, faults
from tests.rooms import NEIGHBOURS, OUTSIDE, is_in, places_of, unchanged


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: f"{fault.room}: {fault.why}")
def test_a_fault_can_be_put_in(fault):
    text = (ROOT / fault.file).read_text()
    changed = fault.applied(text)
    assert changed != text
    compile(changed, fault.file, "exec")  # a fault that cannot be imported proves nothing
    assert all((ROOT / place.partition("::")[0]).exists() for place in fault.tests)


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: f"{fault.room}: {fault.why}")
def test_a_change_runs_what_notices_its_fault(fault):
    left_out = [place for room in unchanged([fault.file]) for place in places_of(room)]
    assert not all(is_in(test.partition("::")[0], left_out) for test in fault.tests)


@pytest.mark.parametrize("room", [*NEIGHBOURS, *OUTSIDE])
def test_the_files_and_tests_of_a_room_exist(room):
    own = OUTSIDE[room][0].split() if room in OUTSIDE else [f"megatron_eopt/{room}"]
    assert all((ROOT / place).exists() for place in (*own, *places_of(room)))


def test_a_change_of_an_outside_room_runs_its_tests():
    rooms = {*OUTSIDE} - {*unchanged(["megatron_eopt/cpu/mode.py", "tests/unit/plan/new.py"])}
    assert rooms == {"cpu", "tools"}
    assert not unchanged(place for files, _ in OUTSIDE.values() for place in files.split())
