"""What each thing that saves memory in a GRPO step saves: undone in turn, forecast and measured.

Also what group size, lengths and dtype cost, and what becomes of claims that were published
without a measurement (SEED_SYSTEMS.md, 1).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sweep.config.trial import TrialConfig
from sweep.errors import SweepError
from sweep.memory.forecast import forecast_step
from sweep.memory.points import Forecast, Measurement
from sweep.memory.probe import Probe

BASE, SUPERVISED = "as it is", "supervised step on as many sequences"
HALF_SUPERVISED = "supervised step on half as many sequences"
PLAIN, DELETED = "plain logits, names kept", "plain logits, names deleted"
SAMPLING = "logits of sampling kept"
CHECKPOINTING, ONE_GROUP = "activation checkpointing", "microbatches of one group"
GROUP_ALONE = "one group alone"
HALF_GROUPS, HALF_LENGTH = "half the group size", "prompt and completion half as long"
WITHOUT = "sweep.workloads.grpo_without:"
TOLERANCE = 0.1  # of what is claimed, within which a claim counts as true
BYTES_OF_LOGITS = 4
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@dataclass(frozen=True)
class Variant:
    """A configuration that differs from the base in one thing."""

    name: str
    kind: str  # base, undone, option, size
    config: TrialConfig
    environment: Mapping[str, str] = field(default_factory=dict)
    is_for_cuda: bool = False


@dataclass(frozen=True)
class Row:
    """What became of a variant."""

    name: str
    kind: str
    forecast: Forecast | None
    measured: Measurement | None  # None: not tried on this device
    message: str = ""

    @property
    def status(self) -> str:
        """How the measurement ended."""
        return "NOT_TRIED" if self.measured is None else self.measured.status

    @property
    def peak_bytes(self) -> int | None:
        """Of a training step, as measured."""
        if self.measured is None or self.measured.peak_bytes is None:
            return None
        return max(self.measured.phases.values(), default=self.measured.peak_bytes)

    @property
    def seconds(self) -> float | None:
        """Of a step."""
        return self.measured.seconds_per_step if self.measured else None

    def as_document(self) -> dict[str, Any]:
        """Return it as `probe --ablate` prints it."""
        return {
            "name": self.name,
            "kind": self.kind,
            "status": self.status,
            "peak_bytes": self.peak_bytes,
            "message": self.message or (self.measured.message if self.measured else ""),
            "forecast": self.forecast and asdict(self.forecast),
            "measured": self.measured and self.measured.as_document(),
        }


def variants_of(base: TrialConfig) -> list[Variant]:
    """Return the base, and what differs from it in one thing."""
    return [Variant(BASE, "base", base), *_undone(base), *_options(base), *_sizes(base)]


def _changed(base: TrialConfig, part: str, **update: Any) -> TrialConfig:
    """Change fields of the config's science, its execution or its grpo."""
    if part == "grpo":
        assert base.science.grpo is not None
        return _changed(base, "science", grpo=base.science.grpo.model_copy(update=update))
    return base.model_copy(update={part: getattr(base, part).model_copy(update=update)})


def _undone(base: TrialConfig) -> list[Variant]:
    workloads = {
        PLAIN: "PlainLogits",
        DELETED: "DeletedLogits",
        SAMPLING: "SamplingLogits",
        "old log-probabilities computed": "OldLogProbs",
        "no key-value cache": "WithoutCache",
    }
    if base.science.grpo and base.science.grpo.kl:
        workloads["reference's pass with its graph"] = "ReferenceWithGraph"
    return [
        Variant(name, "undone", _changed(base, "science", workload=WITHOUT + workload))
        for name, workload in workloads.items()
    ]


def _options(base: TrialConfig) -> list[Variant]:
    group, emptied = base.group_size, f"{WITHOUT}EmptiedCache"
    options = {
        CHECKPOINTING: _changed(base, "execution", activation_checkpointing=True),
        "prompts shared": _changed(base, "execution", shares_prompts=True),
        "a group sampled at once": _changed(base, "execution", generation_batch_size=group),
        ONE_GROUP: base.sized(base.science.batch_size, group),
    }
    if base.science.grpo and base.science.grpo.kl:
        options["no reference (kl = 0)"] = _changed(base, "grpo", kl=0.0)
    return [
        *(Variant(name, "option", config) for name, config in options.items()),
        Variant("expandable segments", "option", base, EXPANDABLE, is_for_cuda=True),
        Variant(
            "cache emptied before every step",
            "option",
            _changed(base, "science", workload=emptied),
            is_for_cuda=True,
        ),
    ]


def _sizes(base: TrialConfig) -> list[Variant]:
    batch, grpo = base.science.batch_size, base.science.grpo
    assert grpo is not None
    prompt, new, group = grpo.prompt_tokens, grpo.new_tokens, grpo.group_size
    half, half_prompt = max(1, new // 2), max(1, prompt // 2)
    sizes = {
        GROUP_ALONE: _sized(base, group),
        "twice the group size": _sized(base, batch * 2, group_size=group * 2),
        "half the completion": _sized(base, batch, new_tokens=half),
        "twice the completion": _sized(base, batch, new_tokens=new * 2),
        HALF_LENGTH: _sized(base, batch, prompt_tokens=half_prompt, new_tokens=half),
        SUPERVISED: _supervised(base, batch),
        HALF_SUPERVISED: _supervised(base, batch // 2),
    }
    if group % 2 == 0 and group > 2:  # a group has at least two
        sizes[HALF_GROUPS] = _sized(base, batch // 2, group_size=group // 2)
    for precision in ("fp32", "bf16", "bf16-pure"):
        if precision != base.science.precision:
            sizes[precision] = _changed(base, "science", precision=precision)
    return [Variant(name, "size", config) for name, config in sizes.items()]


def _sized(base: TrialConfig, batch_size: int, **settings: int) -> TrialConfig:
    config = _changed(base, "grpo", **settings)
    grpo, model = config.science.grpo, config.science.model
    assert grpo is not None and model.kind != "quadratic"
    tokens = grpo.tokens_per_sequence
    longer = model.model_copy(update={"context": max(model.context, tokens)})
    config = _changed(config, "science", model=longer)
    config = config.model_copy(update={"tokens_per_sequence": tokens})
    return config.sized(batch_size, batch_size)


def _supervised(base: TrialConfig, count: int) -> TrialConfig:
    model = base.science.model.model_copy(update={"context": base.tokens_per_sequence})
    config = _changed(base, "science", workload="pretrain", grpo=None, model=model)
    return config.sized(count, count)


def ablate(base: TrialConfig, limit_bytes: int, on_row: Callable[[Row], None]) -> list[Row]:
    """Forecast and measure every variant, each measurement in a fresh process.

    Args:
        base: of a GRPO trial, the sizes as they are to be measured.
        limit_bytes: of the device; enforced.
        on_row: called after each.
    """
    rows = []
    for variant in variants_of(base):
        row = _look_at(variant, limit_bytes)
        on_row(row)
        rows.append(row)
    return rows


def _look_at(variant: Variant, limit_bytes: int) -> Row:
    config, forecast, message = variant.config, None, ""
    is_cuda = config.execution.device.startswith("cuda")
    if variant.is_for_cuda and not is_cuda:
        return Row(variant.name, variant.kind, None, None, "only a GPU's allocator can tell")
    if not variant.is_for_cuda:
        try:
            forecast = forecast_step(config)
        except SweepError as error:
            message = str(error)
    probe = Probe(config, limit_bytes, environment=variant.environment)
    sizes = config.science.batch_size, config.microbatch_size
    return Row(variant.name, variant.kind, forecast, probe.measure(*sizes), message)


@dataclass(frozen=True)
class Claim:
    """What was published, and what the rows say of it."""

    text: str
    claimed: tuple[float, float]  # bounds
    measure: Callable[["Rows"], float]
    unit: str  # of what is claimed


class Rows:
    """Rows by name, for claims; what is missing is not a number."""

    def __init__(self, rows: list[Row], logits_bytes: int) -> None:
        self._rows, self.logits_bytes = {row.name: row for row in rows}, logits_bytes

    def peak(self, name: str) -> float:
        """Return a row's peak in bytes."""
        row = self._rows.get(name)
        return math.nan if row is None or row.peak_bytes is None else float(row.peak_bytes)

    def seconds(self, name: str) -> float:
        """Return a row's seconds a step."""
        row = self._rows.get(name)
        return math.nan if row is None or row.seconds is None else row.seconds

    def saved(self, name: str, base: str = BASE) -> float:
        """Return the share of the base's peak that a row does without."""
        return 1 - self.times(name, base)

    def times(self, name: str, base: str) -> float:
        """Return a row's peak over that of the base."""
        return self.peak(name) / self.peak(base)

    def in_logits(self, name: str, base: str = BASE) -> float:
        """Return what a row's peak is above the base's, over the bytes of the logits."""
        return (self.peak(name) - self.peak(base)) / self.logits_bytes

    def accumulated(self) -> float:
        """Return the peak of a step in several microbatches over that of one of them."""
        return self.times(ONE_GROUP, GROUP_ALONE)


CLAIMS = (
    Claim(
        "Three forward passes make a step take three times the memory of a supervised one.",
        (3, 3),
        lambda rows: rows.times(BASE, SUPERVISED),
        "times",
    ),
    Claim(
        "Twice the samples and three passes: six times the memory of a supervised step.",
        (6, 6),
        lambda rows: rows.times(BASE, HALF_SUPERVISED),
        "times",
    ),
    Claim(
        "Three passes hold three times the logits (B, N, V) in float32.",
        (3, 3),
        lambda rows: rows.in_logits(PLAIN),
        "times the logits, with plain logits",
    ),
    Claim(
        "Gradient accumulation multiplies them by the number of microbatches.",
        (2, math.inf),
        Rows.accumulated,
        "times the peak of one microbatch",
    ),
    Claim(
        "Gradient accumulation has no memory cost.",
        (1, 1),
        Rows.accumulated,
        "times the peak of one microbatch",
    ),
    Claim(
        "Not returning logits from sampling saves them.",
        (1, 1),
        lambda rows: rows.in_logits(SAMPLING),
        "times the logits",
    ),
    Claim(
        "`del` behind their last use frees the logits at once.",
        (1, math.inf),
        lambda rows: rows.in_logits(PLAIN, DELETED),
        "times the logits",
    ),
    Claim(
        "Activation checkpointing saves 30 to 50 % of the memory.",
        (0.3, 0.5),
        lambda rows: rows.saved(CHECKPOINTING),
        "of the peak",
    ),
    Claim(
        "Activation checkpointing costs 20 to 30 % of the time.",
        (0.2, 0.3),
        lambda rows: rows.seconds(CHECKPOINTING) / rows.seconds(BASE) - 1,
        "of the time",
    ),
    Claim(
        "bfloat16 halves the memory (mixed precision).",
        (0.5, 0.5),
        lambda rows: rows.saved("bf16", "fp32"),
        "of the peak",
    ),
    Claim(
        "Half the sequence saves half the memory.",
        (0.5, 0.5),
        lambda rows: rows.saved(HALF_LENGTH),
        "of the peak",
    ),
    Claim(
        "Half the group size saves half the memory.",
        (0.5, 0.5),
        lambda rows: rows.saved(HALF_GROUPS),
        "of the peak",
    ),
)


def judge_claims(base: TrialConfig, rows: list[Row]) -> list[dict[str, Any]]:
    """Hold what was published against the rows.

    Returns:
        For each claim `claim`, `claimed` (bounds, an open one None), `measured`, `unit`, and
        `verdict`: true, false, or `not measured`.
    """
    grpo, model = base.science.grpo, base.science.model
    assert grpo is not None and model.kind != "quadratic"
    elements = base.science.batch_size * grpo.new_tokens * model.vocabulary
    as_dtype = replace(rows[0], name=base.science.precision)  # the base is of one of them
    known = Rows([as_dtype, *rows], BYTES_OF_LOGITS * elements)
    return [_judged(claim, claim.measure(known)) for claim in CLAIMS]


def _judged(claim: Claim, measured: float) -> dict[str, Any]:
    low, high = claim.claimed
    verdict = "not measured"
    if math.isfinite(measured):
        is_true = low * (1 - TOLERANCE) <= measured <= high * (1 + TOLERANCE)
        verdict = "true" if is_true else "false"
    return {
        "claim": claim.text,
        "claimed": [low, high if math.isfinite(high) else None],
        "measured": measured if math.isfinite(measured) else None,
        "unit": claim.unit,
        "verdict": verdict,
    }
