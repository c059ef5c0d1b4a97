"""The list of faults fits the code: each still changes one line and names tests that are there."""

import pytest

from tests.mutations.faults import ROOT, read_faults

FAULTS = read_faults()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.title)
def test_a_fault_still_fits(fault):
    assert fault.tests and all((ROOT / test).exists() for test in fault.tests), fault.tests
    fault.apply((ROOT / fault.file).read_text(encoding="utf-8"))


def test_there_are_enough_with_names_of_their_own():
    titles = [fault.title for fault in FAULTS]
    assert len(titles) >= 150 and len(titles) == len(set(titles))
    excused = [fault.title for fault in FAULTS if fault.reason]
    assert len(excused) <= len(titles) // 10, excused
