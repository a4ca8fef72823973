"""Predict and measure memory."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sweep.cli.commands.arguments import common_options, number_option
from sweep.cli.options import SettingsCommand, echo, print_document
from sweep.config.numbers import format_bytes

if TYPE_CHECKING:
    from sweep.memory.search import Measurement

LOG = logging.getLogger(__name__)


@click.command(cls=SettingsCommand)
@common_options("Also write the page to this folder.")
@click.option("--advise", is_flag=True, help="Show what each setting saves, and the least to fit.")
def forecast(experiment: str, out: Path | None, json: bool, advise: bool, **settings: Any) -> None:
    """Predict the memory of each batch size, and the largest microbatch that fits a device."""
    LOG.info(f"Forecasting the memory of {experiment or 'tinystories'}")
    from sweep.orchestration.advice import advise_memory
    from sweep.orchestration.memory import forecast_memory

    predict = advise_memory if advise else forecast_memory
    _print_memory(predict(experiment, **settings), out, json)


@click.command(cls=SettingsCommand)
@common_options("Also write the page to this folder.")
@number_option("--largest", help="Do not try sizes above this one.")
@number_option("--multiple", default=1, help="Only try multiples of N.")
@number_option("--soak", type=click.IntRange(0), help="Steps to find leaks: 20 for GRPO, else 0.")
def probe(experiment: str, out: Path | None, json: bool, **settings: Any) -> None:
    """Measure the largest microbatch that fits, and prove it in fresh processes."""
    LOG.info(f"Measuring the memory of {experiment or 'tinystories'}")
    from sweep.orchestration.memory import probe_memory

    _print_memory(probe_memory(experiment, on_point=_show_point, **settings), out, json)


def _show_point(point: "Measurement") -> None:
    peak = "" if point.peak_bytes is None else f", peak {format_bytes(point.peak_bytes)}"
    sizes = f"batch size {point.batch_size} in microbatches of {point.microbatch_size}"
    echo(f"{sizes}: {point.status}{peak} {point.message}".rstrip(), err=True)


def _print_memory(document: dict[str, Any], out: Path | None, json: bool) -> None:
    from sweep.report.report import markdown_of, write_memory

    if json:
        print_document(document)
    else:
        echo(markdown_of(document), nl=False)
    if out is not None:
        echo(f"\nWritten to {write_memory(document, out)}.", err=json)
