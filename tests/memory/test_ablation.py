"""What each saving of a GRPO step saves: forecast and measured alike, and what was claimed."""

import math
from dataclasses import replace

import pytest
from click.testing import CliRunner

from sweep.cli import sweep
from sweep.config.experiment import load_experiment
from sweep.config.trial import Execution
from sweep.data.synthetic import synthetic_identity
from sweep.errors import SweepError
from sweep.memory import ablation
from sweep.memory.ablation import Row, variants_of
from sweep.memory.claims import CLAIMS, judge_claims
from sweep.memory.points import Forecast, Measurement
from sweep.memory.rows import Rows
from sweep.orchestration.execution import Logistics
from sweep.orchestration.memory import ablate_memory
from sweep.plan.plan import build_plan
from sweep.report.memory import markdown_of

SMALL = {
    "model": "quick",
    "batches": [8],
    "grpo": {"group_size": 4, "prompt_tokens": 20, "new_tokens": 4},
}
LOGITS = 4 * 8 * 4 * 512  # bytes of a batch's completions


def base_config(small=SMALL):
    fields = {"budget": 10**6, "precision": "fp32", "data": "synthetic", **small}
    execution = Execution(device="cpu", threads=2, evaluation_batch_size=8, loss_chunk_rows=1024)
    experiment = load_experiment("grpo-words", fields)
    plan = build_plan(experiment, execution, data=synthetic_identity(), microbatch=None)
    return plan.trial_config(plan.trials[0], "probe")


@pytest.fixture
def only(monkeypatch):
    """Leave out all variants but the base and those that are named."""

    def leave(*names):
        every = variants_of
        chosen = {ablation.BASE, *names}
        monkeypatch.setattr(
            ablation, "variants_of", lambda base: [v for v in every(base) if v.name in chosen]
        )

    return leave


def test_what_is_forecast_is_measured_and_undoing_costs_what_is_kept(only):
    graph = "reference's pass with its graph"
    only(ablation.PLAIN, ablation.SAMPLING, graph, "prompts shared", "expandable segments", "bf16")
    seen = []
    document = ablate_memory(
        "grpo-words", logistics=Logistics(device="cpu"), on_row=seen.append, **SMALL
    )
    rows = {row["name"]: row for row in document["rows"]}
    assert [row.name for row in seen] == list(rows)
    assert rows.pop("expandable segments")["status"] == "NOT_TRIED"
    for name, row in rows.items():
        assert row["status"] == "OK", row
        for phase, peak in row["measured"]["phases"].items():
            assert peak == pytest.approx(row["forecast"]["phases"][phase], rel=0.02), (name, phase)
    update = {name: row["measured"]["phases"]["update"] for name, row in rows.items()}
    base = update[ablation.BASE]
    assert update[ablation.SAMPLING] == pytest.approx(base + LOGITS, abs=4096)
    assert update[ablation.PLAIN] > base + LOGITS
    assert update[graph] > base + LOGITS and update["prompts shared"] < base
    assert {name for name, row in rows.items() if row["time_ratio"]} == {*rows} - {
        ablation.BASE,
        "bf16",
    }
    assert all(len(row["time_ratios"]) in (0, ablation.TURNS) for row in rows.values())
    text = markdown_of(document)
    assert "| logits of sampling kept | OK |" in text and "| NOT_TRIED |" in text
    assert "not measured" in text  # claims about what was left out


@pytest.mark.slow
def test_attention_names_collector_and_halves_are_measured_as_forecast(only, monkeypatch):
    """Equal configurations are measured once; a reference is added where there is none."""
    fused, halves = ablation.PLAIN_ATTENTION, (ablation.HALF_PROMPTS, ablation.GROUP_ALONE)
    kept = (ablation.KEPT, ablation.NO_COLLECTOR, "no reference (kl = 0)")
    only(fused, *kept, *halves, ablation.HALF_HEADS)
    monkeypatch.setattr(ablation, "TURNS", 1)
    small = {**SMALL, "context": 128, "grpo": {**SMALL["grpo"], "kl": 0.0, "new_tokens": 100}}
    document = ablate_memory("grpo-words", logistics=Logistics(device="cpu"), **small)
    rows = {row["name"]: row for row in document["rows"]}
    assert len(rows) == 8
    for name, row in rows.items():
        assert row["status"] == "OK", row
        for phase, peak in row["measured"]["phases"].items():
            assert peak == pytest.approx(row["forecast"]["phases"][phase], rel=0.02), (name, phase)
    peak = {name: row["peak_bytes"] for name, row in rows.items()}
    base, scores = peak[ablation.BASE], 4 * 8 * 4 * 119 * 119  # bytes of a layer's, of 119 inputs
    inputs = 8 * 119 * 64 * 4  # bytes; scores are kept instead of the output, queries and keys
    assert peak[fused] == pytest.approx(base + 3 * (scores - 3 * inputs), rel=0.02)
    rest = {name: row["measured"]["rest_bytes"] for name, row in rows.items()}
    held = rest[ablation.KEPT] - rest[ablation.BASE]
    of_one = 8 * (20 + 120 + 100) + 4 * 3 * 100  # ids, what was drawn; mask and log-probabilities
    assert held == pytest.approx(8 * of_one, rel=0.15)
    assert peak[ablation.NO_COLLECTOR] == pytest.approx(base, rel=1e-3)
    assert peak[ablation.HALF_HEADS] == pytest.approx(base, rel=0.02)
    assert all(peak[name] < 0.7 * base for name in halves)
    assert rows[halves[0]]["measured"] == rows[halves[1]]["measured"]
    assert peak["no reference (kl = 0)"] < base
    text = markdown_of(document)
    assert "keeps no reference (kl = 0)" in text
    verdicts = {one["claim"]: one["verdict"] for one in document["claims"]}
    assert verdicts["Flash attention takes less memory."] == "true"
    assert verdicts["It needs the package flash-attn, and a GPU for it."] == "false"
    assert verdicts["Fewer heads take less memory."] == "false"
    assert "| not measured: of learning, not of memory" in text


def test_every_variant_differs_in_one_thing_and_claims_name_rows():
    base = base_config()
    variants = {variant.name: variant for variant in variants_of(base)}
    assert len(variants) == len(variants_of(base))
    for name, variant in variants.items():
        if name != ablation.BASE and not variant.environment and variant.kind != "size":
            assert len(differences(base.model_dump(), variant.config.model_dump())) == 1, name
    sizes = {ablation.HALF_PROMPTS: 600, ablation.HALF_LENGTH: 900, ablation.PLAIN_ATTENTION: 1500}
    points = {
        name: Measurement(8, 8, "OK", rest_bytes=1, peak_bytes=size, phases={"update": size})
        for name, size in ((name, sizes.get(name, 1000) << 20) for name in variants)
    }
    turns = (1.2, 1.3, 1.25)
    rows = [Row(n, v.kind, None, points[n], time_ratios=turns) for n, v in variants.items()]
    found = judge_claims(base, rows)
    assert len(found) == len(CLAIMS)
    missing = [one["claim"][:30] for one in found if one["measured"] is None]
    assert missing == ["So a batch has a sixth as many", "Shorter sequences change the t"]
    assert all((one["lacking"] is None) == (one["measured"] is not None) for one in found)
    effective = next(one for one in found if "most effective" in one["claim"])
    assert effective["measured"] == pytest.approx(4) and effective["verdict"] == "true"
    verdicts = {one["claim"]: one["verdict"] for one in found}
    assert verdicts["Gradient accumulation has no memory cost."] == "true"
    assert verdicts["Half the sequence saves half the memory."] == "false"
    assert verdicts["Activation checkpointing costs 20 to 30 % of the time."] == "true"
    point, size = points[ablation.HALF_LENGTH], 500 << 20
    halved = replace(point, peak_bytes=size, phases={"update": size})
    rows = [replace(r, measured=halved) if r.name == ablation.HALF_LENGTH else r for r in rows]
    verdicts = {one["claim"]: one["verdict"] for one in judge_claims(base, rows)}
    assert verdicts["Half the sequence saves half the memory."] == "true"


def test_a_prompt_of_eight_is_counted_in_sequences_of_the_same_memory():
    """At 10 + 3 MiB a completion, a supervised step of 34 MiB on 16 is worth 8 of them."""
    peaks = {ablation.BASE: 58, ablation.GROUP_ALONE: 34, ablation.SUPERVISED: 34}
    rows = [
        Row(name, "size", None, Measurement(1, 1, "OK", peak_bytes=size << 20))
        for name, size in peaks.items()
    ]
    assert Rows(rows, 1, 16, 8).sequences_for_a_prompt() == pytest.approx(16 * 8 / 8)
    assert math.isnan(Rows(rows, 1, 16, 4).sequences_for_a_prompt())
    assert math.isnan(Rows(rows[:1], 1, 16, 8).sequences_for_a_prompt())


@pytest.mark.parametrize(
    ("turns", "verdict"),
    [
        ((1.2, 1.3, 1.25), "true"),
        ((1.2, 9.0, 1.25), "not resolved"),
        ((0.9, 2.0, 0.8), "not resolved"),
        ((1.6, 2.0, 1.7), "false"),
        ((), "not measured"),
    ],
)
def test_a_claim_about_time_is_judged_only_where_all_turns_agree(turns, verdict):
    base = base_config()
    point = Measurement(8, 8, "OK", peak_bytes=2**30, seconds_per_step=1.0)
    rows = [Row(v.name, v.kind, None, point, time_ratios=turns) for v in variants_of(base)]
    found = {one["claim"]: one["verdict"] for one in judge_claims(base, rows)}
    assert found["Activation checkpointing costs 20 to 30 % of the time."] == verdict


@pytest.mark.parametrize(("precision", "size"), [("fp32", 4), ("bf16", 2), ("bf16-pure", 2)])
def test_logits_of_sampling_are_counted_in_their_own_dtype(precision, size):
    base = base_config({**SMALL, "precision": precision})
    peaks = {ablation.BASE: 1000, ablation.SAMPLING: 1000 + LOGITS * size // 4}
    rows = [
        Row(name, "undone", None, Measurement(8, 8, "OK", peak_bytes=peak))
        for name, peak in peaks.items()
    ]
    found = {one["claim"]: one for one in judge_claims(base, rows)}
    saved = found["Not returning logits from sampling saves them."]
    assert saved["measured"] == 1 and saved["verdict"] == "true"


def differences(one, other):
    """Paths of the leaves in which two documents differ."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return [()] if one != other else []
    keys = one.keys() | other.keys()
    return [(k, *path) for k in keys for path in differences(one.get(k), other.get(k))]


def test_what_failed_is_no_number():
    base = base_config()
    lost = Measurement(8, 8, "OUT_OF_MEMORY", "no room")
    rows = [Row(variant.name, variant.kind, None, lost) for variant in variants_of(base)]
    assert all(row.peak_bytes is None and row.time_ratio is None for row in rows)
    assert {one["verdict"] for one in judge_claims(base, rows)} == {"not measured"}
    assert math.isnan(Rows([], 1).peak("nothing"))


def test_only_what_was_measured_is_a_row_s_peak():
    forecast = Forecast(8, 8, 2**20, {}, 0, 0)
    assert Row("a", "size", forecast, None).peak_bytes is None
    assert Row("a", "size", forecast, Measurement(8, 8, "OUT_OF_MEMORY")).peak_bytes is None
    assert Row("a", "size", forecast, Measurement(8, 8, "OK", peak_bytes=3)).peak_bytes == 3


@pytest.mark.parametrize(("group", "half"), [(4, 2), (3, None), (2, None)])
def test_half_a_group_is_whole_prompts(group, half):
    fields = {**SMALL, "batches": [4 * group], "grpo": {**SMALL["grpo"], "group_size": group}}
    variants = {variant.name: variant.config for variant in variants_of(base_config(fields))}
    if half is None:
        assert ablation.HALF_GROUPS not in variants
    else:
        config = variants[ablation.HALF_GROUPS]
        assert (config.science.batch_size, config.group_size) == (4 * half, half)


@pytest.mark.parametrize("flag", ["largest", "multiple", "soak", "microbatch"])
def test_what_an_ablation_does_not_look_at_is_refused(flag):
    result = CliRunner().invoke(sweep, ["probe", "grpo-words", "--ablate", f"--{flag}", "4"])
    assert result.exit_code != 0 and flag in str(result.exception)


def test_other_workloads_are_refused():
    with pytest.raises(SweepError, match="ablate must be asked of the workload grpo"):
        ablate_memory("quick", logistics=Logistics(device="cpu"))
    result = CliRunner().invoke(sweep, ["probe", "quick", "--ablate"])
    assert result.exit_code != 0
