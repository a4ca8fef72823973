"""Is the rate of pruned tuning with one seed as good as the best of the full grid, at which cost?

    python tests/benchmarks/tuning.py results/published/tuning-cost

Tunes `quick` at three batch sizes. Then trains the rate used and every rate that was tried with the
full budget on every final seed, and compares them. Takes some minutes on a CPU.
"""

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pandas as pd

from sweep.analysis.results import load_sweep
from sweep.config.execution import Execution
from sweep.config.load import load_experiment
from sweep.orchestration.planning import Planned, make_plan
from sweep.orchestration.request import Request
from sweep.orchestration.runner import run_plan
from sweep.report.report import write_report
from sweep.trial.folder import SweepFolder

FIELDS = {"batches": [8, 16, 32], "budget": 98_304, "lr": "tuned", "seeds": 3}


def tune(folder: SweepFolder) -> None:
    """Run the tuned sweep, or its remaining trials."""
    planned = make_plan(Request(load_experiment("quick", FIELDS), Execution(device="cpu"), folder))
    run_plan(planned, folder)


def full_grid(tuned: SweepFolder, folder: SweepFolder) -> None:
    """Train every rate of the sweep on each final seed, with the full budget."""
    plan = load_sweep(tuned.path).plan
    seeds = sorted({row.seed for row in plan.trials if row.stage == "final"})
    rows = {}
    for row in plan.trials:
        for seed in seeds:
            report = row.model_copy(update={"stage": "final", "seed": seed})
            trial = plan.with_rate(report, float(row.learning_rate or 0))
            rows[str(trial.id)] = trial
    grid = plan.model_copy(update={"trials": tuple(rows.values())})
    run_plan(Planned(grid, tuple(rows), grid.settings), folder)


def compare(tuned: Path, grid: Path) -> dict[str, Any]:
    """Return the rates of both, the difference of their losses, and the trained tokens."""
    searched, full = load_sweep(tuned), load_sweep(grid).trials
    by_seed = full.pivot_table("final_valid_loss", "seed", ["batch_size", "learning_rate"])
    tokens, rows = 0, []
    for batch, trials in searched.trials.groupby("batch_size"):
        stages = trials.groupby("stage")["learning_rate"].unique()
        used, tried = float(stages["final"][0]), stages["tune"]
        losses = by_seed[batch]
        best = float(losses[tried].mean().idxmin())
        paired = losses[used] - losses[best]
        is_tried = (full["batch_size"] == batch) & full["learning_rate"].isin(tried)
        tokens += int(full.loc[is_tried, "tokens"].sum())
        rows.append(
            {
                "batch_size": int(str(batch)),
                "rate_used": used,
                "grid_rate": best,
                "loss_above": float(paired.mean()),
                "standard_error": float(paired.sem()),
                "loss_of_rate_used": float(losses[used].mean()),
                "loss_of_grid_rate": float(losses[best].mean()),
                "rates": len(tried),
            }
        )
    last = searched.curves.groupby("id", observed=True)["tokens"].max()
    return {"rates": rows, "tokens_tuned": int(last.sum()), "tokens_grid": tokens}


def page(document: dict[str, Any]) -> str:
    """Write the comparison as a page."""
    table = pd.DataFrame(document["rates"])
    share = document["tokens_tuned"] / document["tokens_grid"]
    lines = [
        "| " + " | ".join(table.columns) + " |",
        "| " + " | ".join(["--:"] * len(table.columns)) + " |",
    ]
    for row in table.to_dict("records"):
        cells = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()]
        lines.append("| " + " | ".join(cells) + " |")
    paragraphs = [
        f"`quick`, {FIELDS['budget']:,} tokens ([report](tuned/report.md)). Tuned: one seed, "
        "pruned at a quarter and half of the tokens, then three fresh seeds at the lowest point of "
        "the fitted curve. Grid: every learning rate that was tried, with the full budget, on each "
        "of the three seeds; its rate has the lowest mean loss.",
        "`loss_above` is the loss of the rate used minus that of the grid's rate in nats, paired "
        "by seed, with its standard error; it is negative if the fitted rate is better. Trained "
        f"tokens, reports included: {document['tokens_tuned']:,} of the grid's "
        f"{document['tokens_grid']:,} ({share:.0%}).",
    ]
    before, after = (textwrap.fill(paragraph, 100) for paragraph in paragraphs)
    command = "    python tests/benchmarks/tuning.py results/published/tuning-cost"
    parts = ("# Tuning against the full grid", command, before, "\n".join(lines), after)
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Run both, compare, and write README.md."""
    out = Path(sys.argv[1])
    tuned, grid = SweepFolder(out / "tuned"), SweepFolder(out / "grid")
    tune(tuned)
    write_report(tuned.path)
    full_grid(tuned, grid)
    document = compare(tuned.path, grid.path)
    (out / "comparison.json").write_text(json.dumps(document, indent=1) + "\n")
    (out / "README.md").write_text(page(document))
    print(page(document))


if __name__ == "__main__":
    main()
