"""Messages repeat a bounded part of an input, and keep what follows it."""

import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.analysis.tables import read_csv
from sweep.cli import main
from sweep.config.execution import Execution
from sweep.config.experiment import Experiment
from sweep.config.load import load_experiment
from sweep.config.metrics import check_metric_name
from sweep.config.models import model_preset
from sweep.config.numbers import parse_batches
from sweep.config.settings import settings_of
from sweep.errors import MOST_CHARACTERS, CorruptFile, SweepError, cut, describe_error, shorten
from sweep.orchestration.executors.build import services_table
from sweep.tracking.addresses import check_tracking_uri
from sweep.trial.files import read_json, read_metrics, seal, write_json
from sweep.trial.folder import SweepFolder
from tests.analysis.fake_sweeps import write_fake_sweep

WORDS = " ".join(f"w{number:04}" for number in range(834))  # 5,003 characters
QUOTES = 'it\'s "so" ' * 500
LONG = {"run": "x" * 5000, "words": WORDS, "quotes": QUOTES, "path": "/a b" * 1250}
REMEDY = "Use 8 or 10."


def repeated(message, text):
    """Return how many characters of a text a message repeats in pieces of at least ten."""
    pieces, rest = 0, message.replace("\\'", "'").replace('\\"', '"')
    for size in range(min(len(text), len(rest)), 9, -1):
        for start in range(len(rest) - size + 1):
            if rest[start : start + size] in text:
                return size + repeated(rest[start + size :], text)
    return pieces


def echoed(message, text):
    """Return a bound on the characters of a text that a message repeats."""
    if set(text) == {"x"}:
        return message.count("x")
    if text == WORDS:
        return 6 * sum(word.strip("'\".,") in WORDS.split() for word in message.split())
    return repeated(message, text)


@given(st.text(min_size=201), st.sampled_from([SweepError, CorruptFile]))
def test_a_quoted_input_is_cut_and_the_remedy_stays(text, kind):
    message = str(kind(f"batch_size must be a number, got {text!r}. {REMEDY}"))
    assert message.startswith("batch_size must be a number, got ")
    assert message.endswith(f". {REMEDY}")
    assert len(message) <= len(f"batch_size must be a number, got . {REMEDY}") + MOST_CHARACTERS


@given(st.lists(st.text(st.characters(exclude_categories=["Zs", "Cc", "Zl", "Zp"]), min_size=40)))
def test_all_inputs_of_a_message_together_are_bounded(texts):
    own = " and ".join("" for _ in texts)
    assert len(shorten(" and ".join(texts))) <= len(own) + max(MOST_CHARACTERS, 4 * len(texts))


@given(st.text(max_size=190))
def test_a_short_input_stays_as_it_is(text):
    message = f"lr must be a number, got {text!r:.190}. {REMEDY}"
    assert str(SweepError(message)) == message


@given(st.text(max_size=2000))
def test_shortening_is_idempotent_and_survives_processes(text):
    assert shorten(shorten(text)) == shorten(text)
    error = SweepError(text)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert len(cut(text)) <= MOST_CHARACTERS


def test_the_words_of_our_own_sentences_are_not_cut():
    sentence = "The users' trials' rates can't be " + "known and the sweep's " * 40 + "'end'."
    assert shorten(sentence) == sentence


def test_an_error_of_a_library_is_cut_in_its_middle():
    text = describe_error(ValueError(f"first {WORDS} last"))
    assert text.startswith("ValueError: first") and text.endswith("last")
    assert len(text) <= MOST_CHARACTERS


# ---- the command line ----------------------------------------------------------------------------


@pytest.fixture
def refuse(tmp_path, monkeypatch, capfd):
    """Call a command that must end with exit code 2, and return its message."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("SWEEP_CACHE", str(tmp_path / "cache"))

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["sweep", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        message = capfd.readouterr().err
        assert "Traceback" not in message and "bug in sweep" not in message, message[-2000:]
        assert ended.value.code in (0, 2)
        return message

    return call


FLAGS = [s.name for table in (Experiment, Execution, services_table()) for s in settings_of(table)]
PLAN = ("plan", "quadratic", "--batches", "4", "--budget", "400", "--device", "cpu")


@pytest.mark.parametrize("kind", LONG)
def test_no_option_is_repeated_with_more_than_200_characters(refuse, kind):
    for flag in FLAGS:
        message = refuse(*PLAN, f"--{flag.replace('_', '-')}={LONG[kind]}")
        assert echoed(message, LONG[kind]) <= MOST_CHARACTERS, (flag, message)


@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize(
    "words",
    [
        ("{}",),
        ("--{}",),
        ("run", "--{}"),
        ("run", "quick", "{}"),
        ("run", "quick", "--{}=1"),
        ("run", "{}"),
        ("run", "{}.toml"),
        ("run", "quick", "--out", "{}"),
        ("run", "quick", "--only", "{}", "--dry-run"),
        ("run", "quick", "--retry", "{}"),
        ("plan", "quick", "--cluster", "{}"),
        ("plan", "quick", "--price", "{}"),
        ("plan", "quick", "--command", "{} {{batch_size}} {{steps}} {{learning_rate}} {{seed}}"),
        ("plan", "quick", "--command", "true {{{}}}"),
        ("status", "{}"),
        ("log", "{}"),
        ("log", "{}", "{}"),
        ("open", "{}"),
        ("report", "{}"),
        ("report", "--from-mlflow", "{}", "--experiment", "x"),
        ("report", "--from-mlflow", "sqlite:///x.db", "--experiment", "{}"),
        ("answer", "{}"),
        ("answer", "x.csv", "--metric", "{}"),
        ("answer", "x.csv", "--direction", "{}"),
        ("ui", "{}", "--port", "{}"),
    ],
    ids=" ".join,
)
def test_no_word_is_repeated_with_more_than_200_characters(refuse, words, kind):
    message = refuse(*(word.format(LONG[kind]) for word in words))
    assert echoed(message, LONG[kind]) <= MOST_CHARACTERS, message


@pytest.mark.parametrize("start", ["", "./", "../work/", "absolute"])
def test_a_path_of_words_within_a_given_folder_is_cut(refuse, tmp_path, start):
    words = WORDS[:239]
    folder = tmp_path / "work/some tables"
    folder.mkdir()
    path = folder / f"{words}.csv"
    path.write_text("batch_size,loss\n1,2\n1,2,3\n")
    word = str(folder) if start == "absolute" else f"{start}some tables"
    message = refuse("audit", word)
    assert "line 3" in message and message.rstrip().endswith("header.")
    assert words[:30] in message and ".csv" in message
    assert repeated(message, f"{word}/{path.name}") <= MOST_CHARACTERS


def test_a_path_of_words_in_the_working_directory_is_cut(refuse, tmp_path):
    words = WORDS[:239]
    (tmp_path / f"work/{words}").mkdir()
    (tmp_path / f"work/{words}/{words}.csv").write_text("batch_size,loss\n1,2\n1,2,3\n")
    for folder in (".", words):
        message = refuse("audit", folder)
        assert repeated(message, f"{words}/{words}.csv") <= MOST_CHARACTERS, message


def test_a_shortened_value_keeps_its_end_and_says_that_it_is_shortened():
    for call, value in (
        (parse_batches, ",".join(["7"] * 300)),
        (check_metric_name, f"valid/{'x y' * 200}end"),
        (check_tracking_uri, f"ftp://{'xy' * 200}end"),
    ):
        with pytest.raises(SweepError) as raised:
            call(value)
        assert " … " in str(raised.value) and f"{value[-20:]}'" in str(raised.value)
        assert echoed(str(raised.value), value) <= MOST_CHARACTERS


def test_many_short_words_are_cut_too(refuse):
    message = refuse("run", "quick", *WORDS.split())
    assert echoed(message, WORDS) <= MOST_CHARACTERS, message


@pytest.mark.parametrize("kind", LONG)
def test_no_variable_is_repeated_with_more_than_200_characters(refuse, monkeypatch, kind):
    monkeypatch.setenv("SWEEP_PLAN_DEVICE", LONG[kind])
    message = refuse("plan", "quadratic", "--batches", "4")
    assert message and echoed(message, LONG[kind]) <= MOST_CHARACTERS, message


@pytest.mark.parametrize("words", [["{}"], ["a", "{}"], ["--{}"]], ids=" ".join)
def test_a_worker_repeats_no_word_at_length(words):
    command = [sys.executable, "-m", "sweep.training", *(word.format(WORDS) for word in words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert echoed(done.stderr, WORDS) <= MOST_CHARACTERS


# ---- files ---------------------------------------------------------------------------------------


def toml_text(text):
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@pytest.mark.parametrize("kind", LONG)
def test_no_key_or_value_of_an_experiment_is_repeated_at_length(refuse, tmp_path, kind):
    text, path = toml_text(LONG[kind]), tmp_path / "mine.toml"
    keys = ("model", "workload", "data", "budget", "batches", "lr", "seeds", "init", "optimizers")
    contents = [f"{key} = {text}" for key in keys]
    contents += [f"{text} = 1", f"[{text}]", f"{text} = 1\n{text} = 2", f"model = [{text}]"]
    contents += [f"[model]\n{text} = 1", f"[schedule]\nname = {text}", f"command = {text}"]
    contents += [f"command = 'true'\n{text} = 1", f"[tuning]\ndimensions = [{text}]"]
    contents += [LONG[kind], f"x = {LONG[kind]}"]
    for content in contents:
        path.write_text(content)
        message = refuse("plan", path, "--batches", "4")
        assert message and echoed(message, LONG[kind]) <= MOST_CHARACTERS, (content[:40], message)


@pytest.mark.parametrize("kind", LONG)
def test_no_text_of_a_plan_or_of_a_record_is_repeated_at_length(refuse, tmp_path, kind):
    folder, text = SweepFolder(tmp_path / "s"), LONG[kind]
    write_fake_sweep(folder.path, batches="4", points=5)
    plan = read_json(folder.plan_path)
    changes = [
        {"experiment": text, "trials": [{"id": text}]},
        {"sweep_uid": text},
        {"commands": [[text]]},
        {"tokens_per_sequence": text},
        {text: 1},
        {"settings": plan["settings"] | {"workload": text}},
        {"settings": plan["settings"] | {text: 1}},
        {"trials": [plan["trials"][0] | {"id": text}]},
        {"trials": [plan["trials"][0] | {"stage": text}]},
        {"format_version": text},
    ]
    for change in changes:
        write_json(folder.plan_path, plan | change)
        for command in ("status", "answer"):
            message = refuse(command, folder.path)
            assert echoed(message, text) <= MOST_CHARACTERS, (change, message)
    write_json(folder.plan_path, plan)
    for record in ({"tracking_uri": text}, {text: text}, {"tracking_uri": f"http://{text}"}):
        write_json(folder.tracking_path, {"is_default": False, "sweep_uid": "1"} | record)
        message = refuse("ui", folder.path)
        assert echoed(message, text) <= MOST_CHARACTERS, (record, message)


HEADER = "stage,policy,batch_size,seed,learning_rate,state,final_valid_loss,seconds_training"
ROW = "report,fixed,4,0,1e-3,COMPLETE,1.0,1.0"


@pytest.mark.parametrize("kind", LONG)
def test_no_cell_or_header_of_a_table_is_repeated_at_length(refuse, tmp_path, kind):
    path, cell = tmp_path / "trials.csv", '"' + LONG[kind].replace('"', '""') + '"'
    for index, _ in enumerate(ROW.split(",")):
        cells = ROW.split(",")
        cells[index] = cell
        path.write_text(f"{HEADER}\n{','.join(cells)}\n")
        message = refuse("answer", path)
        assert echoed(message, LONG[kind]) <= MOST_CHARACTERS, (index, message)
    path.write_text(f"{HEADER.replace('stage', cell)}\n{ROW}\n")
    message = refuse("answer", path)
    assert message and echoed(message, LONG[kind]) <= MOST_CHARACTERS, message


POINT = b'{"time": 1.0, "step": 1, "tokens": 1}\n'
BROKEN = [
    (
        load_experiment,
        SweepError,
        "must be TOML, but .*line 3",
        b"budget = 1\nbatches = [4\nlr = 3\n",
    ),
    (load_experiment, SweepError, "must be TOML, but .*line 3", b"budget = 1\n\nlr = \n"),
    (
        load_experiment,
        SweepError,
        "TOML, but line 2 has bytes that are not UTF-8",
        b"a = 1\nb = '\xff'\n",
    ),
    (read_json, CorruptFile, "must be JSON, but .*line 3", b'{"trials": [\n1,\n'),
    (read_json, CorruptFile, "must be JSON, but .*line 2", b'{"a": 1}\n{"b": 2}'),
    (read_json, CorruptFile, "line 3 has bytes that are not UTF-8", b'{"a": 1,\n\n"\xff": 2}'),
    (read_json, CorruptFile, "must be JSON, but .*not an object", b"[1]"),
    (read_json, CorruptFile, "must be JSON, but .*nested too deeply", b"[" * 100_000),
    (read_metrics, CorruptFile, "damaged in line 2.*column", POINT + b'{"time": \n'),
    (read_metrics, CorruptFile, "damaged in line 2.*point of curves", POINT + b'{"time": "x"}\n'),
    (read_metrics, CorruptFile, "damaged in line 1", b"\n"),
    (read_csv, SweepError, "must be a CSV file, but .*line 3", b"a,b\n1,2\n1,2,3\n"),
    (read_csv, SweepError, "line 3 has bytes that are not UTF-8", b"a,b\n1,2\n1,\xff\n"),
    (read_csv, SweepError, "must be a CSV file, but .*No columns", b""),
]


@pytest.mark.parametrize(
    ("read", "error", "says", "content"),
    BROKEN,
    ids=[f"{read.__name__} {says}" for read, _, says, _ in BROKEN],
)
def test_a_parser_tells_its_reason_and_the_line(tmp_path, read, error, says, content):
    path = tmp_path / "file.toml"
    path.write_bytes(content)
    with pytest.raises(error, match=says):
        read(str(path) if read is load_experiment else path)


def test_a_config_of_a_model_that_is_no_json_is_refused_with_its_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama",\n')
    with pytest.raises(SweepError, match=r"config\.json must be JSON, but .*line 2"):
        load_experiment("quick", {"model": str(tmp_path)})
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(SweepError, match=r"config\.json must be an object of JSON"):
        load_experiment("quick", {"model": str(tmp_path)})


def test_a_name_of_a_model_is_cut_before_the_remedy():
    with pytest.raises(SweepError) as raised:
        model_preset("x" * 5000)
    assert str(raised.value).endswith("Correct it.") and str(raised.value).count("x") < 250
    assert seal({})["sha256"]
