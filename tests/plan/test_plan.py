"""The plan as a whole: ids, seeds, growing, and the command that answers the question."""

import shlex

import pytest

from sweep.config.arms import Arm
from sweep.config.execution import Execution
from sweep.config.experiment import Experiment
from sweep.config.load import load_experiment
from sweep.config.trial import Science
from sweep.decision.proposal import answering_command, propose_answer
from sweep.errors import SweepError
from sweep.plan.commands import parse_command, typed_command
from sweep.plan.growth import grow_plan
from sweep.plan.policies import Tuned, parse_policy
from sweep.trial.files import sha256_of
from sweep.trial.folder import trial_id
from sweep.version import FORMAT_VERSION
from tests.plans import build_plan

DATA = {"name": "synthetic", "grammar_version": 1, "seed": 0}
CPU = Execution(device="cpu", threads=2)


def make(execution=CPU, data=DATA, old=None, command=(), **overrides):
    settings = {"precision": "fp32", "batches": "4,8", "budget": "65536", **overrides}
    experiment = load_experiment("quick", settings)
    return build_plan(experiment, execution, data=data, old=old, command=command)


def ids(plan):
    return [row.id for row in plan.trials]


def test_id_is_the_hash_of_the_science_fields():
    plan = make()
    for row in plan.trials:
        science = plan.science(row, row.learning_rate).model_dump(mode="json")
        assert row.id == sha256_of(science)[:12]
        assert science["format_version"] == FORMAT_VERSION


def test_device_speed_and_wording_do_not_change_ids():
    fast = Execution(device="cuda", threads=64, compile=True, microbatch=2)
    assert ids(make(execution=fast, question="another wording")) == ids(make())


@pytest.mark.parametrize("flags", [{"unit": "%"}, {"objective": "f1", "direction": "maximize"}])
def test_what_a_command_is_compared_by_does_not_change_ids(flags):
    def plan(**others):
        command = "true {batch_size} {learning_rate} {steps} {seed}"
        settings = {"command": command, "batches": "4", "budget": 400}
        experiment = load_experiment(None, {**settings, **others})
        return build_plan(experiment.model_copy(update={"precision": "fp32"}), CPU)

    assert ids(plan(**flags)) == ids(plan())


CHANGES = [
    *({"precision": "bf16"}, {"lr": "2e-3"}, {"lr": "sqrt"}, {"model": "small"}, {"context": 32}),
    *({"tokenizer": "bytes"}, {"data": {**DATA, "seed": 1}}, {"budget": 131_072}),
    {"evaluation": {"points": 10}},
]


@pytest.mark.parametrize("other", CHANGES)
def test_a_setting_that_changes_a_number_changes_ids(other):
    assert not set(ids(make(**other))) & set(ids(make()))


def test_the_minimum_of_warmup_belongs_to_the_reference_at_a_fixed_rate_only():
    def warmup(**overrides):
        experiment = load_experiment("tinystories", {"precision": "fp32", **overrides})
        return build_plan(experiment, CPU, data=DATA).trials[-1].warmup_steps

    assert warmup() == 100
    assert warmup(lr="sqrt", seeds=1) == 50
    assert warmup(model="small", batches="256") == 100  # 1 % of 10,000 steps


@pytest.mark.parametrize(("other", "count"), [({}, 1), ({"lr": "sqrt"}, 3), ({"seeds": 2}, 2)])
def test_seeds_default_to_one_at_a_fixed_rate_and_three_otherwise(other, count):
    assert {row.seed for row in make(**other).trials} == set(range(count))


def test_tuned_lists_five_rates_then_three_to_predict_and_final_trials_without_id():
    plan = make(lr="tuned")
    tuning = [row for row in plan.trials if row.stage == "tune"]
    finals = [row for row in plan.trials if row.stage == "final"]
    assert {row.seed for row in tuning} == {1000}
    first = [row for row in tuning if row.batch_size == 4]
    centre = first[0].learning_rate
    assert [row.learning_rate / centre for row in first] == [1, 0.5, 2, 0.25, 4]
    assert all(row.id for row in first)
    predicted = [(row.id, row.learning_rate) for row in tuning if row.batch_size == 8]
    assert predicted == [(None, None)] * 3
    assert [(row.id, row.learning_rate) for row in finals] == [(None, None)] * 6


def test_by_a_rule_each_batch_size_begins_with_five_rates():
    plan = make(lr="tuned", centre="rule")
    tuning = [row for row in plan.trials if row.stage == "tune"]
    assert len(tuning) == 2 * 5 and all(row.id for row in tuning)
    together = make(lr="tuned", tune="lr,beta2")
    assert all(row.id for row in together.trials if row.stage == "tune")


def test_a_search_that_has_begun_is_not_planned_again():
    plan = make(lr="tuned")
    first = tuple(row for row in plan.trials if row.batch_size == 4 and row.id)
    predicted = next(row for row in plan.trials if row.batch_size == 8 and row.stage == "tune")
    begun = plan.model_copy(update={"trials": (*first, plan.with_rate(predicted, 1e-3))})
    again = make(old=begun, lr="tuned")
    assert not [row for row in again.trials if row.stage == "tune" and row not in first]
    assert len([row for row in again.trials if row.stage == "final"]) == 6


def test_the_first_rates_are_centred_on_the_rate_of_the_experiment_s_own_file():
    def centre(**settings):
        return make(lr="tuned", **settings).trials[0].learning_rate

    usual = parse_policy("tuned").rate_at(4)
    assert centre() == pytest.approx(5e-3)
    assert centre(tune_centre="0.1") == pytest.approx(0.1)
    assert centre(model="small") == pytest.approx(usual)  # the rate is that of another model
    assert centre(optimizers="sgd") == pytest.approx(300 * 5e-3)
    settings = {"lr": "tuned", "precision": "fp32"}
    reference = build_plan(load_experiment("tinystories", settings), CPU, data=DATA)
    assert reference.trials[0].learning_rate == pytest.approx(parse_policy("tuned").rate_at(1))


def test_a_folder_keeps_the_rate_that_its_searches_began_with_and_may_centre_the_next_otherwise():
    old = make(lr="tuned", tuning={"own_rate": {"lr": "0.02"}})
    new = make(lr="tuned", batches="4,8,16", centre="rule", old=old)
    first = [
        row.learning_rate for row in new.trials if row.batch_size == 16 and row.stage == "tune"
    ]
    assert first[0] == pytest.approx(0.02) and None not in first
    grown = grow_plan(old, new)
    assert grown.settings.tuning.own_rate == old.settings.tuning.own_rate
    assert grown.settings.tuning.centred_by == "rule"
    with pytest.raises(SweepError, match=r"tuning\.prune"):
        grow_plan(old, make(lr="tuned", tuning={"prune": False}, old=old))


@pytest.mark.parametrize("batches", ["4,8,12", "512"])
def test_the_parts_of_a_step_and_the_steps_of_a_trial_add_up(batches):
    for row in make(batches=batches).trials:
        assert row.steps * row.batch_size * 64 == row.tokens
        assert row.microbatch_size * row.gradient_accumulation_steps == row.batch_size
        assert row.microbatch_size * 64 <= 8192


@pytest.mark.parametrize(
    "other", [{"batches": "16"}, {"batches": "4"}, {"seeds": 3}, {"lr": "sqrt"}]
)
def test_growing_adds_batch_sizes_seeds_and_rates_and_keeps_the_old_trials(other):
    old = make()
    grown = grow_plan(old, new := make(old=old, **other))
    assert grown.trials[: len(old.trials)] == old.trials
    assert {*ids(grown)} == {*ids(old), *ids(new)}


def test_a_sweep_that_is_asked_for_the_noise_scale_keeps_measuring_it_in_the_same_trials():
    old = make(command=("sweep", "run", "quick"))
    asked = make(noise=True, old=old, command=("sweep", "run", "quick", "--noise"))
    grown = grow_plan(old, asked)
    assert grown.trials == old.trials
    assert grown.settings.noise_scale.measure
    assert grown.commands == (*old.commands, *asked.commands)
    kept = grow_plan(grown, make(old=grown, command=("sweep", "run", "quick", "--quiet")))
    assert kept.settings.noise_scale.measure
    assert kept.commands == grown.commands


COMMAND = "env {batch_size} {learning_rate} {seed} {steps}"


@pytest.mark.parametrize(
    ("name", "settings", "stages"),
    [
        ("quick", {}, {"final"}),
        ("grpo-words", {}, set()),
        (None, {"command": COMMAND, "budget": "4k"}, set()),
    ],
)
def test_final_trials_measure_noise_if_their_batches_are_read(name, settings, stages):
    experiment = load_experiment(name, {"lr": "tuned", "batches": "8,16", **settings})
    asked = experiment.noise_scale.model_copy(update={"measure": True})
    experiment = experiment.model_copy(update={"noise_scale": asked, "precision": "fp32"})
    plan = build_plan(experiment, CPU, data=DATA)
    assert {row.stage for row in plan.trials} == {"final", "tune"}
    assert {row.stage for row in plan.trials if plan.measures_noise(row)} == stages
    for row in plan.trials:
        assert plan.trial_config(row).noise_scale.measure is plan.measures_noise(row)


def test_growing_refuses_a_changed_science_field_and_names_it():
    with pytest.raises(SweepError, match=r"optimizer\.clip would change from 1\.0 to 0\.5"):
        grow_plan(make(), make(optimizer={"clip": 0.5}))
    with pytest.raises(SweepError, match=r"data\.seed would change"):
        grow_plan(make(), make(data={**DATA, "seed": 1}))


@pytest.mark.parametrize("settings", [{}, {"lr": "tuned", "tuning": {"budget": 66000}}])
def test_growing_refuses_a_batch_size_that_changes_the_common_tokens(settings):
    settings |= {"budget": "196608" if settings else "66000"}
    old = make(batches="4,8", **settings)
    new = make(batches="3", old=old, **settings)
    with pytest.raises(SweepError, match="would no longer have"):
        grow_plan(old, new)


def test_a_grown_plan_records_whether_its_tokens_are_common_and_the_commands_that_added_something():
    first = make(batches="4", budget=64_000, command=("sweep", "run", "a"))
    same = make(batches="4", budget=64_000, command=("sweep", "run", "a", "--quiet"))
    assert grow_plan(first, same).commands == first.commands
    more = make(batches="384", budget=64_000, old=first, command=("sweep", "run", "b"))
    grown = grow_plan(first, more)
    assert first.tokens_are_common and not grown.tokens_are_common
    assert grown.commands == (("sweep", "run", "a"), ("sweep", "run", "b"))
    estimated = more.model_copy(update={"epochs": 0.5, "disk_bytes": 7})
    grown = grow_plan(grow_plan(first, estimated), more)
    assert (grown.epochs, grown.disk_bytes) == (0.5, 7)


def test_a_command_has_the_flags_that_were_given_as_the_command_line_reads_them():
    flags = {"lr": "1e-3", "batches": [4, 8], "seeds": None, "activation_checkpointing": True}
    words = "--lr 1e-3 --batches 4,8 --activation-checkpointing --microbatch 2"
    command = shlex.join(typed_command("quick", {**flags, "microbatch": 2, "keep": False}))
    assert command == f"sweep run quick {words}"


@pytest.mark.parametrize("experiment", ["quick", None])
def test_a_written_command_is_read_back_also_with_flags_of_an_executor(experiment):
    flags = {
        "no_user_code": True,
        "command": "--run {batch_size}",
        "slurm": "",
        "queue_is_fast": True,
        "queue_words": "--a=b",
        "queue_name": "x=y",
        "lr": "-1",
        "keep": True,
    }
    assert parse_command(typed_command(experiment, flags)) == (experiment, flags)


def test_the_answering_command_tunes_every_batch_size_and_keeps_the_other_flags():
    first = make(command=typed_command("quick", {"batches": "4,8", "lr": "0.1", "out": "x y"}))
    words = "sweep run quick --out 'x y' --batches 4,8 --lr tuned --seeds auto"
    assert answering_command(first) == words
    grown = grow_plan(first, make(command=typed_command("quick", {"batches": "16"}), batches="16"))
    assert "--batches 4,8,16" in answering_command(grown)
    quick = typed_command("quick", {})
    assert answering_command(make(seeds=5, command=quick)).endswith("--lr tuned --seeds auto")
    assert answering_command(make(lr="tuned", command=quick)) is None
    one_seed = make(lr="tuned", seeds=1, command=quick)
    assert answering_command(one_seed).endswith("--seeds auto")


@pytest.mark.parametrize("microbatch", [None, 1])
def test_no_command_is_proposed_whose_steps_do_not_fit(microbatch):
    bound = {"microbatch_bound": 1, "microbatch_bound_alone": 1, "microbatch": microbatch}
    command = typed_command("quick", {"batches": "4,8"})
    smaller = CPU.model_copy(update=bound)
    assert answering_command(make(command=command, execution=smaller))
    misfit = smaller.model_copy(update={"reason": "By forecast, it does not fit."})
    with pytest.raises(SweepError, match=r"it does not fit\. .*in another --out") as refused:
        propose_answer(make(command=command, execution=misfit))
    assert ("Leave --microbatch out" in str(refused.value)) == (microbatch is not None)


def test_a_tuning_budget_below_a_step_is_refused_by_its_name():
    with pytest.raises(
        SweepError, match=r"tuning\.budget must .* 8 \(512 tokens\), got 100\. .*budget 512"
    ):
        make(lr="tuned", tuning={"budget": 100})
    old = make(lr="tuned", tuning={"budget": 600})
    with pytest.raises(
        SweepError, match=r"tuning\.budget must .* size 16 \(1024 tokens\), got 600"
    ):
        make(lr="tuned", tuning={"budget": 600}, batches="16", old=old)


def test_every_field_of_an_experiment_is_in_the_trial_id_or_decides_what_is():
    decides = {
        *("name", "question", "seeds", "tuning", "answer", "optimizers"),  # which trials there are
        "noise_scale",  # training has the same bits with and without it
        # resolved under other names
        *("budget", "batches", "chooses_batches", "lr", "vocabulary", "context", "model_option"),
        "init",
        *("text_column", "lora", "model_source", "replaced_sizes", "code_folder"),
    }
    assert Experiment.model_fields.keys() - Science.model_fields.keys() == decides


def test_one_optimizer_by_its_flag_gives_the_plan_of_the_setting():
    named = make(optimizer={"name": "sgd"})
    assert make(optimizers="sgd") == named and ids(named) != ids(make())
    assert make(optimizers="adamw") == make()
    assert {row.optimizer for row in named.trials} == {None}


@pytest.mark.parametrize("lr", ["1e-3", "sqrt", "tuned"])
def test_trials_of_several_optimizers_are_those_of_each_alone(lr):
    several = make(optimizers="adamw,muon,sgd", lr=lr)
    for name in ("adamw", "muon", "sgd"):
        alone = make(optimizers=name, lr=lr)
        assert [row.id for row in several.trials if row.optimizer == name] == ids(alone)
    assert len(several.trials) == 3 * len(make(lr=lr).trials)
    assert {row.arm for row in several.trials} == {*several.settings.arms}


def test_an_optimizer_has_its_own_centre_of_rates_and_time_scale_of_weight_decay():
    plan = make(optimizers="adamw,sgd,adafactor,mine:Own", lr="tuned")
    first = {row.optimizer: row for row in reversed(plan.trials) if row.id and row.batch_size == 4}
    usual, factors = first["adamw"], {"sgd": 300, "adafactor": 10, "mine:Own": 1}
    for name, factor in factors.items():
        assert first[name].learning_rate == pytest.approx(factor * usual.learning_rate)
        products = [row.learning_rate * row.weight_decay for row in (first[name], usual)]
        assert products[0] == pytest.approx(products[1])
    chosen = {"centre": 0.5, "centres": {"sgd": 2.0}}
    plan = make(optimizers="adamw,sgd", lr="tuned", tuning=chosen)
    assert plan.tuning_centre(Tuned(), Arm("adamw", 4)) == 0.5
    assert plan.tuning_centre(Tuned(), Arm("sgd", 4)) == 2.0


def test_more_batch_sizes_and_seeds_of_several_optimizers_keep_the_old_trials():
    settings = {"optimizers": "adamw,muon", "lr": "sqrt"}
    old = make(**settings)
    for other in ({"batches": "16"}, {"seeds": 5}):
        grown = grow_plan(old, new := make(old=old, **settings, **other))
        assert grown.trials[: len(old.trials)] == old.trials
        assert {*ids(grown)} == {*ids(old), *ids(new)}
        assert grown.has_looks == ("seeds" in other)
    with pytest.raises(SweepError, match="optimizers would change"):
        grow_plan(old, make(lr="sqrt", optimizers="adamw,muon,sgd"))


def test_a_sweep_of_the_muon_that_did_not_split_projections_does_not_grow():
    new = make(optimizers="adamw,muon")
    optimizer = new.settings.optimizer.model_copy(update={"options": {}})  # as in earlier plans
    earlier = new.settings.model_copy(update={"optimizer": optimizer})
    old = new.model_copy(update={"settings": earlier})
    for row in new.trials:
        id_before = trial_id(old.science(row, row.learning_rate))
        assert (id_before == row.id) == (row.optimizer == "adamw")
    with pytest.raises(SweepError, match=r"options\.muon would change"):
        grow_plan(old, new)
    with pytest.raises(SweepError, match=r"options\.muon would change"):
        propose_answer(old)


def test_a_command_gets_no_options_of_our_optimizers():
    settings = {"command": "true {batch_size} {learning_rate} {seed} {steps}", "batches": "4"}
    settings |= {"budget": 400, "optimizer": {"name": "muon"}}
    experiment = load_experiment(None, settings).model_copy(update={"precision": "fp32"})
    plan = build_plan(experiment, CPU)
    assert plan.settings.optimizer.options == {}


def test_the_answering_command_keeps_the_optimizers():
    command = typed_command("quick", {"batches": "4,8", "optimizers": "adamw,muon"})
    plan = make(batches="4,8", optimizers="adamw,muon", command=command)
    words = "sweep run quick --optimizers adamw,muon --batches 4,8 --lr tuned --seeds auto"
    assert answering_command(plan) == words
    assert answering_command(make(optimizers="adamw,muon", lr="tuned")) is None


def test_a_command_that_adds_seeds_until_all_is_clear_is_recorded_before_it_adds_any():
    first = make(command=("sweep", "run", "a"))
    auto = make(seeds="auto", old=first, command=("sweep", "run", "a", "--seeds", "auto"))
    assert grow_plan(first, auto).commands == first.commands + auto.commands
