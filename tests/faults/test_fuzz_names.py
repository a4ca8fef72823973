"""Texts of a user that another program reads as names: each passes through one boundary.

A text is refused with a sentence, or its owner takes it and gives the same one back.
"""

import logging
import os
import sqlite3
import tempfile
from pathlib import Path

import pytest
import sqlalchemy
from hypothesis import given, settings
from hypothesis import strategies as st

from sweep.config.metrics import MetricNames, check_reported_name
from sweep.config.secrets import refuse_secrets
from sweep.errors import SweepError
from sweep.tracking.addresses import check_tracking_uri, mlflow_address, sqlite_address, sqlite_path
from sweep.tracking.store import connect, metric_name
from sweep.trial.files import refuse_links

pytestmark = pytest.mark.fault("name that another program reads")
TEXTS = st.text(min_size=1, max_size=40)
# Characters that mean something in addresses, paths, formats and quotes.
SPECIAL = st.text(st.sampled_from("ab/.%?#&;:@+{}[]()'\"\\ ü2Ff~$*|<>=,!"), min_size=1, max_size=20)
NAMES = st.one_of(TEXTS, SPECIAL)


class Metrics:
    """Names of metrics, which belong to MLflow and to the file systems of its stores."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.client = connect(sqlite_address(folder / "mlflow.db"))

    def texts(self):
        groups = st.sampled_from(["train/", "valid/", "Perf/", "final/", "a/b/", ""])
        parts = st.one_of(NAMES, st.from_regex(r"\w[\w.-]{0,9}", fullmatch=True))
        return st.builds(str.__add__, groups, parts)

    def use(self, text: str) -> None:
        """Log it with a second metric; read both back from MLflow, and from a file system."""
        names, pair = MetricNames(), dict.fromkeys((text, "train/loss"), 1.0)
        for name in pair:
            check_reported_name(name)
            names.add(name)
        run = self.client.create_run("0")
        for name in pair:
            assert metric_name(name, "tokens") == name
            self.client.log_metric(run.info.run_id, name, 1.0)
            path = self.folder / "metrics" / run.info.run_id / name.casefold()
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x"):
                assert path.resolve() == path
        assert self.client.get_run(run.info.run_id).data.metrics == pair
        assert not text.casefold().startswith(("perf/", "final/", "memory/", "system/"))


class Databases:
    """Names of folders, which SQLAlchemy reads in the addresses of their databases."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def texts(self):
        parts = NAMES.filter(lambda text: text.strip("./") and "\0" not in text)
        return parts.filter(lambda text: len(os.fsencode(text)) < 200 if _is_text(text) else False)

    def use(self, text: str) -> None:
        """Create both databases, and find them again in the folder and nowhere else."""
        with tempfile.TemporaryDirectory(dir=self.folder) as parent:
            name = text.strip("/").replace("/", "%2F").replace("..", "%2E.")
            path = Path(parent, name)
            refuse_links(path)
            path.mkdir()
            for base in ("mlflow.db", "optuna.db"):
                address = sqlite_address(path / base)
                assert sqlite_path(address) == sqlite_path(mlflow_address(address)) == path / base
                assert check_tracking_uri(address) == address
                template = address.replace("{", "{{").replace("}", "}}")
                for url in (address, mlflow_address(address), template.format(SCHEMA_VERSION="")):
                    engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
                    with engine.begin() as connection:
                        connection.execute(sqlalchemy.text("CREATE TABLE IF NOT EXISTS t (n)"))
                        connection.execute(sqlalchemy.text("INSERT INTO t VALUES (1)"))
                    engine.dispose()
                with sqlite3.connect(path / base) as connection:
                    assert connection.execute("SELECT count(*) FROM t").fetchone() == (3,)
                connection.close()
            found = sorted(file for file in Path(parent).rglob("*") if file.is_file())
            assert found == [path / "mlflow.db", path / "optuna.db"]


class Credentials:
    """Words of commands, some of which name a secret that everybody could read afterwards."""

    PROGRAM = "python train.py --lr {learning_rate}"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def texts(self):
        letters = st.characters(codec="ascii", categories=("L", "N"))
        return st.text(letters, min_size=8, max_size=30).map(lambda text: f"Vq9{text}")

    def use(self, text: str) -> None:
        """Give it in every form that a command has for a named value: none is accepted."""
        for form in (
            f"env WANDB_API_KEY={text} {self.PROGRAM}",
            f"sh -c 'HF_TOKEN={text} exec {self.PROGRAM}'",
            f"{self.PROGRAM} --api-key {text}",
            f"{self.PROGRAM} --hub_token={text}",
            f"{self.PROGRAM} db.password={text}",
            f"{self.PROGRAM} --db postgresql://user:{text}@host/db",
        ):
            with pytest.raises(SweepError) as refused:
                refuse_secrets(form)
            assert text not in str(refused.value)
        refuse_secrets(f"{self.PROGRAM} --tokenizer {text} --num_key_value_heads 4")


def _is_text(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:  # half a surrogate pair
        return False
    return True


NAMESPACES = {"metrics": Metrics, "databases": Databases, "credentials": Credentials}


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_a_text_is_refused_or_taken_by_its_owner_as_it_is(namespace, tmp_path, caplog, count):
    caplog.set_level(logging.ERROR)
    boundary = NAMESPACES[namespace](tmp_path)
    refused, accepted = [], []

    @settings(max_examples=60, deadline=None, database=None)
    @given(boundary.texts())
    def use(text: str) -> None:
        try:
            boundary.use(text)
            accepted.append(text)
        except SweepError as error:
            sentence = str(error)
            assert sentence.count("\n") == 0 and len(sentence) < 600
            refused.append(text)

    use()
    assert accepted
    count("refused", len(refused))
    count("recovered", len(accepted))
