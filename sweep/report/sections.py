"""The sections of the report that describe: set-up, results, time and memory, reproduction."""

import json
import shlex
from typing import Any

import pandas as pd

from sweep.analysis.comparison import cell_records, report_trials
from sweep.analysis.frames import Sweep
from sweep.analysis.limits import data_name, mixed_execution, why_no_equal_steps
from sweep.analysis.reward import find_gains
from sweep.config.experiment import ScheduleSettings
from sweep.config.grpo import FINAL_PROMPTS
from sweep.config.numbers import format_count
from sweep.plan.policy import describe_policy
from sweep.report import markdown as md
from sweep.trial.files import sha256_of
from sweep.version import __version__

LISTED_TRIALS = 60  # more of them are in trials.csv only


def setup(sweep: Sweep) -> str:
    """Describe what all trials share, and what the policy varies."""
    rows = [*_model_rows(sweep), *_token_rows(sweep), *_optimizer_rows(sweep)]
    rows += _execution_rows(sweep)
    return md.table(["setting", "value"], rows)


def _model_rows(sweep: Sweep) -> list[list[str]]:
    plan = sweep.plan
    sizes = plan.settings.model.model_dump(exclude={"kind", "name"})
    shown = {name: value for name, value in sizes.items() if value not in (None, {})}
    listed = ", ".join(f"{name} {value}" for name, value in shown.items())
    counted = plan.model.get("parameters")
    size = f"{counted:,} parameters" if counted else "parameters unknown"
    rows = [["model", f"{plan.model['name']}: {size} ({listed})"]]
    rows.append(["workload", plan.settings.workload])
    if plan.data:
        rows.append(["data", f"{data_name(plan.data)}; identity sha256 {sha256_of(plan.data)}"])
        rows.append(["tokenizer", plan.settings.tokenizer])
    if (ratio := sweep.trials["bytes_per_token"].dropna()).size:
        rows.append(["bytes per token (validation)", f"{ratio.iloc[0]:.3f}"])
    return rows


def _token_rows(sweep: Sweep) -> list[list[str]]:
    plan = sweep.plan
    counts = sorted({row.tokens for row in plan.known_trials if row.stage == "report"})
    if len(counts) == 1:
        tokens = f"{counts[0]:,}, common to all batch sizes"
    else:
        tokens = f"{counts[0]:,} to {counts[-1]:,}: NOT common to all batch sizes" if counts else ""
    epochs = sweep.trials.loc[sweep.trials["state"] == "COMPLETE", "epochs"].dropna()
    rows = [
        ["token budget", f"{plan.token_budget:,} ({format_count(plan.token_budget)})"],
        ["training tokens of a trial", tokens or md.MISSING],
        ["tokens per sequence", f"{plan.tokens_per_sequence:,}"],
    ]
    if len(epochs):
        rows.append(["epochs", " to ".join(_range(epochs, "{:.3g}"))])
    return rows


def _range(values: pd.Series, form: str) -> list[str]:
    """Return the least and the largest value, once where they read the same."""
    ends = [form.format(end) for end in (values.min(), values.max())]
    return list(dict.fromkeys(ends))


def _shape(schedule: ScheduleSettings) -> str:
    if schedule.name == "constant":
        width = (
            f", weights averaged with a width of {100 * schedule.average:g} % of the steps so far"
        )
        return "constant" + width * bool(schedule.average)
    return f"{schedule.name} to {100 * schedule.final_fraction:g} % of the peak"


def _optimizer_rows(sweep: Sweep) -> list[list[str]]:
    settings, planned = (
        sweep.plan.settings,
        pd.DataFrame([row.model_dump() for row in sweep.plan.known_trials]),
    )
    optimizer, schedule = settings.optimizer, settings.schedule
    rows = [
        [
            "optimizer",
            f"{optimizer.name}, beta1 {optimizer.beta1:g}, eps {optimizer.eps:g}, "
            f"clip {optimizer.clip or 'never'}",
        ],
    ]
    if len(planned):
        share = 100 * planned["warmup_steps"] / planned["steps"]
        true = " to ".join(_range(share, "{:.2f}"))
        rows.append(
            [
                "schedule",
                f"{_shape(schedule)}; warmup asked {100 * schedule.warmup_fraction:g} %, "
                f"true {true} %",
            ]
        )
        for policy, group in planned.groupby("policy", sort=False):
            held = [
                f"{name} {' to '.join(_range(group[column], '{:.6g}'))}"
                for name, column in (
                    ("rate", "learning_rate"),
                    ("beta2", "beta2"),
                    ("weight decay", "weight_decay"),
                )
            ]
            source = describe_policy(str(policy), optimizer, settings.tuning.dimensions)
            rows.append([f"policy {policy}", f"{source}; {', '.join(held)}"])
    rows.append(["precision", settings.precision])
    return rows


def _execution_rows(sweep: Sweep) -> list[list[str]]:
    execution = sweep.plan.execution
    done = sweep.trials[sweep.trials["state"] == "COMPLETE"]
    devices = ", ".join(sorted(set(done["device"].dropna()))) or execution.device
    compiled = "compiled" if execution.compile else "eager"
    microbatch = " to ".join(_range(sweep.trials["microbatch_size"], "{:g}"))
    mixed = mixed_execution(sweep.trials)
    told = "; ".join(f"{name}: {', '.join(values)}" for name, values in mixed.items())
    return [
        [
            "execution",
            f"{devices} × {execution.devices}, {execution.threads} threads, {compiled}, "
            f"microbatch {microbatch} sequences",
        ],
        ["mixed between trials", told or "no"],
    ]


def results(sweep: Sweep, cells: pd.DataFrame) -> str:
    """Tabulate quality by cell, then every trial."""
    rows = [
        [
            *(str(cell["batch_size"]), cell["label"], md.rate(cell["learning_rate"])),
            status(cell),
            md.count(cell["steps"]),
            md.spread_loss(cell["final_valid_loss"], cell["loss_sd"], cell["complete"]),
            md.loss(cell["final_train_loss"]),
            md.loss(cell["train_valid_gap"]),
            md.loss(cell["best_valid_loss"]),
            md.loss(cell["bits_per_byte"]),
        ]
        for cell in cell_records(cells)
    ]
    headers = ["batch size", "policy", "rate", "status", "steps", "final valid", "final train"]
    headers += ["gap", "best valid (biased)", "bits/byte"]
    return "\n\n".join(
        [
            _tokens_heading(cells),
            md.table(headers, rows),
            _legend(sweep),
            "### At equal steps, and at equal seconds",
            f"NOT APPLICABLE: {why_no_equal_steps(sweep.plan)}. `--target LOSS` trains without a "
            "horizon, evaluates the whole validation split, and gives both.",
            "### Trials",
            trial_table(sweep),
        ]
    )


HELD_OUT = {  # what of GRPO's prompts a seed draws
    "words": "each seed asks for words of its own, of the same stories",
    "chess": "each seed has positions of its own",
    "text": "the prompts are the same at every seed",
}


def rewards(sweep: Sweep) -> list[tuple[str, str]]:
    """Hold GRPO's rewards against those before training; no section for other workloads."""
    grpo = sweep.plan.settings.grpo
    if grpo is None or not (gains := find_gains(sweep)):
        return []
    rows = []
    for gain in gains:
        difference = md.MISSING
        if gain.difference is not None:
            found = gain.difference
            difference = f"{found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
        means = [f"{sum(values.values()) / len(values):.3f}" for values in (gain.start, gain.end)]
        seeds = ", ".join(f"{gain.end[seed] - gain.start[seed]:+.3f}" for seed in gain.start)
        name = [str(gain.batch_size), gain.label, md.rate(gain.learning_rate)]
        rows.append([*name, *means, difference, seeds])
    headers = ["batch size", "policy", "rate", "start", "end", "difference", "of each seed"]
    count = sweep.plan.settings.evaluation.sequences
    text = (
        f"Mean reward of one completion of each of {count} held-out prompts before the first step "
        f"and after the last, with the same random numbers; {HELD_OUT[grpo.task]}. The interval "
        "(95 %, t) is of the differences of the seeds"
        + (", which all start from the same weights." if sweep.plan.start else ".")
    )
    return [("Rewards", f"{md.table(headers, rows)}\n\n{text}")]


def _tokens_heading(cells: pd.DataFrame) -> str:
    counts = sorted({int(count) for count in cells["tokens"]})
    if len(counts) < 2:
        return "### At equal tokens"
    return f"### At nearly equal tokens, {counts[0]:,} to {counts[-1]:,}"


def _legend(sweep: Sweep) -> str:
    units = {
        "pretrain": "Losses are nats per token.",
        "grpo": "A loss is minus the mean reward of one completion of each held-out prompt.",
    }
    unit = units.get(sweep.plan.settings.workload, "Losses are as the workload defines them.")
    is_grpo = sweep.plan.settings.grpo is not None
    trained, whole = "training windows", "the whole validation split"
    if is_grpo:
        trained, whole = "prompts trained on", f"{FINAL_PROMPTS} held-out prompts"
    return (
        f"{unit} *Final valid* is the loss of {whole} after the last step, "
        "mean over the complete seeds (± their standard deviation where there are enough). "
        f"*Final train* is on a fixed set of {trained}, *gap* is final valid minus final "
        "train. *Best valid* is the least of the milestone evaluations, on the milestone set: "
        "biased downwards, and not comparable with *final valid*."
    )


def status(cell: dict[str, Any]) -> str:
    """Count a cell's trials by how they stand."""
    kinds = ("complete", "diverged", "failed", "pruned", "unfinished")
    return ", ".join(f"{cell[kind]} {kind}" for kind in kinds if cell[kind])


def trial_table(sweep: Sweep) -> str:
    """List the reporting trials, and say why some failed."""
    trials = report_trials(sweep.trials)
    trials["order"] = pd.factorize(trials["label"])[0]
    shown = trials.sort_values(["order", "batch_size", "seed"], kind="stable")
    rows = [
        [
            *(f"`{row['id']}`", str(row["batch_size"]), row["label"], str(row["seed"])),
            " ".join(filter(None, (row["state"] or "unknown", row["cause"]))),
            *(str(row["attempts"]), md.count(row["steps"])),
            *(md.loss(row["final_valid_loss"]), md.loss(row["final_train_loss"])),
            md.seconds(row["seconds_total"]),
        ]
        for row in shown.head(LISTED_TRIALS).to_dict("records")
    ]
    headers = ["trial", "batch size", "policy", "seed", "state", "attempts", "steps"]
    text = md.table([*headers, "final valid", "final train", "total time"], rows)
    left = len(trials) - len(rows)
    text += _failures(trials)
    return text + (f"\n\n{left} more trials are in trials.csv." if left else "")


def _failures(trials: pd.DataFrame) -> str:
    """Say why trials failed, and what would help."""
    said = trials[trials["message"].notna()].head(LISTED_TRIALS)
    lines = [
        f"Batch size {row['batch_size']}, seed {row['seed']}, {row['cause']}: {row['message']}"
        for row in said.to_dict("records")
    ]
    return f"\n\n{md.bullets(lines)}" if lines else ""


def time_and_memory(cells: pd.DataFrame) -> str:
    """Tabulate where time and memory went: means over the complete seeds, peak as the maximum."""
    rows = [
        [
            *(str(cell["batch_size"]), cell["label"]),
            md.seconds(cell["seconds_total"]),
            md.seconds(cell["seconds_training"]),
            md.seconds(cell["seconds_compile"]),
            md.seconds(cell["seconds_evaluation"]),
            md.seconds(cell["seconds_checkpoint"]),
            md.seconds(cell["seconds_noise"]),
            md.count(cell["tokens_per_second"]),
            md.percent(cell["mfu"]),
            md.size(cell["peak_memory_bytes"]),
            md.percent(cell["clipped_step_fraction"]),
        ]
        for cell in cell_records(cells)
    ]
    headers = ["batch size", "policy", "total", "training", "compile", "evaluation", "checkpoint"]
    headers.append("noise probes")
    return md.table([*headers, "tokens/s", "MFU", "peak memory", "steps clipped"], rows)


def reproduction(sweep: Sweep) -> str:
    """Give the commands, versions, commit and hashes that repeat this sweep."""
    lines = "\n".join(shlex.join(words) for words in sweep.plan.commands)
    note = "As typed, in this order. All settings, the experiment file's too, are in plan.json."
    if not lines:
        lines, note = "(none)", "No command is recorded; all settings are in plan.json."
    done = sweep.trials[sweep.trials["torch_version"].notna()]
    rows = [["sweep", f"{__version__} (wrote this report)"]]
    for name, column in (("torch", "torch_version"), ("git commit", "git_commit")):
        rows.append([name, ", ".join(sorted(set(done[column].dropna()))) or md.MISSING])
    hashes = sorted(set(done["data_sha256"].dropna()))
    rows.append(["data sha256", ", ".join(hashes) or md.MISSING])
    rows.append(["plan sha256", sha256_of(sweep.plan.model_dump(mode="json"))])
    rows += [[f"data {name}", _scalar(value)] for name, value in (sweep.plan.data or {}).items()]
    return f"```\n{lines}\n```\n\n{note}\n\n{md.table(['what', 'value'], rows)}"


def _scalar(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
