"""Counts of the faults that were tried, by their verdict; printed at the end of the run."""

from collections import Counter, defaultdict

import pytest

from tests.faults.judge import Scene

COUNTS: defaultdict[str, Counter[str]] = defaultdict(Counter)


@pytest.fixture(scope="session")
def scene(tmp_path_factory):
    return Scene(tmp_path_factory.mktemp("scene"))


@pytest.fixture
def count(request):
    """Call with a verdict (recovered, noticed, refused) after the judge has agreed."""
    fault = request.node.get_closest_marker("fault").args[0]
    request.node.user_properties.append(("judged", fault))

    def record(verdict: str, number: int = 1) -> None:
        request.node.user_properties.append(("fault", (fault, verdict, number)))

    return record


def pytest_runtest_logreport(report):
    for name, value in report.user_properties if report.when == "call" else ():
        if name == "fault":
            fault, verdict, number = value
            COUNTS[fault]["tried"] += number
            COUNTS[fault][verdict] += number
        elif name == "judged" and report.failed:
            COUNTS[value]["tried"] += 1
            COUNTS[value]["lost"] += 1


def pytest_terminal_summary(terminalreporter):
    if COUNTS:
        terminalreporter.section("faults")
        columns = ("tried", "recovered", "noticed", "refused", "lost")
        terminalreporter.line(" | ".join(("fault", *columns)))
        for fault, counts in sorted(COUNTS.items()):
            terminalreporter.line(" | ".join((fault, *(str(counts[name]) for name in columns))))
