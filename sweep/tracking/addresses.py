"""Addresses of MLflow's stores and of Optuna's storages: databases and servers.

SQLAlchemy writes and reads the addresses of files, because it encodes the characters of their names
that mean something else in an address. It is imported when a file's address is needed, so that a
mirrored sweep is recognised without it.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from sweep.errors import SweepError, without_secrets
from sweep.usercode.objects import require_extra

if TYPE_CHECKING:
    from sqlalchemy import URL

SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql")
SQLITE = b"SQLite format 3"  # with which such a file begins
SQLITE_DRIVERS = ("sqlite", "sqlite+pysqlite")  # two names of one driver


def sqlite_address(path: Path) -> str:
    """Return the address of an SQLite file; refuse a path that the address does not lead back to.

    SQLAlchemy 2.0 does not encode the names of files, so an address cannot contain their `?`.
    """
    from sqlalchemy import URL

    file = path.absolute()
    address = URL.create("sqlite", database=str(file)).render_as_string()
    if sqlite_path(address) != file:
        problem = f"must have a path that SQLAlchemy can write, got {str(file)!r}"
        raise SweepError(f"a database {problem}. Choose another --out, or install SQLAlchemy 2.1.")
    return address


def sqlite_path(address: str) -> Path | None:
    """Return the file that an SQLite address names; None for another kind of address."""
    if not address.startswith("sqlite"):
        return None
    return Path(_parse_sqlite(address).database or "").absolute()


def split_address(address: str) -> tuple[str, str]:
    """Return the store and the name of `STORE/NAME`; a name may have slashes after a file.

    Either is "" if it is missing.
    """
    if Path(address.removeprefix("sqlite:///")).is_file():
        return address, ""
    parts = address.split("/")
    for count in range(len(parts) - 1, 0, -1):
        store = "/".join(parts[:count])
        if Path(store.removeprefix("sqlite:///")).is_file():
            return store, "/".join(parts[count:])
    store, _, name = address.rpartition("/")
    return store, name


def with_scheme(store: str) -> str:
    """Return the address of an SQLite file that is named without one; others as they are."""
    path = Path(store)
    if "://" in store or not path.is_file():
        return store
    with path.open("rb") as file:
        is_sqlite = file.read(len(SQLITE)) == SQLITE
    return sqlite_address(path) if is_sqlite else store


def require_present(address: str) -> None:
    """Raise SweepError if an address names a file that does not exist, which readers would make."""
    path = sqlite_path(address)
    if path is None and "://" not in address:
        path = Path(address)
    if path is not None and not path.exists():
        raise SweepError(f"{path} must exist. Correct the address.")
    if path is not None and not path.is_file():
        raise SweepError(f"{path} must be a file, got a folder. Correct the address.")


def _parse_sqlite(address: str) -> "URL":
    """Parse an SQLite address; refuse one that does more than to name a file."""
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        url = make_url(address)
    except (ArgumentError, ValueError) as error:
        raise _wrong_address(address) from error
    if "?" in address and url.query.keys() != {"timeout"}:
        problem = f"must have no parameter but timeout, got {address!r}"
        raise SweepError(f"an SQLite address {problem}. Write %3F for a ? in a name.")
    is_file = bool(url.database) and url.database != ":memory:"
    has_host = bool(url.username or url.password or url.host or url.port)
    if url.drivername not in SQLITE_DRIVERS or not is_file or has_host:
        raise _wrong_address(address)
    return url


def _wrong_address(address: str) -> SweepError:
    expected = "a server or a database (http://host:5000 or sqlite:////path/mlflow.db)"
    return SweepError(f"tracking URI must be {expected}, got {without_password(address)!r}.")


def check_tracking_uri(uri: str) -> str:
    """Return the address in its canonical form; refuse paths and unsupported schemes or drivers."""
    scheme, _, rest = uri.partition("://")
    if scheme.partition("+")[0] not in SCHEMES or not rest.strip("/"):
        raise _wrong_address(uri)
    without_password(uri)  # refuses a password without a clear end
    with_driver(uri)
    if scheme.startswith("sqlite"):
        url = _parse_sqlite(uri)
        path = Path(url.database or "").absolute()
        return url.set(drivername="sqlite", database=str(path)).render_as_string()
    return uri.rstrip("/") if scheme.startswith("http") else uri


def with_driver(address: str) -> str:
    """Add the driver psycopg to a PostgreSQL address that names none."""
    if address.startswith("postgresql://"):
        require_extra("psycopg", "postgres", "postgresql://")
        return address.replace("postgresql", "postgresql+psycopg", 1)
    return address


def mlflow_address(address: str) -> str:
    """Return an address as MLflow needs it.

    MLflow creates the folder that it reads, without decoding it, in an address `sqlite:///…`. It
    leaves an address with a driver to SQLAlchemy.
    """
    if address.startswith("sqlite:"):
        return address.replace("sqlite:", "sqlite+pysqlite:", 1)
    return with_driver(address)


def without_password(address: str) -> str:
    """Return an address without its password; refuse one whose password has no clear end."""
    if address.startswith("sqlite"):
        return address
    if not re.fullmatch(r"[^@\s'\"<>]*|[^@/?#]*://[^@/?#\s'\"<>]*@[^@\s'\"<>]*", address):
        encoded = "%40 for @, %2F for /, %3F for ?, %23 for #, %27 for ', %20 for a space"
        raise SweepError(f"a password must be percent-encoded in an address. Write {encoded}.")
    return without_secrets(address)
