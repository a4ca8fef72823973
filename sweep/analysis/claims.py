"""What the gates carry, in words: sentences are made only where every gate passes."""

from typing import Protocol

from sweep.analysis.comparison import short
from sweep.analysis.gates import PASS, Gate, Judged, pairs_with


class Gated(Protocol):
    """What gates were evaluated for."""

    @property
    def gates(self) -> tuple[Gate, ...]:
        """All eight."""


def open_gates(judged: Gated) -> str:
    """Name the gates that do not pass."""
    numbers = [str(gate.number) for gate in judged.gates if gate.verdict != PASS]
    listed = " and ".join(filter(None, [", ".join(numbers[:-1]), *numbers[-1:]]))
    return f"gate{'s' * (len(numbers) > 1)} {listed}" if numbers else ""


def lacking(judged: Gated, question: str) -> str:
    """Say that a question stays open, and because of which gates; nothing where all pass."""
    gates = open_gates(judged)
    return f"INCONCLUSIVE: {question} cannot be said, because of {gates}." if gates else ""


def headline(judged: Judged) -> str:
    """Say which batch size is best, in words that every gate carries; empty where one does not."""
    if judged.best is None:
        return ""
    comparison, best = judged.comparison, judged.best
    equal, worse = [], []
    for pair in pairs_with(comparison, best):
        (other,) = set(pair.batch_sizes) - {best}
        sign = 1 if pair.batch_sizes[1] == other else -1
        ends = sorted((sign * pair.difference.low, sign * pair.difference.high))
        amount = f"{sign * pair.difference.value:.4f} [{ends[0]:.4f}, {ends[1]:.4f}]"
        if pair.is_equivalent:
            equal.append(other)
        else:
            worse.append(f"{other} by {amount}")
    said = f"At rates tuned for each, batch size {best} has the lowest final loss"
    if equal:
        sizes = [str(size) for size in sorted([best, *equal])]
        said = (
            f"At rates tuned for each, batch sizes {', '.join(sizes[:-1])} and {sizes[-1]} have "
            f"the lowest final loss, no different from {best} within ±{short(comparison.margin)} "
            f"{comparison.unit}"
        )
    said += f"; higher are {', '.join(worse)} {comparison.unit}." if worse else "."
    return f"{said} {judged.scope}"
