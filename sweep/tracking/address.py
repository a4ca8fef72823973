"""Addresses of servers and databases: their driver, and how they are shown and kept.

A password is never shown nor kept; where an address has none, PostgreSQL's own ways give it:
the variable PGPASSWORD, or the file ~/.pgpass.
"""

import importlib.util
import re

from sweep.errors import SweepError

DRIVERS = ("psycopg", "psycopg2")  # the extra postgres installs the first
ANSWER_SECONDS = "10"  # at most, for a connection; PGCONNECT_TIMEOUT, where it is not set


def without_password(address: str) -> str:
    """Return an address as it may be shown and kept.

    Raises:
        SweepError: if it is not clear where a password ends.
    """
    if address.startswith("sqlite"):
        return address
    if not re.fullmatch(r"[^@]*|[^@/?#]*://[^@/?#]*@[^@]*", address):
        raise SweepError(
            "an address must have its signs @ / ? # percent-encoded in user name and password, "
            "and one has not. Write %40 for @, %2F for /, %3F for ?, %23 for #."
        )
    shown = hide_passwords(address)
    return re.sub(r"(?<=[?&])(ssl)?password=[^&]*&?", "", shown).rstrip("?&")


def hide_passwords(text: str) -> str:
    """Return a text, such as an error, with the addresses in it without their passwords."""
    return re.sub(r"(?<=://)([^:@/?#\s]*):[^@/?#\s]*@", r"\1@", text)


def with_driver(address: str) -> str:
    """Return a PostgreSQL address that names a driver which is installed; others as they are.

    Raises:
        SweepError: if there is none, or not the one that the address names.
    """
    found = re.match(r"postgresql(?:\+(\w+))?(?=://)", address)
    if found is None:
        return address
    for driver in DRIVERS if found[1] is None else (found[1],):
        if importlib.util.find_spec(driver):
            return f"postgresql+{driver}{address[found.end() :]}"
    raise SweepError(
        f"{found[0]}:// needs {found[1] or 'the extra postgres'}, which is not installed. Write "
        "postgresql://, and install the extra with `pip install -e '.[postgres]'` in the project's "
        "folder."
    )


def one_sentence(error: BaseException) -> str:
    """Return the first line of what a database, a driver or a server says, not too long."""
    text = str(getattr(error, "orig", None) or error).strip() or type(error).__name__
    return hide_passwords(text.splitlines()[0][:300])
