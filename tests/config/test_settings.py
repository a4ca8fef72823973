"""Numbers as people write them, settings, experiments from TOML and flags, and user code."""

import re
import sys
from decimal import Decimal

import pytest

from sweep.config.execution import Execution
from sweep.config.experiment import Experiment
from sweep.config.load import load_experiment
from sweep.config.numbers import (
    format_bytes,
    format_count,
    format_seconds,
    parse_batches,
    parse_bytes,
    parse_count,
)
from sweep.config.settings import merge_settings, parse_settings, settings_of
from sweep.errors import SweepError
from sweep.orchestration.executors.build import services_table
from sweep.plan.plan import Inputs, build_plan
from sweep.training.process import run_job
from sweep.usercode.identity import check_code, describe_objects, identify_code

COUNTS = {"327.68M": 327680000, "3.2768e8": 327680000, "0.3268M": 326800, "200k": 200000}
COUNTS |= {"1B": 10**9, "16G": 16 * 10**9}
COUNTS |= {65536: 65536, "1_000": 1000}
NONSENSE = ("", "x", "-5", "0", "1.5", "nan", "inf", "1e99", "1e999999M", "3MM", "M", "1 2", "0x10")


@pytest.mark.parametrize(("text", "value"), COUNTS.items())
def test_counts(text, value):
    assert parse_count(text) == value


@pytest.mark.parametrize("text", [*NONSENSE, "1.2345k"])
def test_nonsense_counts_are_refused_with_what_would_be_right(text):
    with pytest.raises(SweepError, match="budget must be"):
        parse_count(text, "budget")


# As the five older systems, vendors, nvidia-smi, docker and Kubernetes write them.
SIZES = {"24GB": 24 * 10**9, "80GB": 80 * 10**9, "16GiB": 16 * 2**30, "1.5MiB": 3 * 2**19}
SIZES |= {"47.4GiB": int(47.4 * 2**30), "15.99 GiB": int(15.99 * 2**30), "28.49 GiB": 30590904565}
SIZES |= {"81559MiB": 81559 * 2**20, "16g": 16 * 10**9, "16Gi": 2**34, "2.7 gb": 2700000000}
SIZES |= {65536: 65536, "65_536": 65536}


# All sizes in the documents of the five older systems.
OLDER = "0.116GB|0.48GB|1.89 GB|2.7GB|2.73 GB|2.87 GB|3 GB|3.28 GB|4 GB|5.2 GB|6GB|6.34 GB|8.91 GB"
OLDER += "|9 GB|12 GB|12GB|15.99 GiB|16 GB|16 GiB|16GB|18GB|21.4 GB|21.78 GB|21.78GB|23.50 GB"
OLDER += "|24GB|28.49 GiB|41.06 GB|44.3 GB|47.4 GB|47.6 GB|48GB|80GB|256.00 MiB"


@pytest.mark.parametrize("text", OLDER.split("|"))
def test_sizes_of_the_older_systems(text):
    number, unit = re.fullmatch(r"([\d.]+) ?(\w+)", text).groups()
    scale = {"GB": 10**9, "GiB": 2**30, "MiB": 2**20}[unit]
    assert parse_bytes(text) == int(Decimal(number) * scale)


@pytest.mark.parametrize(("text", "value"), SIZES.items())
def test_sizes(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize(
    "text", ["", "GB", "-5GB", "0", "24GB of", "64Gbit", "½GB", "1e9", "9999999999TB", "nan"]
)
def test_nonsense_sizes_are_refused(text):
    with pytest.raises(SweepError, match="memory must be a size"):
        parse_bytes(text)


def test_batches_are_lists_or_ranges_of_powers_of_two():
    assert parse_batches("32,1,8") == (1, 8, 32)
    assert parse_batches("1..512") == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    assert parse_batches("4..4") == (4,)
    assert parse_batches([3, 5]) == (3, 5)


@pytest.mark.parametrize(
    "text", ["", "1,,2", "0", "-1", "a", "8..4", "3..8", "1..100", "..", "4,4", "1.5"]
)
def test_nonsense_batches_are_refused(text):
    with pytest.raises(SweepError, match="batches"):
        parse_batches(text)


def test_counts_and_seconds_are_written_for_people():
    assert format_count(327_680_000) == "327.68M" and format_count(640) == "640"
    assert format_count(999_999) == "1M" and format_count(999_994) == "999.99k"
    assert format_bytes(1023 * 1024) == "1023 KiB" and format_bytes(2**20 - 1) == "1 MiB"
    assert format_bytes(1.5 * 2**40) == "1.5 TiB" and format_seconds(1e9) == "11574 d"
    assert format_seconds(3.21) == "3.21 s" and format_seconds(7200) == "2 h"


ALL = [s for table in (Experiment, Execution, services_table()) for s in settings_of(table)]


def test_no_two_settings_share_a_name_and_all_have_a_help_text():
    assert len({setting.name for setting in ALL}) == len(ALL)
    assert all(setting.field.description for setting in ALL)


def test_settings_that_the_user_chose_are_told_from_defaults_and_wrong_ones_named():
    fields = merge_settings(Execution, {}, {"device_memory": "1GiB"})
    execution = parse_settings(Execution, fields, "flags")
    assert execution.device_memory_bytes == 2**30 and execution.zero == 0
    assert execution.model_fields_set == {"device_memory_bytes"}
    with pytest.raises(SweepError, match="zero"):
        parse_settings(Execution, {"zero": 4}, "flags")


def test_a_flag_and_a_table_are_both_heeded_in_any_order():
    flags = {"noise": True, "noise_scale": {"points": 4}}
    for ordered in (flags, dict(reversed(flags.items()))):
        noise = load_experiment("quick", ordered).noise_scale
        assert (noise.measure, noise.points) == (True, 4)


@pytest.mark.parametrize(
    "flags",
    [
        {"noise": True, "noise_scale": {"measure": False}},
        {"tune_centre": 0.1, "tuning": {"centre": 0.2}},
        {"workload": {"kind": "grpo", "group_size": 4}, "group_size": 8},
        {"workload": {"kind": "m:W", "grpo_settings": {"group_size": 4}}, "group_size": 8},
        {"model": {"preset": "small", "vocabulary": 300}, "vocabulary": 500},
        {"model": {"kind": "m:f", "options": {}}, "model_option": "width=3"},
    ],
)
def test_a_value_that_a_flag_and_a_table_set_is_refused(flags):
    with pytest.raises(SweepError, match=r"set the same value\. Leave one out\."):
        load_experiment("quick", flags)


def test_the_reference_is_the_default():
    experiment = load_experiment()
    assert experiment.name == "tinystories" and load_experiment("") == experiment
    assert experiment.batches == (1, 8, 32, 64, 128, 256)
    assert experiment.budget == 327_680_000


def test_batches_that_are_no_whole_groups_are_refused():
    with pytest.raises(SweepError, match=r"batches must be multiples of group_size .* Use 8\."):
        load_experiment("tinystories", {"workload": "grpo", "batches": "1,8"})
    with pytest.raises(SweepError, match="batches must be multiples of group_size"):
        load_experiment("grpo-words", {"group_size": 32})


USER_GRPO = 'kind = "mine:W"\ngrpo_settings = {prompt_tokens = 24, new_tokens = 72}'


def test_the_flags_of_grpo_are_keys_of_the_grpo_settings_of_a_users_class(tmp_path):
    flags = {"workload": "mine:W", "group_size": 4}
    settings = load_experiment("grpo-words", flags).workload.grpo_settings
    assert (settings.group_size, settings.new_tokens) == (4, 72)

    path = tmp_path / "mine.toml"
    path.write_text(f"budget = 10_000\nbatches = [4]\nmodel = 'small'\n[workload]\n{USER_GRPO}")
    settings = load_experiment(str(path), {"group_size": 2}).workload.grpo_settings
    assert (settings.group_size, settings.new_tokens) == (2, 72)


@pytest.mark.parametrize(
    ("name", "flags", "says"),
    [
        ("quick", {"unit": "x"}, "unit does not apply to 'pretrain', only to command"),
        ("quick", {"group_size": 4}, "group_size does not apply to 'pretrain', only to grpo"),
        ("grpo-words", {"workload": "mine:W", "unit": "x"}, "unit does not apply to 'mine:W'"),
    ],
)
def test_a_flag_of_another_workload_is_refused_by_its_name_with_the_workloads_that_have_it(
    name, flags, says
):
    with pytest.raises(SweepError, match=says):
        load_experiment(name, flags)


COMMAND = "true {batch_size} {learning_rate} {steps} {seed}"


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("direction", "max", "workload.direction must be 'minimize' or"),
        ("dirction", "minimize", "Did you mean 'workload.direction'"),
        ("group_size", 4, "'workload.group_size' does not apply to 'command', only to grpo"),
    ],
)
def test_a_mistake_in_the_table_of_a_command_names_its_key(key, value, says):
    flags = {"workload": {"kind": "command", "command": COMMAND, key: value}}
    with pytest.raises(SweepError, match=says):
        load_experiment(None, {**flags, "budget": 1000, "batches": "4"})


@pytest.mark.parametrize(
    ("workload", "flags"),
    [
        ("kind = 'grpo'\ngroup_size = 4", {"workload": "pretrain"}),
        ("kind = 'grpo'\ngroup_size = 4", {"command": COMMAND}),
        (f"command = '{COMMAND}'", {"workload": "grpo"}),
        (USER_GRPO, {"workload": "grpo"}),
    ],
)
def test_a_flag_does_not_drop_the_settings_of_the_files_workload(tmp_path, workload, flags):
    path = tmp_path / "mine.toml"
    path.write_text(f"budget = 10_000\nbatches = [8]\n[workload]\n{workload}")
    with pytest.raises(SweepError, match="settings of the workload"):
        load_experiment(str(path), flags)


def test_a_flag_changes_a_workload_without_settings_and_the_users_class(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("budget = 10_000\nbatches = [8]\nworkload = 'pretrain'")
    assert load_experiment(str(path), {"workload": "grpo"}).workload.samples
    path.write_text(f"budget = 10_000\nbatches = [8]\nmodel = 'small'\n[workload]\n{USER_GRPO}")
    workload = load_experiment(str(path), {"workload": "other:V"}).workload
    assert (workload.object, workload.grpo_settings.new_tokens) == ("other:V", 72)


def test_a_workload_of_python_may_be_a_table_without_an_experiment():
    flags = {"workload": {"kind": "grpo", "group_size": 4}, "batches": "4", "model": "small"}
    assert load_experiment(None, flags).workload.group_size == 4


@pytest.mark.parametrize("workload", ["3", "['pretrain']", "{kind = 3}"])
@pytest.mark.parametrize("flag", [{"group_size": 4}, {"objective": "b"}])
def test_a_workload_that_is_neither_text_nor_table_is_refused_with_any_flag(
    tmp_path, workload, flag
):
    path = tmp_path / "mine.toml"
    path.write_text(f"budget = 10_000\nbatches = [4]\nworkload = {workload}")
    with pytest.raises(SweepError, match="workload must be pretrain, grpo"):
        load_experiment(str(path), flag)


@pytest.mark.parametrize(("optimizers", "lr"), [("", "0.3"), ('optimizers = "sgd"', None)])
def test_a_file_s_rate_centres_a_search_unless_it_lists_optimizers(tmp_path, optimizers, lr):
    file = tmp_path / "own.toml"
    budget = "budget = 1600\nbatches = [4, 8]\n"
    file.write_text(f'name = "own"\nworkload = "quadratic"\nlr = "0.3"\n{optimizers}\n{budget}')
    assert load_experiment(str(file), {"lr": "tuned"}).tuning.own_rate.lr == lr


@pytest.mark.parametrize(("model", "lr"), [(None, "0.005"), ("quick", "0.005"), ("small", None)])
def test_a_file_s_rate_is_that_of_its_own_model(model, lr):
    assert load_experiment("quick", {"model": model}).tuning.own_rate.lr == lr


def test_a_model_flag_brings_its_own_sizes_and_the_workload_quadratic_its_model():
    model = load_experiment("tinystories", {"model": "small"}).model
    assert (model.vocabulary, model.context) == (2048, 128)
    sizes = {"vocabulary": 512, "context": 32}
    model = load_experiment("tinystories", {"model": "small", **sizes}).model
    assert (model.vocabulary, model.context) == (512, 32)
    experiment = load_experiment(None, {"workload": "quadratic", "batches": "4"})
    assert (experiment.name, experiment.model.vocabulary, experiment.data) == (
        "quadratic",
        None,
        None,
    )


def test_a_file_may_spell_the_model_out(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(
        'budget = "1M"\nbatches = [4]\ndata = "synthetic"\n'
        '[model]\nkind = "transformer"\nname = "mine"\nvocabulary = 300\ncontext = 16\n'
        "d_model = 32\nlayers = 1\nheads = 2\nd_ff = 64\n"
    )
    experiment = load_experiment(str(path))
    assert experiment.name == "own" and experiment.model.name == "mine"


def refusal(path, text):
    """Return the one sentence that refuses an experiment of this text."""
    path.write_text(text)
    with pytest.raises(SweepError) as caught:
        load_experiment(str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


WRONG_TEXTS = [
    ("bugdet = 2", "'bugdet' is not a known key. Did you mean 'budget'"),
    ("name = ", "must be TOML"),
    ("\x00", "must be TOML"),
    ("learning_rate = 0.1", "Did you mean 'lr'?"),
    ("seed = 3", "Did you mean 'seeds'?"),
    ("batch_size = 8", "Did you mean 'batches'?"),
    ("optimizer.name = 'adam'", "Did you mean 'adamw'?"),
    ("precision = 'bf61'", "got 'bf61'. Did you mean 'bf16'?"),
    ("schedule.name = 'cosin'", "cosine, constant or your module:object"),
    ("workload = 'x'", "workload"),
    ("init = 'x'\nworkload = 'quadratic'", "apply only to language models"),
    ("lora = 4", "'model.lora' does not apply to 'transformer'"),
    ("model = 'gpt2'\nlora = 4", "lora needs pretrained weights. Name them with --init"),
    ("model = 'hf:llama'", "model must have the form hf:OWNER/NAME[@REVISION]"),
    ("workload = 'quadratic'\nmodel = 'quick'", "workload 'quadratic' cannot train 'quick'"),
    ("target = 3.0\n[schedule]\nname = 'cosine'", "schedule.name must be constant"),
    ("target = 3.0\n[tuning]\nbudget = 1", "tuning.budget does not apply"),
    ("[workload]\nkind = 'grpo'\ntask = 'text'\ngroup_size = 2", "workload.reward"),
]


@pytest.mark.parametrize(("text", "says"), WRONG_TEXTS)
def test_bad_files_get_one_sentence(tmp_path, text, says):
    assert says in refusal(tmp_path / "bad.toml", f"budget = 1\nbatches = [2]\n{text}")
    sentence = refusal(tmp_path / "bad.toml", "budget = 1")
    assert "batches must be set. Add it." in sentence and str(tmp_path / "bad.toml") in sentence


SETTINGS = {"model": "'quick'", "data": "'synthetic'", "budget": "196_608", "batches": "[4]"}
HUGE = "1" + 20 * "0"
WRONG_SETTINGS = {  # by key: a part of the message, and values that are refused
    "name": ("a valid string", "{}", "true", "5", "1979-05-27"),
    "workload": ("must be pretrain, grpo", "3", "['pretrain']", "1.5", "'pretrian'"),
    "data": ("a valid string", "{}", "[]", "true", "nan"),
    "model": ("must be", "['quick']", "true", "nan", "''", "5"),
    "budget": (
        "budget must be",
        "{}",
        "['1M', '1M']",
        "[[1]]",
        "true",
        "-1",
        "0",
        "nan",
        "inf",
        "1.5",
        "'x'",
    ),
    "batches": ("batch", "{}", "[]", "1.5", "true", "nan", "[1.5]", "[[4]]", "['x']", "[true]"),
    "seeds": ("seeds", "{}", "[1]", "true", "-1", "1.5", "nan", "1001"),
    "vocabulary": ("vocabulary", "{}", "[512]", "-1", "'many'"),
    "workload.task": ("does not apply to 'pretrain'", "'words'"),
    "tuning": ("tuning must be a table, got 3", "3"),
    "model.d_ff": ("model.d_ff", "1e20", HUGE),
    "model.heads": ("heads", "{}", "5", "0"),
    "model.depth": ("'model.depth' is not a known key", "3"),
    "optimizer.beta1": ("optimizer.beta1", "{}", "[0.9]", "-0.1", "1.0", "nan", "'high'", "true"),
    "optimizer.beta3": ("Did you mean 'optimizer.beta", "0.9"),
    "schedule.warmup_fraction": ("schedule.warmup_fraction", "-0.1", "1.1", "nan", "'1 %'"),
    "schedule.warmup_min_steps": ("schedule.warmup_min_steps", "[]", "-1", "1.5", "inf"),
    "evaluation.points": ("evaluation.points", "{}", "true", "'1'", HUGE, "0", "2.5"),
    "evaluation.noise_points": ("'evaluation.noise_points' is not a known key. Remove it", "3"),
    "evaluation.sequence": ("Did you mean 'evaluation.sequences'", "64"),
}


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [(key, value, says) for key, (says, *values) in WRONG_SETTINGS.items() for value in values],
)
def test_settings_of_the_wrong_type_or_size(tmp_path, key, value, says):
    table, _, nested = key.partition(".")
    settings = {**SETTINGS, table: f"{{{nested} = {value}}}" if nested else value}
    text = "".join(f"{name} = {given}\n" for name, given in settings.items())
    assert says in refusal(tmp_path / "mine.toml", text)


def test_unknown_experiments_are_refused_with_the_known_names():
    with pytest.raises(SweepError, match="quadratic, quick, tinystories"):
        load_experiment("nope.toml")


PROJECT = {
    "my_project/__init__.py": "",
    "my_project/model.py": "import importlib, numpy\nfrom .layers import width\n"
    "import parts.sizes\nimportlib.import_module('plugin')\n"
    "def build(**sizes):\n    from my_project import late\n",
    "my_project/layers.py": "width = 8\n",
    "my_project/late.py": "import torch\n",
    "parts/sizes.py": "",  # a namespace package
    "plugin.py": "import json",
    "my_project/unrelated.py": "x = 1\n",
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def identify(name="my_project.model:build"):
    return run_job(identify_code, [name])[0]


def test_code_is_its_module_the_projects_modules_that_it_imports_and_package_versions(project):
    code = identify()
    assert code["files"].keys() == PROJECT.keys() - {"my_project/unrelated.py"}
    assert code["packages"].keys() == {"numpy", "torch"} and code == identify()


VALUES = "{batch_size} {learning_rate} {steps} {seed}"
COMMANDS = {
    f"bash -e -c 'python3 run.py {VALUES}'": ["near.py", "run.py"],
    f"sh -c 'exec python3 run.py {VALUES} > near.py 2>&1' --note": ["near.py", "run.py"],
    f"sh -c 'exec python3 run.py {VALUES} > out.txt 2>&1'": ["near.py", "run.py"],
    f"python3 -um a.b.go {VALUES}": ["a/__init__.py", "a/b/__init__.py", "a/b/go.py"],
    f"python3 link.py {VALUES}": ["link.py", "near.py", "others.py"],
    f"env PYTHONPATH=lib python3 uses.py {VALUES}": ["lib/helper.py", "uses.py"],
    f"./tool {VALUES}": ["near.py", "tool"],
}
FILES = {
    "run.py": "import near",
    "near.py": "",
    "out.txt": "",
    "a/__init__.py": "",
    "a/b/__init__.py": "",
    "a/b/go.py": "",
    "elsewhere/real.py": "import others, near",
    "elsewhere/others.py": "",
    "uses.py": "import helper",
    "lib/helper.py": "",
    "tool": "#!/usr/bin/env python3\nimport near",
}


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "link.py").symlink_to(tmp_path / "elsewhere/real.py")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_the_files_of_a_command_are_those_that_it_runs_and_imports(command, scripts):
    assert sorted(identify(command)["files"]) == COMMANDS[command]


def test_a_script_has_the_same_identity_in_any_current_folder(scripts, monkeypatch):
    command = f"python3 {scripts}/run.py {VALUES}"
    before = identify(command)
    monkeypatch.chdir(scripts.parent)
    assert identify(command) == before


def test_a_package_that_takes_the_place_of_a_module_is_noticed(project):
    code = identify("plugin:json")
    run_job(check_code, ["plugin:json"], code)
    (project / "plugin").mkdir()
    (project / "plugin/__init__.py").write_text("import json  # another")
    with pytest.raises(SweepError, match="has changed since the sweep was planned"):
        run_job(check_code, ["plugin:json"], code)
    assert describe_objects(["plugin:json"]).startswith("plugin:json (")
    assert "__init__.py" in describe_objects(["plugin:json"])


def planned_id():
    experiment = load_experiment("quick", {"model": "my_project.model:build", "precision": "fp32"})
    return build_plan(experiment, Execution(device="cpu"), Inputs(code=identify())).trials[0].id


@pytest.mark.parametrize("file", PROJECT)
def test_the_trial_id_changes_with_the_code_and_with_nothing_else(project, file):
    before = planned_id()
    (project / file).write_text((project / file).read_text() + "# changed\n")
    assert (planned_id() != before) is (file != "my_project/unrelated.py")


@pytest.mark.parametrize("name", ["no_colon", "no_such_module:f", "sys:no_such_name", ":f", "os:"])
def test_names_of_no_object_are_refused(name, project):
    with pytest.raises(SweepError):
        identify(name)


@pytest.mark.parametrize("name", ["tinystories", "quick"])
def test_a_target_makes_the_rate_constant_and_averages_the_weights(name):
    schedule = load_experiment(name, {"target": 3.5}).schedule
    assert (schedule.name, schedule.average) == ("constant", 0.1)


@pytest.mark.parametrize(
    ("name", "value", "example"),
    [
        ("seeds", "0", "8, or auto"),
        ("batches", "4;8", "1,8,32"),
        ("budget", "much", "327.68M or 10min"),
    ],
)
def test_the_example_of_a_number_is_one_of_its_kind(name, value, example):
    with pytest.raises(SweepError, match=rf"Write it such as {example}\."):
        load_experiment("quick", {name: value})


def test_a_warmup_of_more_than_a_tenth_is_refused_and_one_of_a_tenth_is_honoured():
    experiment = load_experiment("quick", {"schedule": {"warmup_fraction": 0.1}})
    assert experiment.schedule.warmup_fraction == 0.1
    for fraction in (0.1001, 0.2, 1.0):
        with pytest.raises(SweepError, match=r"warmup_fraction must be .* 0\.1, got .*\. Lower it"):
            load_experiment("quick", {"schedule": {"warmup_fraction": fraction}})


def test_the_schedule_of_a_file_is_kept_with_another_model(tmp_path):
    path = tmp_path / "mine.toml"
    lines = ["budget = 100000", "batches = [4]", "model = 'quick'", "context = 32"]
    path.write_text("\n".join([*lines, "[schedule]", "warmup_min_steps = 7"]))
    experiment = load_experiment(str(path), {"model": "small"})
    assert experiment.schedule.warmup_min_steps == 7
    [size] = experiment.replaced_sizes
    assert (size.owner, size.name, size.size, size.used) == ("experiment", "context", 32, 128)
    assert not load_experiment(str(path), {"model": "small", "context": 64}).replaced_sizes
    assert not load_experiment(str(path)).replaced_sizes
