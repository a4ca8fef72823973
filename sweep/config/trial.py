"""One trial as settings: what its id is made of, and what only says where and how fast.

`trials/<id>/config.json` holds a `TrialConfig`: everything that a worker needs.
"""

from typing import Any, Literal

from sweep.config.experiment import EvaluationSettings, OptimizerSettings, ScheduleSettings
from sweep.config.grpo import SAMPLED_MICROBATCHES, GrpoSettings
from sweep.config.models import ModelSettings, QuietSettings, Settings
from sweep.config.traits import WorkloadTraits, workload_traits

FORMAT_VERSION = 1
TELLING_MICROBATCHES = 2  # gradients of the first are held beside the second


class TokenizerSettings(QuietSettings):
    """How text becomes token ids."""

    quiet = ("end", "sha256")

    kind: Literal["bpe", "bytes", "pretrained"]
    vocabulary: int
    end: int = 0  # a pretrained tokenizer's own id of the end of a text
    sha256: str | None = None  # of its tokenizer.json


class Science(QuietSettings):
    """Everything that can change a number; the trial id is the hash of this."""

    quiet = ("target", "grpo", "start")

    format_version: int = FORMAT_VERSION
    stage: Literal["report", "tune"] = "report"
    policy: str  # fixed, sqrt:rate@batch, linear:rate@batch, tuned
    workload: str
    model: ModelSettings
    data: dict[str, Any] | None  # identity: name, and hashes or version, seed and size
    tokenizer: TokenizerSettings | None
    optimizer: OptimizerSettings
    schedule: ScheduleSettings
    evaluation: EvaluationSettings
    precision: Literal["fp32", "bf16", "bf16-pure"]
    tokens: int  # of this trial: steps · batch_size · tokens_per_sequence
    batch_size: int  # sequences per optimizer step
    learning_rate: float  # peak
    seed: int
    grpo: GrpoSettings | None = None  # without its init, which is a path
    start: dict[str, Any] | None = None  # identity of the weights it starts from; None: the seed's
    target: float | None = None  # loss that ends the trial; `tokens` is the most it may take

    @property
    def traits(self) -> WorkloadTraits:
        """Capabilities of the workload."""
        return workload_traits(self.workload, self.model, self.grpo)

    @property
    def has_user_code(self) -> bool:
        """Whether the model or the workload is a user's `module:object`."""
        return ":" in self.workload or self.model.kind == "object"


class Execution(QuietSettings):
    """Where and how fast; decided when plan.json is first written, and kept."""

    quiet = ("generation_batch_size", "shares_prompts", "zero", "strategy", "preset", "reason")

    device: str  # cpu, mps, cuda or cuda:i
    devices: int = 1  # per trial, a process for each
    zero: Literal[0, 1, 2, 3] = 0  # of these split over the devices: optimizer, gradients, weights
    strategy: Literal["torch", "deepspeed"] = "torch"  # whose code splits and exchanges
    preset: Literal["speed", "balanced", "memory"] | None = None  # that chose some of these
    reason: str = ""  # of what a preset chose, or of what nothing bounds
    threads: int
    compile: bool = False
    compile_reason: str = ""
    activation_checkpointing: bool = False
    loss_chunk_rows: int = 0  # tokens whose logits exist at a time; 0: all
    device_memory_bytes: int | None = None  # enforced, where it was asked for
    microbatch_bound: int | None = None  # sequences that fit by forecast; None: not forecast
    evaluation_batch_size: int = 32  # sequences
    generation_batch_size: int | None = None  # completions sampled at once; None: by microbatch
    shares_prompts: bool = False  # a prompt's states are computed once for its completions
    checkpoint_seconds: float = 60.0  # at most this far apart
    keep: Literal["none", "weights", "checkpoints"] = "weights"


class TrialConfig(Settings):
    """Everything a worker needs to run one trial; immutable once written."""

    id: str
    sweep: str  # the sweep's name
    science: Science
    execution: Execution
    tokens_per_sequence: int
    steps: int
    warmup_steps: int
    token_budget: int | None = None  # before it was rounded to whole steps; None: not recorded
    microbatch_size: int  # as planned; state.json holds a smaller one after out of memory
    data_path: str | None = None  # where data is a path; not absolute: from the sweep folder
    init_path: str | None = None  # folder of the trial it starts from, likewise

    @property
    def group_size(self) -> int:
        """Sequences that belong together: those of a prompt for GRPO, else 1."""
        return self.science.grpo.group_size if self.science.grpo else 1

    def sampled_at_once(self, microbatch_size: int) -> int:
        """Return how many completions are sampled at once: fewer where the microbatch shrank."""
        asked = self.execution.generation_batch_size
        if asked is None:
            return SAMPLED_MICROBATCHES * microbatch_size
        return max(1, asked * microbatch_size // self.microbatch_size)

    def attempted(self, microbatch_size: int, evaluation_batch_size: int) -> "TrialConfig":
        """Return the config with the sizes that are left after memory ran out before.

        Where sampling has a size of its own, it shrinks alike.
        """
        execution: dict[str, int] = {"evaluation_batch_size": evaluation_batch_size}
        if self.execution.generation_batch_size is not None:
            execution["generation_batch_size"] = self.sampled_at_once(microbatch_size)
        return self.model_copy(
            update={
                "execution": self.execution.model_copy(update=execution),
                "microbatch_size": microbatch_size,
            }
        )

    def telling_parts(self, microbatch_size: int) -> int:
        """Return how many microbatches of a step take what any larger number of them does."""
        if self.science.grpo is None:
            return TELLING_MICROBATCHES
        at_once = self.sized(microbatch_size, microbatch_size).sampled_at_once(microbatch_size)
        return max(TELLING_MICROBATCHES, -(-at_once // microbatch_size))

    def sized(self, batch_size: int, microbatch_size: int) -> "TrialConfig":
        """Return the config of a step of these sizes on one device, to be forecast or measured.

        No more is evaluated at once than is trained at once.
        """
        at_once = min(microbatch_size, self.execution.evaluation_batch_size)
        execution = {"evaluation_batch_size": at_once, "devices": 1, "zero": 0}
        return self.model_copy(
            update={
                "science": self.science.model_copy(update={"batch_size": batch_size}),
                "execution": self.execution.model_copy(update=execution),
                "microbatch_size": microbatch_size,
            }
        )
