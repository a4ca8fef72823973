"""Report and answer from a sweep, and audit a table."""

import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sweep.cli.commands.arguments import FiniteRange, json_option, out_folder, sweep_folder
from sweep.cli.options import SettingsCommand, echo, print_document
from sweep.errors import SweepError
from sweep.trial.lease import Lease, is_locked

if TYPE_CHECKING:
    from sweep.analysis.table_answer import Source
    from sweep.trial.folder import SweepFolder

LOG = logging.getLogger(__name__)
RATE = FiniteRange(1000)


@click.command(cls=SettingsCommand)
@click.argument("folder", type=sweep_folder, metavar="[DIR]", required=False)
@click.option("--from-mlflow", metavar="URI", help="Read an MLflow store instead of a folder.")
@click.option("--experiment", metavar="NAME", help="The experiment in that store.")
@click.option("--run", metavar="ID", help="The parent run; by default the newest.")
@click.option("--out", type=out_folder, metavar="DIR", help="Write to this folder instead of DIR.")
def report(
    folder: "SweepFolder | None",
    from_mlflow: str | None,
    experiment: str | None,
    run: str | None,
    out: Path | None,
    tracking_uri: str | None,
) -> None:
    """Write report.md, report.html, trials.csv and figures, from DIR or from MLflow alone."""
    LOG.info("Writing the report")
    from sweep.plan.plan import parse_plan
    from sweep.report.report import write_report
    from sweep.tracking.addresses import check_tracking_uri
    from sweep.tracking.mirror import Mirror
    from sweep.tracking.store import read_record, recorded_uri, restore_sweep

    if folder is None and from_mlflow and experiment:
        with tempfile.TemporaryDirectory() as parent:
            restored = restore_sweep(from_mlflow, experiment, run, Path(parent))
            echo(str(write_report(restored.path, out or experiment)))
        return
    if from_mlflow or experiment or run:
        raise SweepError("report needs either DIR or --from-mlflow URI with --experiment NAME.")

    if folder is None:
        folder = sweep_folder()
    if tracking_uri is not None:
        check_tracking_uri(tracking_uri)
    elif out is None:
        recorded_uri(folder, read_record(folder))
    echo(str(write_report(folder.path, out)))
    if out:
        return

    if not os.access(folder.path, os.W_OK):
        message = "The folder is read-only, so its MLflow store stays as it is."
    elif is_locked(folder.lock_path):
        message = "A running command mirrors this sweep."
    else:
        with Lease(folder.lock_path):  # bare workers and outages leave gaps in the store
            plan = parse_plan(folder.require_plan(), str(folder.plan_path))
            message = Mirror(folder, plan, tracking_uri).deliver()
    if message:
        echo(message, err=True)


@click.command()
@click.argument("table", type=Path, metavar="FILE.csv|.md|DIR")
@click.option("--lr", type=RATE, metavar="RATE", help="The rate, if the table does not give it.")
@json_option
def audit(table: Path, lr: float | None, json: bool) -> None:
    """Check a published table of batch-size results for impossible or confounded entries.

    It needs a column batch_size. Learning rate, steps, tokens, loss, hours and others are checked
    if the headers name them.
    """
    LOG.info("Reading the table")
    from sweep.analysis.audit import audit as audit_tables

    document = audit_tables(table, lr)
    if not json:  # the notes have the first of them
        for part in document["tables"]:
            del part["left_out"]
    print_document(document, json)


def _read_source(name: str) -> "tuple[Source, str | None, str | None]":
    """Return what to answer from, and metric and direction if a study tells them."""
    kind, _, address = name.partition(":")
    if kind == "optuna":
        from sweep.orchestration.studies import read_study

        rows, direction = read_study(address)
        return rows, "value", direction
    if kind == "mlflow":
        from sweep.tracking.runs import read_runs

        return read_runs(address), None, None
    return Path(name), None, None


@click.command()
@click.argument("table", type=str, metavar="FILE|DIR|optuna:…|mlflow:…")
@click.option(
    "--metric",
    metavar="COLUMN",
    help="Result of a trial; by default the validation loss, or the only metric that is named.",
)
@click.option(
    "--direction",
    type=click.Choice(["minimize", "maximize"]),
    help="Of the metric; by default that of its name, such as accuracy, or minimize.",
)
@click.option("--tolerance", type=float, help="Good enough: so far from the best; see `run`.")
@click.option(
    "--for",
    "pursues",
    envvar="SWEEP_ANSWER_FOR",
    type=click.Choice(["auto", "tokens", "time", "steps"]),
    default="auto",
    help="What counts; by default time with a target or a budget of time, else tokens.",
)
@click.option(
    "--answer",
    "question",
    envvar="SWEEP_ANSWER_ANSWER",
    type=click.Choice(["which", "order"]),
    help="What is decided: one batch size to use, or all of them; by default as in the folder.",
)
@click.option(
    "--price", type=float, help="Price of a device for one hour; adds the cost of each training."
)
@click.option(
    "--by",
    metavar="COLUMN",
    multiple=True,
    help="Answer each model, data set or budget of a table by itself; may be repeated.",
)
@json_option
def answer(
    table: str,
    metric: str | None,
    direction: str | None,
    tolerance: float | None,
    pursues: str,
    question: str | None,
    price: float | None,
    by: tuple[str, ...],
    json: bool,
) -> None:
    """Recommend a batch size from a table of trials, a sweep folder, or runs of another program.

    optuna:STORAGE/STUDY and mlflow:URI/EXPERIMENT name such runs. The columns batch_size,
    learning_rate and the metric are needed, and seed if settings repeat; stage, policy and state
    are read too. Headers are read as `sweep audit` reads them.
    """
    LOG.info("Reading the trials")
    from sweep.analysis.table_answer import (
        answer_of,
        answers_by,
        notes_of_parts,
        parse_answer_settings,
    )
    from sweep.cli.show import print_next

    source, of_study, direction_of_study = _read_source(table)
    if metric is None:
        metric = of_study
    if direction is None:
        direction = direction_of_study
    if by:
        settings = parse_answer_settings(tolerance, pursues, price, question)
        answers = answers_by(source, by, metric, direction, settings)
        for note in notes_of_parts(answers):
            echo(note, err=True)
        if json:
            print_document({label: part.document() for label, part in answers.items()})
            return
        for label, part in answers.items():
            echo("\n".join([f"{', '.join(by)} {label}:", *part.sentences, ""]))
        return

    result = answer_of(source, metric, direction, tolerance, pursues, price, question)
    for note in result.notes:
        echo(note, err=True)
    if json:
        print_document(result.document())
    else:
        echo("\n".join(result.sentences))
        print_next(result.answer)
