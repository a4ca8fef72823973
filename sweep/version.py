"""The versions of the package, and of its files."""

FORMAT_VERSION = 3  # for JSON files and trial ids
__version__ = "0.1.0"
