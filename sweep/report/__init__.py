"""The report of one sweep: markdown, one HTML file, figures and trials.csv."""

import contextlib
import os
import sys
import tempfile
from pathlib import Path

try:
    import matplotlib
except (OSError, ValueError):  # a matplotlibrc that cannot be read, or an unknown MPLBACKEND
    # Figures do not depend on them. matplotlib prefers the file of the current folder.
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        del sys.modules[name]  # the parts that were imported before the error
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        with tempfile.TemporaryDirectory() as empty, contextlib.chdir(empty):
            Path(empty, "matplotlibrc").touch()
            import matplotlib  # noqa: F401
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
