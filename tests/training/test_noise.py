"""The gradient's noise as training records it."""

import random

import pytest
import torch

from sweep.config.execution import Execution
from sweep.config.load import load_experiment
from sweep.data.tokens import SequenceStream
from sweep.orchestration.planning import make_plan, save_plan
from sweep.orchestration.request import Request
from sweep.orchestration.runner import run_plan
from sweep.training import noise
from sweep.training.checkpoint import Progress
from sweep.training.noise import growing_size, part_size, preserving_state, probe_sizes
from sweep.training.parallel import Parallel
from sweep.training.step import TrainingStep
from sweep.trial.files import read_metrics
from sweep.trial.folder import SweepFolder
from sweep.workloads.workload import Meter
from tests.fakes.executors import InlineExecutor
from tests.plans import build_plan


def plan_of(batches, **settings):
    experiment = load_experiment("quick", {"batches": batches, "precision": "fp32"} | settings)
    return build_plan(experiment, Execution(device="cpu", threads=2), data={"name": "synthetic"})


def test_estimates_are_those_of_the_definition():
    plan = plan_of([16], budget=10**6)
    config = plan.trial_config(plan.trials[0], "s").with_microbatch(4)
    step = TrainingStep(config, torch.device("cpu"))
    batch = step.workload.random_batch(16)
    each = []
    for part in batch[0].split(4):
        step.backward((part,))
        each.append(torch.cat([p.grad.flatten() for p in step.parameters]).double())
        step.model.zero_grad(set_to_none=True)
    stacked = torch.stack(each)
    mean = stacked.mean(0)
    trace = 4 / 3 * float(((stacked - mean) ** 2).sum())
    square = float((mean**2).sum()) - trace / 16
    measured = noise.measure_noise(step, batch, 4)  # the square is of nearly equal numbers
    assert measured == (pytest.approx(trace, rel=1e-4), pytest.approx(square, abs=1e-5 * trace))
    assert all(parameter.grad is None for parameter in step.parameters)


def test_a_measurement_that_fails_leaves_the_state_of_training():
    plan = plan_of([16], budget=10**6)
    config = plan.trial_config(plan.trials[0], "s").with_microbatch(4)
    step = TrainingStep(config, torch.device("cpu"))
    random.seed(0)
    before = random.getstate()
    with pytest.raises(MemoryError), preserving_state(step):
        random.random()
        raise MemoryError
    assert random.getstate() == before


def test_a_probe_is_a_small_part_of_training_and_its_parts_fit_the_microbatch():
    assert probe_sizes(1_280_000, 10, 0.01) == (10, 1280)
    assert probe_sizes(20_000, 10, 0.01) == (10, 20)
    assert probe_sizes(2000, 10, 0.01) == (2, 10)
    assert probe_sizes(9**9, 10, 0.01) == (10, 4096)
    assert probe_sizes(700, 10, 0.01) == probe_sizes(9**9, 0, 0.01) == (0, 0)
    assert part_size(512, 256, 1) == (512, 32)
    assert part_size(512, 256, 4) == (128, 8)
    assert part_size(20, 1, 1) == (20, 1)
    assert part_size(10, 8, 1) == (10, 5)
    for sequences in range(0, 9000, 37):
        points, most = probe_sizes(sequences, 10, 0.01)
        assert most * points <= 0.01 * sequences
        if points:
            count, size = part_size(most, 8, 1)
            assert 2 * size <= count <= most and count % size == 0


def test_probes_grow_until_the_gradient_stands_out_of_its_noise():
    noisy, clear = [1.0, -1.2, 0.9, -0.8, 1.1, -1.0], [1.0, 1.1, 0.9, 1.05, 1.0, 1.1]
    sizes = [growing_size(1024, noisy[:n]) for n in range(7)]
    assert sizes == [64, 128, 256, 512, 1024, 1024, 1024]
    assert [growing_size(1024, clear[:n]) for n in range(7)] == [64, 128, 256, 256, 256, 256, 256]
    assert growing_size(1024, [*clear[:3], -9.0]) == 512  # unresolved again
    assert growing_size(20, []) == growing_size(8, noisy) == 8
    assert growing_size(20, noisy) == 20


CONTEXT = 64  # of the experiment quick


class ProbedWindows:  # a step and a workload that only records which windows are probed
    microbatch_size = 1
    device = torch.device("cpu")
    model = torch.nn.Module()

    def __init__(self, config, windows):
        self.config, self.workload, self.probed = config, self, []
        self.meter = Meter()
        self.parallel = Parallel(config)
        self.stream = SequenceStream(windows, 0)

    def epochs(self):
        return self.config.science.tokens / (self.stream.size * CONTEXT)

    def build_batch(self, first, count):
        self.probed += self.stream.indices(first, count).tolist()


@pytest.fixture
def probed_windows(monkeypatch):
    monkeypatch.setattr(noise, "measure_noise", lambda *_: (1.0, 0.0))

    def windows_of(batches, sequences, windows, share):
        asked = {"measure": True, "share": share}
        plan = plan_of(batches, budget=sequences * CONTEXT, noise_scale=asked)
        pairs = []
        for row in plan.trials:
            step = ProbedWindows(plan.trial_config(row, "s"), windows)
            probe = noise.NoiseProbe(step.config, step, Progress())
            for milestone in probe.steps:
                probe.metrics(milestone)
            trained = step.stream.indices(0, row.tokens // CONTEXT).tolist()
            pairs.append((step.probed, set(trained)))  # of one batch size
        return pairs

    return windows_of


@pytest.mark.parametrize("sequences", [1024, 3000, 8176])
def test_no_step_trains_on_what_is_probed_up_to_one_epoch(sequences, probed_windows):
    points, most = probe_sizes(sequences, 10, 0.02)
    count = points * most
    for windows in (sequences + count, 2 * sequences, 7 * sequences):
        ((probed, trained),) = probed_windows([8], sequences, windows, 0.02)
        assert points * 8 <= len(probed) == len(set(probed)) <= count
        assert trained.isdisjoint(probed)


@pytest.mark.parametrize("windows", [500, 100_000])
def test_batch_sizes_that_train_on_other_tokens_have_the_same_probes(windows, probed_windows):
    pairs = probed_windows([1, 10, 1000], 1030, windows, 0.2)
    assert len({len(trained) for _, trained in pairs}) > 1 or windows == 500
    first, *others = [probed for probed, _ in pairs]
    assert len(first) == 8 + 16 + 8 * 20
    assert all(probed == first[: len(probed)] for probed in others)


def test_data_smaller_than_the_probes_are_probed_from_their_start(probed_windows):
    ((probed, _),) = probed_windows([8], 4096, 30, 0.1)
    assert len(probed) > 300 and set(probed) == set(range(30))


def run_sweep_in(path, experiment="quick", **settings):
    folder = SweepFolder(path)
    asked = Execution(device="cpu", microbatch=4)
    planned = make_plan(Request(load_experiment(experiment, settings), asked, folder))
    run_plan(planned, folder, executor=InlineExecutor())
    return folder


def measurements_of(trial):
    return [line for line in read_metrics(trial.metrics_path) if "noise/trace" in line]


def test_probes_see_the_same_sequences_at_every_batch_size(tmp_path):
    # With so low a rate the weights stay equal, and therefore the measurements.
    fields = {"batches": "4,16", "budget": "16k", "lr": "1e-12", "noise": True}
    folder = run_sweep_in(tmp_path, "quadratic", **fields)
    small, large = map(measurements_of, folder.trials())
    assert len(small) == 10
    for line, other in zip(small, large, strict=True):
        assert line["tokens"] == other["tokens"]
        for name in ("noise/trace", "noise/square"):
            assert line[name] == pytest.approx(other[name], rel=1e-4)


STATEFUL = {"kind": "object", "name": "custom:Stateful", "vocabulary": 512, "context": CONTEXT}
NOT_OF_TRAINING = ("noise/", "perf/", "memory/", "time")


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"model": STATEFUL, "workload": "custom:DrawingAndCounting"},
    ],
    ids=["quick", "random numbers, running means, and metrics of the loss"],
)
def test_training_has_the_same_bits_with_and_without_measurements(tmp_path, faults, settings):
    fields = {"batches": "8", "budget": 8 * CONTEXT * 40, "lr": "3e-3", **settings}
    asked = {"measure": True, "share": 0.5}
    (plain,) = run_sweep_in(tmp_path / "plain", **fields).trials()
    (measured,) = run_sweep_in(tmp_path / "measured", **fields, noise_scale=asked).trials()
    assert len(measurements_of(measured)) == 10
    assert measured.read_result().seconds_noise > 0

    assert plain.id == measured.id
    for name in ("weights_sha256", "valid_losses_sha256", "final_train_loss", "final_valid_loss"):
        assert getattr(plain.read_result(), name) == getattr(measured.read_result(), name)
    curves = []
    for trial in (plain, measured):
        lines = [
            {name: line[name] for name in line if not name.startswith(NOT_OF_TRAINING)}
            for line in read_metrics(trial.metrics_path)
        ]
        curves.append([line for line in lines if line.keys() > {"step", "tokens"}])
    assert curves[0] == curves[1]


def test_nothing_is_measured_unless_asked_for_nor_in_tuning_trials(tmp_path):
    fields = {"batches": "16", "budget": "4k", "seeds": 1}
    (plain,) = run_sweep_in(tmp_path / "plain", "quadratic", lr="0.05", **fields).trials()
    assert not measurements_of(plain) and plain.read_result().seconds_noise == 0

    fields |= {"lr": "tuned", "tuning": {"prune": False}}
    measured = run_sweep_in(tmp_path / "measured", "quadratic", noise=True, **fields)
    for trial in measured.trials():
        is_final = trial.read_config().science.stage != "tune"
        assert bool(measurements_of(trial)) is is_final


def test_a_folder_that_is_asked_later_measures_in_its_other_trials(tmp_path, caplog):
    fields = {"batches": "16", "budget": "16k", "lr": "0.05"}
    (first,) = run_sweep_in(tmp_path, "quadratic", **fields).trials()
    result = first.result_path.read_bytes()
    folder = SweepFolder(tmp_path)
    experiment = load_experiment("quadratic", {**fields, "seeds": 2})
    save_plan(make_plan(Request(experiment, Execution(), folder)).plan, folder)  # not run

    run_sweep_in(tmp_path, "quadratic", **fields, seeds=3, noise=True)
    assert "1 of 2 have none" in caplog.text
    trials = folder.trials()
    assert [len(measurements_of(trial)) for trial in trials] == [0, 10, 10]
    assert first.result_path.read_bytes() == result

    # A later command need not repeat the flag.
    run_sweep_in(tmp_path, "quadratic", **fields, seeds=4)
    assert len(measurements_of(folder.trials()[-1])) == 10
