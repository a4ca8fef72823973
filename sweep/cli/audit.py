"""The command `sweep audit`."""

import json
from pathlib import Path
from typing import Any

import click


def audit_command(path: Path, as_json: bool) -> int:
    """Print the failed checks of a table."""
    from sweep.analysis.audit import audit

    document = audit(path)
    click.echo(json.dumps(document, indent=1) if as_json else _as_text(document))
    return 0


def _as_text(document: dict[str, Any]) -> str:
    count = len(document["findings"])
    lines = [f"{count or 'No'} finding{'' if count == 1 else 's'}."]
    for finding in document["findings"]:
        batches = ", ".join(str(batch) for batch in finding["rows"])
        lines += ["", f"{finding['code']}  (batch size {batches})"]
        lines += [f"  {finding['message']}", f"  Remedy: {finding['remedy']}"]
    if document["not_checked"]:
        lines += ["", "Not checked because a column is missing:"]
    for check in document["not_checked"]:
        lines.append(f"  {check['code']}: {', '.join(check['missing_columns'])}")
    return "\n".join([*lines, *([""] if document["notes"] else []), *document["notes"]])
