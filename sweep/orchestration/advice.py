"""The memory of a step that each setting saves: `sweep forecast --advise`.

Every row is a forecast of its own, of the largest batch size.
"""

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from sweep.errors import SweepError
from sweep.orchestration.memory import forecast_memory, read_memory_request
from sweep.plan.commands import typed_command
from sweep.training.device import available_cores

LOG = logging.getLogger(__name__)
SAME = "the same losses, up to rounding"
OTHER = "other losses, another trial"
SECOND_PASS = "a second forward pass"
SMALL_CHUNK = 256  # tokens whose logits exist at a time
ADAPTER_RANK = 16
MOST_AT_ONCE = 8  # forecasts, which need a core and half a gigabyte each
# The three settings of the guide to per-device batch sizes, by its sizes of chunks and generation.
NAMED = {
    "speed": {"loss_chunk_rows": 2048, "generation_batch_size": 8},
    "balanced": {"loss_chunk_rows": 1024, "generation_batch_size": 4},
    "memory": {
        "loss_chunk_rows": 512,
        "generation_batch_size": 2,
        "activation_checkpointing": True,
    },
}


class Knob(NamedTuple):
    """Settings that may save memory."""

    settings: dict[str, Any]  # by the names of their flags, or of their keys
    costs: tuple[str, ...] = ()  # in time
    keeps_losses: bool = True

    @property
    def effect(self) -> str:
        return "; ".join([SAME if self.keeps_losses else OTHER, *self.costs])

    def with_settings_of(self, other: "Knob") -> "Knob":
        costs = (*self.costs, *other.costs)
        keeps_losses = self.keeps_losses and other.keeps_losses
        return Knob({**self.settings, **other.settings}, costs, keeps_losses)


def advise_memory(experiment: str | None = None, **settings: Any) -> dict[str, Any]:
    """Return a forecast of memory with `advice`: what each setting buys, and the least that fits.

    The arguments are those of `forecast_memory`. `advice` has the keys `batch_size`, `rows`,
    `least`, and `refused`: why settings are not possible, by their flags. A row has `name`,
    `settings`, `flags`, `effect`, `microbatch_size`, `gradient_accumulation_steps`, `peak_bytes`,
    `saved_bytes`, `fits` and `largest_microbatch_size`; the last two are null without a limit of
    memory, as is `least`.

    Raises:
        SweepError: as `forecast_memory`.
    """
    document = forecast_memory(experiment, **settings)
    advisor = _Advisor(experiment, settings, document)
    document["advice"] = {
        "batch_size": advisor.batch_size,
        "rows": [*advisor.rows()],
        "least": advisor.least(),
        "refused": advisor.refused,
    }
    return document


class _Advisor:
    """Forecasts of one batch size with other settings than a command's."""

    def __init__(
        self, experiment: str | None, settings: Mapping[str, Any], document: Mapping[str, Any]
    ) -> None:
        self.experiment = experiment
        self.batch_size = max(point["batch_size"] for point in document["points"])
        self.settings = {**settings, "batches": (self.batch_size,)}
        self.has_limit = document["usable_bytes"] is not None
        self.request, _ = read_memory_request(experiment, self.settings)
        if self.request.execution.accumulation:
            raise SweepError(
                "accumulation does not apply to --advise, which changes the microbatch. Give "
                "--microbatch."
            )
        self.devices = document["devices"]
        whole = {"microbatch": self.batch_size // self.devices}
        if self.request.chooses_microbatch:
            whole = {}
        self.whole = whole  # one microbatch, unless the user chose it
        self.refused: dict[str, str] = {}  # why settings are not possible, by their words
        self._known: dict[str, dict[str, Any]] = {}  # forecasts by the words of their settings
        self.base = self._forecast(whole)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the present settings, each of the others alone, and the three named settings."""
        name = "as given" if self.request.chooses_microbatch else "as one microbatch"
        yield self._row(name, self.whole, "", self.base)
        tried = [("", knob) for knob in self._knobs()]
        for name, settings in NAMED.items():
            used = {key: value for key, value in settings.items() if self._applies(key)}
            costs = (SECOND_PASS,) if "activation_checkpointing" in used else ()
            tried.append((name, Knob(used, costs)))
        tried = [(name, knob._replace(settings=self.whole | knob.settings)) for name, knob in tried]
        with ThreadPoolExecutor(min(available_cores(), MOST_AT_ONCE)) as threads:
            rows = threads.map(lambda arguments: self._try(*arguments), tried)
            yield from (row for row in rows if row is not None)

    def least(self) -> dict[str, Any] | None:
        """Return the least change with which a step fits; None if it is not known, or none does."""
        if not self.has_limit:
            return None
        if self.base["points"][0]["fits"]:
            return self._row("", {}, "no change is needed", self.base)
        every = [*self._knobs()]
        candidates = [Knob({})]  # a microbatch that fits, which the plan chooses
        if self.request.chooses_microbatch:
            candidates = [knob for knob in every if "microbatch" in knob.settings]
        smallest = candidates[-1] if candidates else Knob({})
        neutral = [knob for knob in every if knob.keeps_losses]
        neutral = [knob for knob in neutral if "microbatch" not in knob.settings]
        candidates += neutral
        together = smallest
        candidates += [smallest.with_settings_of(knob) for knob in neutral]
        for knob in neutral:
            together = together.with_settings_of(knob)
            candidates.append(together)
        others = [knob for knob in every if not knob.keeps_losses]
        candidates += [*others, *(smallest.with_settings_of(knob) for knob in others)]
        for knob in candidates:
            row = self._try("", knob)
            if row is not None and row["fits"]:
                return row
        return None

    def _knobs(self) -> Iterator[Knob]:
        """Yield the settings that this experiment may have, those that change no loss first."""
        execution = self.request.execution
        experiment = self.request.experiment
        group = experiment.workload.sequences_per_group
        per_device = self.batch_size // self.devices
        microbatch = execution.microbatch or per_device
        for size in dict.fromkeys((microbatch // 2 // group * group, group)):
            if 0 < size < microbatch and per_device % size == 0:
                yield Knob({"microbatch": size})
        if execution.loss_chunk_rows != SMALL_CHUNK:
            yield Knob({"loss_chunk_rows": SMALL_CHUNK})
        if experiment.workload.samples and execution.generation_batch_size != group:
            yield Knob({"generation_batch_size": group}, ("slower sampling",))
        if not execution.activation_checkpointing:
            yield Knob({"activation_checkpointing": True}, (SECOND_PASS,))
        if self.devices > 1:
            for stage in range(execution.zero + 1, 4):
                yield Knob({"zero": stage}, ("more communication",))
        if experiment.precision != "bf16-pure":
            yield Knob({"precision": "bf16-pure"}, keeps_losses=False)
        if experiment.init is not None and experiment.model.adapter_rank is None:
            yield Knob({"lora": ADAPTER_RANK}, keeps_losses=False)
        if experiment.workload.samples:
            if group % 2 == 0 and group > 2:
                yield Knob({"group_size": group // 2}, keeps_losses=False)
            workload = experiment.workload.model_dump()
            if workload.get("kl"):
                yield Knob({"workload": {**workload, "kl": 0.0}}, keeps_losses=False)

    def _applies(self, name: str) -> bool:
        return name != "generation_batch_size" or self.request.experiment.workload.samples

    def _forecast(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        words = _words(changes)
        if words not in self._known:
            LOG.info(f"Forecasting with {words or 'the settings as given'}")
            settings = {**self.settings, **changes}
            self._known[words] = forecast_memory(self.experiment, **settings)
        return self._known[words]

    def _try(self, name: str, knob: Knob) -> dict[str, Any] | None:
        """Return the row of some settings; None if the experiment cannot have them."""
        try:
            document = self._forecast(knob.settings)
        except SweepError as error:
            self.refused[_words(knob.settings)] = str(error)
            return None
        return self._row(name, knob.settings, knob.effect, document)

    def _row(
        self, name: str, settings: Mapping[str, Any], effect: str, document: Mapping[str, Any]
    ) -> dict[str, Any]:
        (point,) = document["points"]
        (base,) = self.base["points"]
        return {
            "name": name,
            "settings": {key: value for key, value in settings.items() if key != "workload"},
            "flags": _words(settings),
            "effect": effect,
            "microbatch_size": point["microbatch_size"],
            "gradient_accumulation_steps": point["gradient_accumulation_steps"],
            "peak_bytes": point["peak_bytes"],
            "saved_bytes": base["peak_bytes"] - point["peak_bytes"],
            "fits": point["fits"],
            "largest_microbatch_size": document["largest_microbatch_size"],
        }


def _words(settings: Mapping[str, Any]) -> str:
    """Write settings as flags; one that has none as the key of its table."""
    flags = {name: value for name, value in settings.items() if name != "workload"}
    words = [*typed_command(None, flags)[2:]]
    if "workload" in settings:
        words.append("[workload] kl = 0.0")
    return " ".join(words)
