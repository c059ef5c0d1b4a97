"""The list of faults fits the code: each still changes one line and names tests that exist."""

from tests.conventions.source import assert_none
from tests.mutations.faults import ROOT, read_faults

FAULTS = read_faults()


def unfit():
    for fault in FAULTS:
        if not fault.tests or not all((ROOT / test).exists() for test in fault.tests):
            yield f"{fault.title}: tests {fault.tests} do not exist"
        try:
            fault.apply((ROOT / fault.file).read_text(encoding="utf-8"))
        except (ValueError, OSError, SyntaxError) as error:
            yield f"{fault.title}: {error}"


def test_faults_fit_the_code():
    assert_none(unfit())


def test_there_are_enough_with_names_of_their_own():
    titles = [fault.title for fault in FAULTS]
    assert len(titles) >= 150 and len(titles) == len(set(titles))
    excused = [fault.title for fault in FAULTS if fault.reason]
    assert len(excused) <= len(titles) // 10, excused
