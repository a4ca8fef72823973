"""`sweep forecast` and `sweep probe`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sweep.cli.running import settings_in
from sweep.config.numbers import format_bytes, parse_count
from sweep.orchestration.planning import refuse_file

if TYPE_CHECKING:
    from sweep.memory.points import Measurement


def forecast_command(experiment: str, flags: dict[str, Any]) -> int:
    """Print the memory that each batch size would take."""
    refuse_file(flags["out"])
    from sweep.orchestration.memory import forecast_memory

    return _print(forecast_memory(experiment, **settings_in(flags)), flags)


def probe_command(experiment: str, flags: dict[str, Any]) -> int:
    """Measure, showing each point, and print the largest that fits."""
    refuse_file(flags["out"])
    from sweep.orchestration.memory import probe_memory

    cap, soak, multiple = flags["largest"], flags["soak"], flags["multiple"]
    document = probe_memory(
        experiment,
        cap=None if cap is None else parse_count(cap, "largest"),
        multiple=1 if multiple is None else parse_count(multiple, "multiple"),
        soak_steps=None if soak is None else _read_soak(soak),
        on_point=_show_point,
        **settings_in(flags),
    )
    return _print(document, flags)


def _show_point(point: "Measurement") -> None:
    peak = "" if point.peak_bytes is None else f", peak {format_bytes(point.peak_bytes)}"
    sizes = f"batch size {point.batch_size} in microbatches of {point.microbatch_size}"
    click.echo(f"{sizes}: {point.status}{peak} {point.message}".rstrip(), err=True)


def _read_soak(text: str) -> int:
    return 0 if text.strip() == "0" else parse_count(text, "soak")


def _print(document: dict[str, Any], flags: dict[str, Any]) -> int:
    from sweep.report.memory import markdown_of, write_memory

    out: Path | None = flags["out"]
    if flags["json"]:
        click.echo(json.dumps(document, indent=1))
    else:
        click.echo(markdown_of(document), nl=False)
    if out is not None:
        path = write_memory(document, out)
        if not flags["json"]:
            click.echo(f"\nWritten to {path}.")
    return 0
