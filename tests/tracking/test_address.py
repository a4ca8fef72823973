"""Passwords are neither shown nor kept; a PostgreSQL address gets a driver that is installed."""

import sys

import pytest

from sweep.errors import SweepError
from sweep.tracking.address import hide_passwords, with_driver, without_password


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("postgresql://u:secret@host:5432/db", "postgresql://u@host:5432/db"),
        ("postgresql://:secret@host/db", "postgresql://@host/db"),
        ("postgresql://u:se%40cret@host/db?sslmode=disable", "postgresql://u@host/db?sslmode=disable"),
        ("postgresql://host/db?user=u&password=secret", "postgresql://host/db?user=u"),
        ("postgresql://host/db?password=secret&user=u", "postgresql://host/db?user=u"),
        ("postgresql://host/db?sslpassword=secret", "postgresql://host/db"),
        ("http://u:secret@host:5000", "http://u@host:5000"),
        ("postgresql://u@host/db", "postgresql://u@host/db"),
        ("sqlite:////home/a:b@c/x.db", "sqlite:////home/a:b@c/x.db"),
        ("mlruns", "mlruns"),
    ],
)  # fmt: skip
def test_an_address_is_shown_without_its_password(address, shown):
    assert without_password(address) == shown


@pytest.mark.parametrize("password", ["sec@ret", "sec/ret", "sec?ret", "sec#ret"])
def test_a_password_whose_end_is_not_clear_is_refused_and_not_shown(password):
    with pytest.raises(SweepError, match="percent-encoded") as refused:
        without_password(f"postgresql://u:{password}@host/db")
    assert "ret" not in str(refused.value)


def test_passwords_in_what_a_server_says_are_hidden():
    text = "request to http://u:secret@host:5000/api and postgresql://v:secret@[::1]/db failed"
    assert hide_passwords(text) == (
        "request to http://u@host:5000/api and postgresql://v@[::1]/db failed"
    )


def test_a_driver_that_is_installed_is_chosen_the_newer_first(monkeypatch):
    for driver in ("psycopg", "psycopg2"):
        monkeypatch.setitem(sys.modules, driver, pytest)  # find_spec looks no further
    address = "://u:p@host/db?x=postgresql://"
    assert with_driver("postgresql" + address) == "postgresql+psycopg" + address
    assert with_driver("postgresql+psycopg2" + address) == "postgresql+psycopg2" + address
    monkeypatch.setitem(sys.modules, "psycopg", None)
    assert with_driver("postgresql" + address) == "postgresql+psycopg2" + address
    for other in ("sqlite:///x.db", "http://host", "mysql://host/db"):
        assert with_driver(other) == other


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg2"])
def test_without_the_extra_one_sentence_names_the_command(monkeypatch, scheme):
    for driver in ("psycopg", "psycopg2"):
        monkeypatch.setitem(sys.modules, driver, None)
    with pytest.raises(SweepError, match=r"not installed.*\.\[postgres\]"):
        with_driver(f"{scheme}://u:secret@host/db")
