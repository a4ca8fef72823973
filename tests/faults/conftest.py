"""Executors and stores, and counts of the faults by verdict, printed at the end of the run.

The short version of the tests runs with every executor and with PostgreSQL, the long one locally;
processes are also killed while two trials run at once.
"""

import contextlib
import subprocess
from collections import Counter, defaultdict

import pytest

from sweep.config.execution import Services
from sweep.orchestration.executors.build import services_table
from sweep.orchestration.executors.ray import ENVIRONMENT
from tests.faults.judge import Scene
from tests.orchestration.clusters import RAY_TOKEN
from tests.servers import postgres_server

COUNTS: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
OTHERS = ("ray", "slurm", "postgres")
TWO = "two at once"


@pytest.fixture(
    scope="session",
    params=[
        "local",
        pytest.param(TWO, marks=pytest.mark.slow),
        *(pytest.param(name, marks=getattr(pytest.mark, name)) for name in OTHERS),
    ],
)
def where(request):
    return request.param


@pytest.fixture(scope="session")
def services(where):
    with pytest.MonkeyPatch.context() as patch:
        match where:
            case "ray":  # every command starts a cluster of its own
                for name, value in {**RAY_TOKEN, **ENVIRONMENT}.items():  # before it is imported
                    patch.setenv(name, value)
                pytest.importorskip("ray", reason="needs the extra ray")
                yield services_table()(executor="ray")
            case "slurm":
                pytest.importorskip("submitit", reason="needs the extra slurm")
                yield services_table()(executor="slurm", slurm="cluster=local")
            case "postgres":
                with postgres_server("mlflow") as server:
                    yield Services(tracking_uri=server.address("mlflow"))
            case _:
                yield Services()


@pytest.fixture(scope="session")
def scene(where, services, tmp_path_factory):
    at_once = 2 if where == TWO else 1
    return Scene(tmp_path_factory.mktemp("scene"), services, at_once)


@pytest.fixture
def mount():
    """Return a function that mounts a file system until the end of the test."""
    with contextlib.ExitStack() as stack:

        def mount_here(device, path, *options):
            command = ["mount", *options, str(device), str(path)]
            if subprocess.run(command, capture_output=True, check=False).returncode:
                pytest.skip("only root may mount a file system")
            stack.callback(subprocess.run, ["umount", "-l", str(path)], check=True)

        yield mount_here


def is_run(item):
    """Leave out the long version elsewhere, and faults of mlflow.db, which PostgreSQL replaces."""
    where = item.callspec.params.get("where") if hasattr(item, "callspec") else None
    if where == TWO:
        return item.path.name == "test_kills.py"
    if where not in OTHERS:
        return True
    fault = item.get_closest_marker("fault").args[0]
    is_of_database = "mlflow.db" in item.name or fault.startswith("database")
    is_long = item.get_closest_marker("slow") is not None
    return not is_long and not (where == "postgres" and is_of_database)


def pytest_collection_modifyitems(items):
    items[:] = filter(is_run, items)


@pytest.fixture
def count(request):
    """Call with a verdict (recovered, noticed, refused) after the judge has agreed."""
    fault = request.node.get_closest_marker("fault").args[0]
    services = getattr(request.node, "callspec", None)
    where = services.params.get("where") if services else None
    if where == TWO:
        fault = f"{fault}, {TWO}"
    fault = f"the seeded part, with {where}" if where in OTHERS else fault
    request.node.user_properties.append(("judged", fault))

    def record(verdict: str, number: int = 1) -> None:
        request.node.user_properties.append(("fault", (fault, verdict, number)))

    return record


def pytest_runtest_logreport(report):
    path = report.nodeid.partition("::")[0].rpartition("/")[2]
    for name, value in report.user_properties if report.when == "call" else ():
        if name == "fault":
            fault, verdict, number = value
            where = path if "seeded" not in fault else "all"
            COUNTS[fault, where]["tried"] += number
            COUNTS[fault, where][verdict] += number
        elif name == "judged" and report.failed:
            where = path if "seeded" not in value else "all"
            COUNTS[value, where]["tried"] += 1
            COUNTS[value, where]["lost"] += 1


def pytest_terminal_summary(terminalreporter):
    """Print the table of docs/reliability.md."""
    if COUNTS:
        terminalreporter.section("faults")
        names = ("tried", "recovered", "noticed", "refused", "lost")
        terminalreporter.line(f"| fault | {' | '.join(names)} | tests |")
        terminalreporter.line(f"| :-- |{' --: |' * len(names)} :-- |")
        for (fault, path), counts in sorted(COUNTS.items()):
            numbers = " | ".join(f"{counts[name]:,}" for name in names)
            terminalreporter.line(f"| {fault} | {numbers} | {path} |")
