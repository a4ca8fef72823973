"""Settings of one trial: its identity (Science), with its execution and its place in a sweep."""

import math
from typing import Any, Literal

from sweep.config.execution import Execution
from sweep.config.experiment import (
    Experiment,
    NoiseSettings,
    Precision,
    TokenizerKind,
    TrainingSettings,
)
from sweep.config.settings import Count, Settings
from sweep.version import FORMAT_VERSION


class TokenizerSettings(Settings):
    kind: TokenizerKind
    vocabulary: Count
    end: int = 0  # a pretrained tokenizer's end-of-text id
    sha256: str | None = None  # hash of its tokenizer.json


def tokenizer_of(experiment: Experiment) -> TokenizerSettings | None:
    """Return the tokenizer of an experiment; None if it has neither text nor a pretrained one."""
    model = experiment.model
    kind = experiment.tokenizer
    if experiment.data is None and kind != "pretrained":
        return None
    assert model.vocabulary is not None
    return TokenizerSettings(
        kind=kind,
        vocabulary=model.vocabulary,
        end=model.end_token,
        sha256=model.tokenizer_hash,
    )


class Science(TrainingSettings):
    """Everything that can change a number. The trial id is the hash of this."""

    format_version: int = FORMAT_VERSION
    stage: Literal["final", "tune"] = "final"
    policy: str  # as sweep.plan.policies names it, such as fixed or sqrt:0.001@32
    data: dict[str, Any] | None  # identity: name, and hashes or version, seed and size
    tokenizer: TokenizerSettings | None
    precision: Precision
    tokens: int  # steps · batch_size · tokens_per_sequence; with a target, the cap
    batch_size: int  # sequences per optimizer step
    learning_rate: float  # peak
    seed: int
    start: dict[str, Any] | None = None  # identity of the initial weights; None: from the seed
    code: dict[str, Any] | None = None  # identity of user code; None: none is used


class TrialConfig(Settings):
    """config.json: everything a worker needs to run one trial.

    Once written, only `noise_scale` may change, before another attempt.
    """

    id: str
    sweep: str  # name of the sweep
    science: Science
    execution: Execution
    noise_scale: NoiseSettings = NoiseSettings()
    tokens_per_sequence: int
    flops_per_token: float | None = None
    steps: int
    warmup_steps: int
    token_budget: int | None = None  # before rounding to whole steps; None: unknown
    objective_curve: str = "valid/loss"  # metric of the objective, which a command must report
    microbatch_size: int  # as planned; state.json records a smaller one after out-of-memory
    data_path: str | None = None  # if data is a path; relative to the sweep folder
    init_path: str | None = None  # folder of the initial weights; relative to the sweep folder
    code_path: str | None = None  # folder of modules of user code; relative to the sweep folder

    @property
    def may_share_process(self) -> bool:
        """Whether a process may train it after other trials: only if no state of them remains.

        User code may keep some, and a command and several devices have processes of their own.
        """
        science = self.science
        has_own_code = science.code is not None or science.workload.is_program
        return self.execution.devices == 1 and not has_own_code

    @property
    def shape(self) -> str:
        """The settings on which the code of a step may depend: neither the seed nor the rate."""
        science = dict.fromkeys(("stage", "policy", "tokens", "learning_rate", "seed"), True)
        place = dict.fromkeys(("id", "steps", "warmup_steps", "token_budget"), True)
        return self.model_dump_json(exclude={**place, "science": science})

    @property
    def sequences_per_group(self) -> int:
        return self.science.workload.sequences_per_group

    @property
    def sequences_per_device(self) -> int:
        """Sequences of a step on each device."""
        return self.science.batch_size // self.execution.devices

    @property
    def gradient_accumulation_steps(self) -> int:
        return self.sequences_per_device // self.microbatch_size

    def completions_at_once(self, microbatch_size: int) -> int:
        # Four microbatches, because sampling keeps no activations (docs/grpo.md).
        return self.execution.generation_batch_size or 4 * microbatch_size

    def with_microbatch(self, microbatch_size: int, **execution: Any) -> "TrialConfig":
        changed = self.execution.model_copy(update=execution)
        return self.model_copy(update={"execution": changed, "microbatch_size": microbatch_size})

    def for_attempt(self, microbatch_size: int) -> "TrialConfig":
        """Return the config of an attempt after memory ran out: other batches shrink too."""
        evaluated = min(microbatch_size, self.execution.evaluation_batch_size)
        config = self.with_microbatch(microbatch_size, evaluation_batch_size=evaluated)
        at_once = self.execution.generation_batch_size
        if at_once:
            at_once = max(1, at_once * microbatch_size // self.microbatch_size)
            config = config.with_microbatch(microbatch_size, generation_batch_size=at_once)
        return config

    def on_one_device(self, batch_size: int, microbatch_size: int) -> "TrialConfig":
        """Return the config of a step with these sizes on one device, to forecast or measure it."""
        at_once = min(microbatch_size, self.execution.evaluation_batch_size)
        execution = {"evaluation_batch_size": at_once, "devices": 1, "zero": 0, "graph_bound": 0}
        config = self.with_microbatch(microbatch_size, **execution)
        science = self.science.model_copy(update={"batch_size": batch_size})
        return config.model_copy(update={"science": science})

    def parts_to_peak(self, microbatch_size: int) -> int:
        """Return how many microbatches of a step reach the peak memory of any larger number."""
        if self.science.workload.samples:
            return max(2, math.ceil(self.completions_at_once(microbatch_size) / microbatch_size))
        return 2  # the first one's gradients exist while the second one runs
