"""What each thing that saves memory in a GRPO step saves: undone in turn, forecast and measured.

Also what group size, lengths and dtype cost.
"""

import contextlib
import statistics
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
GROUP_ALONE, TWICE_GROUPS = "one group alone", "twice the group size"
HALF_GROUPS, HALF_LENGTH = "half the group size", "prompt and completion half as long"
HALF_PROMPTS, HALF_MICROBATCH = "half the prompts", "microbatches of half the batch"
TWICE_ACCUMULATED = "twice the prompts in two microbatches"
HALF_LAYERS, HALF_WIDTH, HALF_HEADS = "half the layers", "half the width", "half the heads"
PLAIN_ATTENTION, TWICE_COMPLETION = "attention without its fused kernel", "twice the completion"
PLAIN_LONG = f"{TWICE_COMPLETION}, {PLAIN_ATTENTION}"
KEPT, NO_COLLECTOR = "tensors of a step kept", "no garbage collector"
WITHOUT = "sweep.workloads.grpo_without:"
TURNS = 3  # of a variant and the base, one after the other, that are timed
TIMED = ("undone", "option")  # kinds of the base's own batch
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@dataclass(frozen=True)
class Variant:
    """A configuration that differs from the base in one thing."""

    name: str
    kind: str  # base, undone, option, size
    config: TrialConfig
    environment: Mapping[str, str] = field(default_factory=dict)
    is_for_cuda: bool = False

    def is_same(self, other: "Variant") -> bool:
        """Tell whether another one takes the same steps."""
        return self.config == other.config and self.environment == other.environment


@dataclass(frozen=True)
class Row:
    """What became of a variant."""

    name: str
    kind: str
    forecast: Forecast | None
    measured: Measurement | None  # None: not tried on this device
    message: str = ""
    time_ratios: tuple[float, ...] = ()  # seconds a step over the base's, of each turn

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
    def time_ratio(self) -> float | None:
        """Seconds of a step over the base's; None where they did not take turns."""
        return statistics.median(self.time_ratios) if self.time_ratios else None

    def as_document(self) -> dict[str, Any]:
        """Return it as `probe --ablate` prints it."""
        return {
            "name": self.name,
            "kind": self.kind,
            "status": self.status,
            "peak_bytes": self.peak_bytes,
            "time_ratio": self.time_ratio,
            "time_ratios": list(self.time_ratios),
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
        PLAIN_ATTENTION: "PlainAttention",
        KEPT: "KeptTensors",
        NO_COLLECTOR: "WithoutCollector",
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
    batch = base.science.batch_size
    options = {
        CHECKPOINTING: _changed(base, "execution", activation_checkpointing=True),
        "prompts shared": _changed(base, "execution", shares_prompts=True),
        "a group sampled at once": _changed(base, "execution", generation_batch_size=group),
        ONE_GROUP: base.model_copy(update={"microbatch_size": group}),
    }
    if batch % (2 * group) == 0:
        options[HALF_MICROBATCH] = base.model_copy(update={"microbatch_size": batch // 2})
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
        TWICE_ACCUMULATED: base.sized(2 * batch, batch),
        TWICE_GROUPS: _sized(base, batch * 2, group_size=group * 2),
        "half the completion": _sized(base, batch, new_tokens=half),
        TWICE_COMPLETION: _sized(base, batch, new_tokens=new * 2),
        HALF_LENGTH: _sized(base, batch, prompt_tokens=half_prompt, new_tokens=half),
        SUPERVISED: _supervised(base, batch),
        HALF_SUPERVISED: _supervised(base, batch // 2),
    }
    if batch % (2 * group) == 0:
        sizes[HALF_PROMPTS] = _sized(base, batch // 2)
    if group % 2 == 0 and group > 2:  # a group has at least two
        sizes[HALF_GROUPS] = _sized(base, batch // 2, group_size=group // 2)
    for precision in ("fp32", "bf16", "bf16-pure"):
        if precision != base.science.precision:
            sizes[precision] = _changed(base, "science", precision=precision)
    plain = f"{WITHOUT}PlainAttention"
    sizes[PLAIN_LONG] = _changed(sizes[TWICE_COMPLETION], "science", workload=plain)
    sizes |= _smaller(base)
    return [Variant(name, "size", config) for name, config in sizes.items()]


def _smaller(base: TrialConfig) -> dict[str, TrialConfig]:
    """Return smaller models, with weights of the seed, where the settings name such sizes."""
    model, found = base.science.model, {}
    halved = {HALF_LAYERS: ("layers",), HALF_WIDTH: ("d_model", "d_ff"), HALF_HEADS: ("heads",)}
    for name, fields in halved.items():
        update = {field: getattr(model, field) // 2 for field in fields if hasattr(model, field)}
        with contextlib.suppress(ValueError):  # heads that do not split the width
            smaller = type(model).model_validate({**model.model_dump(), **update})
            if update:
                found[name] = _changed(base, "science", model=smaller, start=None)
    return {name: config.model_copy(update={"init_path": None}) for name, config in found.items()}


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

    What takes the base's own batch is timed in turns with it, since machines are shared.

    Args:
        base: of a GRPO trial, the sizes as they are to be measured.
        limit_bytes: of the device; enforced.
        on_row: called after each.
    """
    rows: list[Row] = []
    variants = variants_of(base)
    for variant in variants:
        row = _equal_row(variant, variants, rows) or _look_at(variant, limit_bytes)
        if variant.kind in TIMED and row.status == "OK" and not row.time_ratios:
            row = replace(row, time_ratios=_take_turns(row, variant, base, limit_bytes))
        on_row(row)
        rows.append(row)
    return rows


def _equal_row(variant: Variant, variants: list[Variant], rows: list[Row]) -> Row | None:
    """Return the row of the same configuration under another name: half of two is one."""
    for other, row in zip(variants, rows, strict=False):
        if other.kind == variant.kind and other.is_same(variant):
            return replace(row, name=variant.name)
    return None


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
    point = _measure(config, limit_bytes, variant.environment)
    return Row(variant.name, variant.kind, forecast, point, message)


def _measure(
    config: TrialConfig, limit_bytes: int, environment: Mapping[str, str] | None = None
) -> Measurement:
    probe = Probe(config, limit_bytes, environment=environment)
    return probe.measure(config.science.batch_size, config.microbatch_size)


def _take_turns(
    row: Row, variant: Variant, base: TrialConfig, limit_bytes: int
) -> tuple[float, ...]:
    """Return a variant's seconds over the base's in each turn; who comes first alternates."""
    pairs = [(row.measured, _measure(base, limit_bytes))]
    for turn in range(1, TURNS):
        before = _measure(base, limit_bytes) if turn % 2 else None
        point = _measure(variant.config, limit_bytes, variant.environment)
        pairs.append((point, before or _measure(base, limit_bytes)))
    return tuple(
        point.seconds_per_step / other.seconds_per_step
        for point, other in pairs
        if point and point.seconds_per_step and other.seconds_per_step
    )
