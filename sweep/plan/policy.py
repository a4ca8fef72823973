"""Learning-rate policies: the rate, and what follows from it, by batch size (SCIENCE.md §2)."""

import math
import re
from collections.abc import Collection
from dataclasses import dataclass

from sweep.config.experiment import OptimizerSettings
from sweep.config.numbers import format_count
from sweep.errors import SweepError

MOST_RATE = 1e6
BETA2_TOKENS = 8192  # β2(B) = β2^(B·T/8192): 5,675,422 tokens of half-life at .999
RULES = {
    "fixed": "the same rate everywhere, as the earlier sweep had; β2 and weight decay not held",
    "sqrt": "rate ∝ √B (Malladi et al. 2022)",
    "linear": "rate ∝ B (Goyal et al. 2017)",
    "tuned": "rate tuned at each batch size (Marek et al. 2025)",
}
HELD_BETA2 = "β2 half-life held at {tokens} tokens (Marek et al. 2025)"
HELD_DECAY = {
    "sqrt": "weight decay ∝ √B, {start}, holds its time scale (Wang & Aitchison 2024)",
    "linear": "weight decay as it is holds its time scale (Wang & Aitchison 2024)",
    "tuned": "weight decay ∝ √B, {start}, at every rate (as sqrt has it: Wang & Aitchison 2024)",
}


def describe_policy(
    name: str, optimizer: OptimizerSettings, tuned: Collection[str] = ("lr",)
) -> str:
    """Say what a policy does to the rate and what it holds, with the sources.

    Args:
        name: as it stands in plan.json.
        optimizer: the settings that a policy starts from.
        tuned: the dimensions that `tuned` searches: lr, beta2, weight_decay.
    """
    kind = name.partition(":")[0]
    if kind == "fixed":
        return RULES[kind]
    own = set(tuned) if kind == "tuned" else set()
    said = [RULES[kind]]
    if optimizer.name == "adamw":
        memory = math.log(0.5) / math.log(optimizer.beta2) if optimizer.beta2 else 0.0
        held = HELD_BETA2.format(tokens=format_count(round(BETA2_TOKENS * memory)))
        said.append("β2 tuned too" if "beta2" in own else held)
    if optimizer.weight_decay:
        base, start = parse_policy(name).base, optimizer.weight_decay
        held = HELD_DECAY[kind].format(start=f"{start:g} at batch size {base}")
        said.append("weight decay tuned too" if "weight_decay" in own else held)
    return "; ".join(said)


@dataclass(frozen=True)
class Policy:
    """One `--lr`."""

    kind: str  # fixed, sqrt, linear, tuned
    rate: float = 0.0  # peak rate at `base` (of fixed: everywhere)
    base: int = 32  # batch size

    @property
    def name(self) -> str:
        """As it stands in plan.json and trials.csv."""
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
        """Return the optimizer with β2 and weight decay as this policy holds them."""
        if self.kind == "fixed":
            return optimizer
        decay = 1.0 if self.kind == "linear" else math.sqrt(batch_size / self.base)
        beta2 = optimizer.beta2 ** (batch_size * tokens_per_sequence / BETA2_TOKENS)
        return optimizer.model_copy(
            update={"beta2": beta2, "weight_decay": optimizer.weight_decay * decay}
        )


def parse_policy(text: str) -> Policy:
    """Read `3e-4`, `sqrt`, `sqrt:1e-3@32`, `linear:1e-3@32` or `tuned`.

    Raises:
        SweepError: for anything else.
    """
    text = text.strip()
    if text == "tuned":
        return Policy("tuned")
    match = re.fullmatch(r"(?:(sqrt|linear):)?([^@:]+?)(?:@(\d+))?", text)
    if text == "sqrt":
        return Policy("sqrt", 1e-3, 32)
    try:
        if match is None or bool(match[1]) != bool(match[3]):
            raise ValueError
        rate, base = float(match[2]), int(match[3] or 32)
        if not (math.isfinite(rate) and rate > 0 and base > 0):
            raise ValueError
    except ValueError:
        raise SweepError(
            "lr must be a positive number, sqrt, sqrt:RATE@BATCH, linear:RATE@BATCH or tuned, "
            f"got {text!r}. Write it such as 3e-4 or sqrt:1e-3@32."
        ) from None
    if rate > MOST_RATE:
        raise SweepError(f"lr must be at most {MOST_RATE:g}, got {text!r}. Write it such as 3e-4.")
    return Policy(match[1] or "fixed", rate, base)
