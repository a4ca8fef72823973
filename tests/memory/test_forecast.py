"""Forecasts compared with measurements and with published peaks."""

import csv
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sweep.errors import SweepError
from sweep.memory import forecast as forecasting
from sweep.memory.forecast import STAGES, Forecasts, forecast_step, on_devices
from sweep.memory.probe import measure
from sweep.memory.search import Forecast
from sweep.orchestration.memory import forecast_memory
from sweep.report.report import markdown_of
from tests.workloads.trials import trial_config

TRIED_TORCH_VERSIONS = ("2.11", "2.13")  # with the private FakeTensorMode and the dispatch mode
PUBLISHED = Path(__file__).parent / "elman-memory.csv"  # published, GiB of peak allocation
GIB = 2**30
FAR = 10 * GIB
ERROR = 0.02  # share of a peak, as docs/memory.md says
SMALL_ELMAN = {"kind": "object", "name": "experiments.elman:Elman", "vocabulary": 256,
               "context": 64, "options": {"d_model": 96, "layers": 2}}  # fmt: skip
SMALL_GPT2 = {"kind": "hugging_face", "name": "small-gpt2", "architecture": "gpt2",
              "vocabulary": 512, "context": 128,
              "sizes": {"n_positions": 128, "n_embd": 64, "n_layer": 3, "n_head": 4}}  # fmt: skip
SHORT = {"kind": "grpo", "group_size": 4, "prompt_tokens": 24, "new_tokens": 16}
CHECKPOINTED, SLOW = {"activation_checkpointing": True}, pytest.mark.slow


def config(experiment="tinystories", batch=8, execution=None, microbatch=None, **settings):
    execution = {"evaluation_batch_size": 4, **(execution or {})}
    settings = {"budget": 10**9, **settings}
    return trial_config(experiment, batch, microbatch or batch, execution, **settings)


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def test_fake_tensors_were_tried_with_this_version_of_torch():
    """If this fails, run all tests here, slow ones too, and add the version."""
    assert torch.__version__.startswith(TRIED_TORCH_VERSIONS)


@pytest.mark.parametrize(
    "case",
    [
        {"experiment": "quick"},
        {"experiment": "quick", "microbatch": 2},
        {"experiment": "quick", "execution": {"activation_checkpointing": True}},
        {"experiment": "quick", "execution": {"loss_chunk_rows": 100}},
        {"experiment": "quick", "precision": "bf16"},
        {"experiment": "quick", "precision": "bf16-pure"},
        {"experiment": "quick", "optimizer": {"name": "sgd"}},
        {"experiment": "quick", "target": 3.0},  # keeps averaged weights
        {"model": "small"},
        {"experiment": "quadratic"},
        {"experiment": "grpo-words", "batch": 8, "microbatch": 4},
        pytest.param({"experiment": "grpo-words", "microbatch": 4, "batch": 16}, marks=SLOW),
        {"experiment": "elman", "model": SMALL_ELMAN, "precision": "bf16-pure"},
        pytest.param({"experiment": "gpt2", "batch": 2}, marks=SLOW),
        {"experiment": "quick", "model": SMALL_GPT2},
        {"experiment": "quick", "model": SMALL_GPT2, "execution": CHECKPOINTED},
        {"experiment": "grpo-words", "model": SMALL_GPT2, "workload": SHORT},
        {"experiment": "quick", "model": {**SMALL_GPT2, "lora": 4}, "init": "pretrained"},
        pytest.param(
            {
                "experiment": "grpo-words",
                "model": {**SMALL_GPT2, "lora": 4},
                "init": "pretrained",
                "workload": SHORT,
            },
            marks=SLOW,
        ),
        {"model": "odd:Tied", "vocabulary": 500, "context": 32, "data": "synthetic"},
    ],
    ids=lambda case: "-".join(
        value.get("name", str(value)) if isinstance(value, dict) else str(value)
        for value in case.values()
    ),
)
def test_a_forecast_is_what_real_tensors_take(case):
    trial = config(**case)
    forecast = forecast_step(trial)
    measured = measure(trial, FAR, 3, None)
    assert measured.status == "OK", measured.message
    assert forecast.needed_bytes == pytest.approx(measured.peak_bytes, rel=ERROR)
    assert forecast.rest_bytes == pytest.approx(measured.rest_bytes, rel=0.02)
    assert sum(forecast.by_category.values()) == forecast.peak_bytes
    assert forecast.phases == pytest.approx(measured.phases, rel=ERROR)


def test_an_evaluation_of_averaged_weights_holds_the_trained_ones_too():
    schedules = ({"average": 0.0}, {"average": 0.1})
    plain, averaged = (forecast_step(config("quick", schedule=kind)) for kind in schedules)
    more = averaged.evaluation_bytes - plain.evaluation_bytes
    assert more == pytest.approx(2 * plain.by_category["weights"], rel=0.02)


def test_the_reference_model_by_category():
    forecast = forecast_step(config(batch=32))
    weights = 4 * 22_696_448
    assert forecast.by_category["weights"] == pytest.approx(weights, rel=1e-3)
    assert forecast.by_category["optimizer"] == pytest.approx(2 * weights, rel=1e-3)
    assert forecast.by_category["logits"] >= 2 * 32 * 256 * 10_000 * 4
    assert forecast.rest_bytes == pytest.approx(3 * weights, rel=1e-2)


def published_rows():
    with PUBLISHED.open() as file:
        rows = [row for row in csv.DictReader(file) if row["status"] == "OK"]
    assert len(rows) == 9
    for row in rows:
        batch = int(row["batch_size"])
        marks = () if batch == 64 else pytest.mark.slow
        yield pytest.param(batch, float(row["peak_allocated_gib"]), marks=marks)


@pytest.mark.parametrize(("batch", "peak"), list(published_rows()))
def test_the_published_e1_rows_are_reproduced(batch, peak):
    forecast = forecast_step(config("elman", batch=batch, precision="bf16-pure"))
    assert forecast.peak_bytes / GIB == pytest.approx(peak, abs=0.05)


def test_the_largest_microbatch_fits_by_forecast_and_the_next_does_not():
    trial = config("quick", batch=64)
    largest = Forecasts().find_largest(trial, 100 << 20, is_accumulated=False)
    peaks = [forecast_step(config("quick", batch=n)).needed_bytes for n in (largest, largest + 1)]
    assert peaks[0] <= 100 << 20 < peaks[1]


def test_a_model_that_needs_values_is_refused_and_a_probe_is_proposed():
    trial = config(model="odd:NeedsValues", vocabulary=50, context=8)
    with pytest.raises(SweepError, match="sweep probe"):
        forecast_step(trial)
    assert torch.ones(1).item() == 1  # no mode is left entered


def test_a_gpu_need_not_exist_and_a_tenth_of_its_memory_is_reserved():
    here = forecast_memory("quick", device_memory=64 << 20, batches=[8])
    gpu = {"device": "cuda", "device_memory": 64 << 20}
    there = forecast_memory("quick", **gpu, batches=[8], precision="fp32")
    assert there["usable_bytes"] == int(0.9 * (64 << 20)) < here["usable_bytes"]
    assert there["largest_microbatch_size"] < here["largest_microbatch_size"]
    assert forecast_memory("quick", device="cuda")["precision"] == "bf16"


LLAMA = {  # config.json of Llama-3.2-1B
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 128_000, "eos_token_id": 128_001,
    "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192,
    "max_position_embeddings": 131_072, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500_000.0, "tie_word_embeddings": True, "vocab_size": 128_256,
}  # fmt: skip


def test_a_model_of_transformers_is_forecast_with_its_own_sizes(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    sized = {"model": str(tmp_path), "batches": [1], "device": "cuda", "precision": "bf16"}
    document = forecast_memory("quick", **sized, context=512)
    assert document["model"]["parameters"] == 1_235_814_400
    assert document["tokens_per_sequence"] == 512
    assert document["points"][0]["by_category"]["weights"] == pytest.approx(4.94e9, rel=1e-3)
    assert document["sizes_in_run"] == {"vocabulary": 512, "context": 512}
    assert "vocabulary 512 and context 512" in markdown_of(document)


@pytest.mark.slow
def test_the_gpu_of_e1_fits_the_size_that_ran_and_not_the_next():
    """192 ran on its 47.4 GiB, 208 did not, although its tensors alone would have fitted."""
    gpu = {"device": "cuda", "device_memory": int(47.4 * GIB)}
    document = forecast_memory("elman", **gpu, batches=[192])
    assert 192 <= document["largest_microbatch_size"] < 208


def test_tensors_kept_by_a_handwritten_model_are_counted():
    """It has the same parameters but keeps each (B, H, T, T) part of the softmax."""
    own = config(batch=8)
    written = config(model="odd:handwritten", vocabulary=10_000, context=256, batch=8)
    more = forecast_step(written).peak_bytes - forecast_step(own).peak_bytes
    scores = 4 * 8 * 16 * 256 * 256
    assert more > 4 * 1.5 * scores  # in each of four layers


def test_loss_chunk_rows_bound_the_logits_of_grpo():
    """In the pass without gradients and in the update: only the bound changes both peaks."""
    fields = {"model": "quick", "vocabulary": 8192, "context": 96, "data": "synthetic"}
    fields["workload"] = {"kind": "grpo", "prompt_tokens": 20, "new_tokens": 64, "kl": 0.1}
    peaks = [
        forecast_step(config("grpo-words", 32, {"loss_chunk_rows": rows}, **fields)).phases
        for rows in (0, 1024, 512)  # of 32 × 64
    ]
    row = 4 * 8192  # bytes
    for phase in ("log_probs", "update"):
        whole, half, quarter = (peak[phase] for peak in peaks)
        assert half - quarter > 512 * row
        assert (whole - half) / (half - quarter) == pytest.approx(1024 / 512, rel=0.05)


def whole_step(weights, gradients, states, activations):
    held = dict(weights=weights, gradients=gradients, optimizer=states, activations=activations)
    at_rest = weights + states
    return Forecast(8, sum(held.values()), held, at_rest, at_rest + activations // 3)


@pytest.mark.parametrize(("stage", "gigabytes"), [(1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_published_example_of_7_5_billion_parameters_on_64_devices(stage, gigabytes):
    """Rajbhandari et al. 2019 count what each device keeps, nothing that is gathered."""
    weights, gradients, states = 15 * 10**9, 15 * 10**9, 90 * 10**9
    kept = on_devices(whole_step(weights, gradients, states, 0), 64, stage, 0, 0).by_category
    if stage == 2:  # of the weights this count shards what the paper does not
        kept["weights"] = weights
    assert sum(kept.values()) / 10**9 == pytest.approx(gigabytes, abs=0.05)


@given(
    st.integers(10**3, 10**9),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 10**9),
    st.integers(2, 4096),
)
def test_a_step_never_gathers_more_than_the_whole_state(weights, share, layer, rest, devices):
    outside = int(share * weights)
    gathered = int(layer * (weights - outside)), outside
    whole = whole_step(weights, weights, 2 * weights, rest)
    forecasts = [on_devices(whole, devices, stage, *gathered) for stage in STAGES]
    assert forecasts[0].peak_bytes == whole.peak_bytes  # it includes all gradients
    assert forecasts[0].rest_bytes == whole.rest_bytes + weights  # buckets
    for stage, forecast in enumerate(forecasts):
        assert sum(forecast.by_category.values()) == forecast.peak_bytes
        assert forecast.by_category["activations"] == rest  # never split
        states = -(-2 * weights // devices) if stage >= 1 else 2 * weights
        assert forecast.by_category["optimizer"] == states
        shard = -(-weights // devices) if stage >= 2 else 0
        assert forecast.by_category["weights"] <= weights + shard
        assert forecast.by_category["gradients"] <= weights + shard
    assert forecasts[1].peak_bytes < whole.peak_bytes
    assert forecasts[3].peak_bytes <= forecasts[2].peak_bytes
    assert forecasts[3].rest_bytes == forecasts[2].rest_bytes < forecasts[1].rest_bytes


def test_stage_3_gathers_two_layers_at_a_time():
    layers, size = 50, 10**6
    whole = whole_step(layers * size, layers * size, 2 * layers * size, 0)
    forecast = on_devices(whole, 10, 3, size, 0)
    parts = {"weights": 5 * size + 2 * size, "gradients": 5 * size + size, "optimizer": 10 * size}
    assert forecast.by_category == {**parts, "activations": 0}


@pytest.mark.parametrize(
    ("sizes", "most"),
    [([64, 80, 96, 112, 128, 144, 160, 176, 192], 3), ([1, 2, 3, 4, 8, 16, 32, 64], 7)],
)
def test_sizes_on_a_line_are_read_from_it_and_others_are_not(monkeypatch, sizes, most):
    """Below about four sequences the optimizer's step sets the peak, so there is a kink."""
    configs = [config("quick", size) for size in sizes]
    expected = [forecast_step(config) for config in configs]
    calls = []
    monkeypatch.setattr(
        forecasting, "forecast_step", lambda config: calls.append(config) or forecast_step(config)
    )
    forecasts = Forecasts().of_all(configs)
    assert len(calls) <= most
    near = 2 * forecasting.NEAR
    for one, other in zip(forecasts, expected, strict=True):
        assert one.microbatch_size == other.microbatch_size
        assert one.peak_bytes == pytest.approx(other.peak_bytes, rel=near)
        assert one.evaluation_bytes == pytest.approx(other.evaluation_bytes, rel=near)
