"""`sweep forecast` and `sweep probe`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from sweep.cli.running import read_logistics, read_overrides, refuse_file
from sweep.config.numbers import format_bytes, parse_count


def forecast_command(experiment: str, flags: dict[str, Any]) -> int:
    """Print what memory each batch size would take."""
    if flags["out"]:
        refuse_file(flags["out"])
    from sweep.orchestration.memory import forecast_memory

    return _print(forecast_memory(experiment, **_read_settings(experiment, flags)), flags)


def probe_command(experiment: str, flags: dict[str, Any]) -> int:
    """Measure, showing each point, and print what fits."""
    if flags["out"]:
        refuse_file(flags["out"])
    from sweep.memory.points import Measurement
    from sweep.orchestration.memory import probe_memory

    def show(point: Measurement) -> None:
        peak = "" if point.peak_bytes is None else f", peak {format_bytes(point.peak_bytes)}"
        sizes = f"batch size {point.batch_size} in microbatches of {point.microbatch_size}"
        click.echo(f"{sizes}: {point.status}{peak} {point.message}".rstrip(), err=True)

    cap, soak, multiple = flags["largest"], flags["soak"], flags["multiple"]
    document = probe_memory(
        experiment,
        cap=None if cap is None else parse_count(cap, "largest"),
        multiple=1 if multiple is None else parse_count(multiple, "multiple"),
        soak_steps=None if soak is None else _read_soak(soak),
        on_point=show,
        **_read_settings(experiment, flags),
    )
    return _print(document, flags)


def _read_settings(experiment: str, flags: dict[str, Any]) -> dict[str, Any]:
    return asdict(read_logistics(flags)) | read_overrides(experiment, flags)


def _read_soak(text: str) -> int:
    """Read a number of steps; 0: none."""
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
