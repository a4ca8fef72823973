"""The versions of the package, and of its files."""

__version__ = "0.2.0"
FORMAT_VERSION = 4  # for JSON files and trial ids
READERS = {3: "0.1"}  # versions of the package that read older files; none reads 1 and 2
