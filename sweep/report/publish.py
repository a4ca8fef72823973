"""Copy what a report needs from a finished sweep, without the folders of its trials.

    python -m sweep.report.publish results/mine results/published/mine

`make publish` calls it. The copy is kept only if its report is the same as that of the sweep.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from sweep.analysis import tables
from sweep.errors import SweepError
from sweep.report.report import write_report
from sweep.trial.folder import SweepFolder

COMPARED = ("report.md", "answer.json", "trials.csv")


def publish(path: Path, target: Path) -> None:
    """Publish the sweep of a folder as a new folder.

    Raises:
        SweepError: if `target` exists, or its report would differ from that of the sweep.
    """
    if target.exists():
        raise SweepError(f"{target} exists already. Remove it, or choose another name.")
    sweep = tables.load_tables(path)
    folder = SweepFolder(path)
    if folder.is_published:
        raise SweepError(f"{path} must have the folders of its trials. Publish a sweep that ran.")

    with tempfile.TemporaryDirectory() as parent:
        copy = Path(parent, "copy", sweep.name)  # the report has this name
        write_report(path, copy)
        (copy / "report.html").unlink()
        shutil.copy(folder.plan_path, copy)
        for measured_path in (folder.check_path, folder.timing_path):
            if measured_path.exists():
                shutil.copy(measured_path, copy)
        tables.write_curves_csv(sweep, copy / tables.CURVES)

        again = Path(parent, "again")
        write_report(copy, again)
        for name in COMPARED:
            if (copy / name).read_bytes() != (again / name).read_bytes():
                raise SweepError(
                    f"{path} must give the same {name} with its trials and without them, but does "
                    "not. Look for damaged files with `sweep status --verify`."
                )
        shutil.copytree(copy, target)


def main() -> None:
    """Publish the first folder of the command line as the second."""
    path, target = map(Path, sys.argv[1:])
    try:
        publish(path, target)
    except SweepError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
