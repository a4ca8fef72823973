"""Claims about a GRPO step, published without a measurement (SEED_SYSTEMS.md, 1)."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sweep.config.trial import TrialConfig
from sweep.memory.ablation import (
    BASE,
    CHECKPOINTING,
    DELETED,
    HALF_GROUPS,
    HALF_HEADS,
    HALF_LAYERS,
    HALF_LENGTH,
    HALF_MICROBATCH,
    HALF_SUPERVISED,
    HALF_WIDTH,
    KEPT,
    NO_COLLECTOR,
    PLAIN,
    PLAIN_LONG,
    SAMPLING,
    SUPERVISED,
    TWICE_ACCUMULATED,
    TWICE_COMPLETION,
    TWICE_GROUPS,
    Row,
)
from sweep.memory.rows import BYTES_OF_LOGITS, Rows

TOLERANCE = 0.1  # of what is claimed, within which a claim counts as true
SOME = 0.05  # of the peak: what counts where no number was claimed
UTILISATION = 0.7  # of the device, by the guide's supervised step
NO_HALF = "asks for an even number of groups"
NO_SIZES = "the model's settings do not name it"
NO_KERNEL = "attention has no fused kernel here, or flash-attn is there"


@dataclass(frozen=True)
class Claim:
    """What was published, and what the rows say of it."""

    text: str
    claimed: tuple[float, float] | None  # bounds; None: nothing that a step shows
    measure: Callable[[Rows], float | tuple[float, ...]]  # several: each turn's
    unit: str  # of what is claimed
    lacking: str = "its rows were not measured"  # why, where nothing is found


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
        "So a batch has a sixth as many prompts (of 8) as a supervised one has sequences.",
        (6, 6),
        Rows.sequences_for_a_prompt,
        "sequences for a prompt in the same memory",
        "asks for two or more groups of 8",
    ),
    Claim(
        "All the same, twice the samples fit where the supervised step took 70 % of the device.",
        (0, 1 / UTILISATION),
        lambda rows: rows.times(BASE, HALF_SUPERVISED),
        "times the supervised peak",
    ),
    Claim(
        "The group size multiplies the memory.",
        (2, 2),
        lambda rows: rows.times(TWICE_GROUPS, BASE),
        "times, at twice the group size",
    ),
    Claim(
        "Large logits are a reason for much memory.",
        (SOME, math.inf),
        lambda rows: rows.saved(BASE, PLAIN),
        "of the peak with plain logits",
    ),
    Claim(
        "Completions, rewards, advantages, log-probabilities and divergence are another.",
        (SOME, math.inf),
        lambda rows: (rows.rest(KEPT) - rows.rest(BASE)) / rows.peak(BASE),
        "of the peak",
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
        "A smaller batch with accumulation in its stead takes less memory.",
        (SOME, math.inf),
        lambda rows: rows.saved(HALF_MICROBATCH),
        "of the peak, at half the microbatch",
        NO_HALF,
    ),
    Claim(
        "The most accumulation is the most efficient with memory.",
        (SOME, math.inf),
        lambda rows: rows.saved(TWICE_ACCUMULATED),
        "of the peak, saved by twice the accumulation",
    ),
    Claim(
        "Not returning logits from sampling saves them.",
        (1, 1),
        lambda rows: rows.in_sampled_logits(SAMPLING),
        "times the logits",
    ),
    Claim(
        "`del` behind their last use frees the logits at once.",
        (1, math.inf),
        lambda rows: rows.in_logits(PLAIN, DELETED),
        "times the logits",
    ),
    Claim(
        "Compute and discard leaves no logits in memory.",
        (0, 0),
        lambda rows: rows.in_logits(DELETED),
        "times the logits, left",
    ),
    Claim(
        "`del` of a step's other tensors behind its backward pass saves memory.",
        (SOME, math.inf),
        lambda rows: rows.times(KEPT, BASE) - 1,
        "of the peak",
    ),
    Claim(
        "Without `del` they wait for Python's garbage collector.",
        (SOME, math.inf),
        lambda rows: rows.times(NO_COLLECTOR, BASE) - 1,
        "of the peak, more without a collector",
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
        lambda rows: rows.more_time(CHECKPOINTING),
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
    Claim(
        "Reducing the batch size is the most effective.",
        (1, math.inf),
        Rows.most_effective,
        "times what half of anything else saves",
        NO_HALF,
    ),
    Claim(
        "Fewer layers take less memory.",
        (SOME, math.inf),
        lambda rows: rows.saved(HALF_LAYERS),
        "of the peak, at half",
        NO_SIZES,
    ),
    Claim(
        "Narrower layers take less memory.",
        (SOME, math.inf),
        lambda rows: rows.saved(HALF_WIDTH),
        "of the peak, at half",
        NO_SIZES,
    ),
    Claim(
        "Fewer heads take less memory.",
        (SOME, math.inf),
        lambda rows: rows.saved(HALF_HEADS),
        "of the peak, at half",
        NO_SIZES,
    ),
    Claim(
        "Flash attention takes less memory.",
        (SOME, math.inf),
        Rows.fused,
        "of the peak with plain attention",
        NO_KERNEL,
    ),
    Claim(
        "Flash attention takes less memory, at longer completions.",
        (SOME, math.inf),
        lambda rows: rows.saved(TWICE_COMPLETION, PLAIN_LONG),
        "of the peak with plain attention, at twice the completion",
    ),
    Claim(
        "It needs the package flash-attn, and a GPU for it.",
        (1, 1),
        Rows.packages_for_it,
        "packages beside torch, whose fused kernel ran",
        NO_KERNEL,
    ),
    Claim(
        "Shorter sequences change the task; smaller groups, and any below 4, unsettle advantages.",
        None,
        lambda rows: math.nan,
        "",
        "of learning, not of memory: `sweep run` with other lengths or group sizes tells",
    ),
)


def judge_claims(base: TrialConfig, rows: list[Row]) -> list[dict[str, Any]]:
    """Hold what was published against the rows.

    Returns:
        For each claim `claim`, `claimed` (bounds, an open one None; or None), `measured`, `unit`,
        `verdict`: true, false, `not measured`, or `not resolved` where turns disagree; and
        `lacking`: why nothing was measured, or None.
    """
    grpo, model = base.science.grpo, base.science.model
    assert grpo is not None and model.kind != "quadratic"
    elements = base.science.batch_size * grpo.new_tokens * model.vocabulary
    as_dtype = replace(rows[0], name=base.science.precision)  # the base is of one of them
    sizes = base.science.batch_size, base.group_size
    sampled = BYTES_OF_LOGITS if base.science.precision == "fp32" else BYTES_OF_LOGITS // 2
    known = Rows([as_dtype, *rows], BYTES_OF_LOGITS * elements, *sizes, sampled)
    return [_judged(claim, claim.measure(known)) for claim in CLAIMS]


def _judged(claim: Claim, found: float | tuple[float, ...]) -> dict[str, Any]:
    low, high = claim.claimed or (math.nan, math.nan)
    turns = found if isinstance(found, tuple) else (found,)
    measured = statistics.median(turns) if turns else math.nan
    verdict = "not measured"
    if math.isfinite(measured):
        places = {_place(one, low * (1 - TOLERANCE), high * (1 + TOLERANCE)) for one in turns}
        verdict = "not resolved" if len(places) > 1 else "true" if places == {0} else "false"
    return {
        "claim": claim.text,
        "claimed": claim.claimed and [low, high if math.isfinite(high) else None],
        "measured": measured if math.isfinite(measured) else None,
        "unit": claim.unit,
        "verdict": verdict,
        "lacking": None if math.isfinite(measured) else claim.lacking,
    }


def _place(value: float, low: float, high: float) -> int:
    """Return -1 below the bounds, 0 within them, 1 above."""
    return int(value > high) - int(value < low)
