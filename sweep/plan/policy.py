"""Learning-rate policies: rate, β2 and weight decay by batch size (SCIENCE.md §2)."""

import math
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from sweep.config.experiment import OptimizerSettings
from sweep.errors import SweepError

BETA2_TOKENS = 8192  # β2(B) = β2^(B·T/8192): 5,675,422 tokens of half-life at .999
HALF_LIFE = "constant half-life of β2 in tokens (Marek et al. 2025)"
TIME_SCALE = "which keeps its time scale (Wang & Aitchison 2024)"
RULES = {
    "fixed": "the same rate, β2 and weight decay at every batch size",
    "sqrt": f"rate ∝ √B (Malladi et al. 2022); weight decay ∝ √B, {TIME_SCALE}; {HALF_LIFE}",
    "linear": f"rate ∝ B (Goyal et al. 2017); the same weight decay, {TIME_SCALE}; {HALF_LIFE}",
    "tuned": "tuned at each batch size: {dimensions} (Marek et al. 2025); otherwise weight decay "
    f"∝ √B and a {HALF_LIFE}",
}


@dataclass(frozen=True)
class Policy:
    kind: str  # fixed, sqrt, linear, tuned
    rate: float = 0.0  # peak rate at `base`; if fixed, at every batch size
    base: int = 32  # batch size

    @property
    def name(self) -> str:
        if self.kind in ("fixed", "tuned"):
            return self.kind
        return f"{self.kind}:{self.rate:g}@{self.base}"

    def rate_at(self, batch_size: int) -> float:
        """Return the peak rate; for `tuned`, the centre of the grid."""
        ratio = batch_size / self.base
        if self.kind == "tuned":
            exponent = 1 / 8 if ratio < 1 else 1 / 2
            return float(1e-3 * min(ratio, 256 / 32) ** exponent)
        return self.rate * {"fixed": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[self.kind]

    def optimizer_at(
        self, batch_size: int, tokens_per_sequence: int, optimizer: OptimizerSettings
    ) -> OptimizerSettings:
        """Return the optimizer with this policy's β2 and weight decay."""
        if self.kind == "fixed":
            return optimizer
        factor = 1.0 if self.kind == "linear" else math.sqrt(batch_size / self.base)
        beta2 = optimizer.beta2 ** (batch_size * tokens_per_sequence / BETA2_TOKENS)
        decay = optimizer.weight_decay * factor
        return optimizer.model_copy(update={"beta2": beta2, "weight_decay": decay})


def parse_policy(text: str) -> Policy:
    """Read `3e-4`, `sqrt`, `sqrt:1e-3@32`, `linear:1e-3@32` or `tuned`."""
    text = text.strip()
    if text == "tuned":
        return Policy("tuned")
    pattern = r"(?:(sqrt|linear):)?([^@:]+?)(?:@(\d+))?"
    match = re.fullmatch(pattern, "sqrt:1e-3@32" if text == "sqrt" else text)
    if match and bool(match[1]) == bool(match[3]):
        with suppress(ValueError):
            policy = Policy(match[1] or "fixed", float(match[2]), int(match[3] or 32))
            if 0 < policy.rate <= 1e6 and policy.base > 0:
                return policy
    raise SweepError(
        "lr must be at most 1e6 and positive: RATE, sqrt, sqrt:RATE@BATCH, linear:RATE@BATCH or "
        f"tuned, got {text!r}. Write it such as 3e-4 or sqrt:1e-3@32."
    )


def describe_policy(name: str, dimensions: Collection[str]) -> str:
    """Describe a policy of plan.json with its sources; `dimensions` are those of `tuned`."""
    return RULES[name.partition(":")[0]].format(dimensions=", ".join(dimensions))
