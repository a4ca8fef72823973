"""Roles of files by the words of their names, and what a folder must not leave open."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.data.files import locate_files, role_of
from sweep.data.sources import find_files, identify_data
from sweep.errors import SweepError
from tests.data.conftest import json_lines

TEXT = "a cat\n<|endoftext|>\na dog\n"


def folder_of(path, *names):
    path.mkdir(parents=True, exist_ok=True)
    for name in names:
        is_json = name.endswith((".jsonl", ".ndjson"))
        (path / name).write_bytes(json_lines(["a", "b"]) if is_json else TEXT.encode())
    return str(path)


def roles_of(source):
    located = locate_files(source)
    return {role: [path.name for path in paths] for role, paths in located.roles.items()}


@pytest.mark.parametrize(
    ("role", "names"),
    {
        "train": (
            "train.txt TRAIN.md train train-00000-of-00003.jsonl train_data.txt wiki.train.tokens "
            "ptb.train TinyStoriesV2-GPT4-train.txt trainData.txt trainset.csv training.jsonl "
            "training_data.txt train2.txt.gz my_train.txt trn.txt"
        ),
        "valid": (
            "valid.txt validation.txt val.text VALID.md validation-00000-of-00001.parquet "
            "TinyStoriesV2-GPT4-valid.txt val_data.txt wiki.valid.tokens my-dev.txt dev ptb.valid "
            "valSet.csv devset.txt development.txt vld.txt stories_validate.txt stories-vld.txt "
            "validating.txt"
        ),
        "test": (
            "test.txt eval.jsonl holdout held-out.txt heldout.csv wiki.test.tokens test-0-of-1.csv "
            "evaluation.jsonl testing.txt testset.txt my_eval_data.txt tst.csv stories_unseen.txt"
        ),
        None: (
            "trainer.txt evaluation_notes.md interval.txt notes.txt latest.txt contest.txt "
            "developer.md training-plan.md invalid.txt medieval.txt strain.txt 7.txt "
            "tests-of-time.txt"
        ),
    }.items(),
)
def test_a_name_has_a_role_by_whole_words(role, names):
    for name in names.split():
        assert role_of(name) == role, name


@pytest.mark.parametrize("name", ["train_valid.txt", "train.test.csv", "valTest.txt", "dev_test"])
def test_a_name_with_words_of_two_roles_is_refused(tmp_path, name):
    with pytest.raises(SweepError, match=name):
        locate_files(folder_of(tmp_path, name, "other.txt"))
    assert roles_of(str(tmp_path / name)) == {"text": [name]}  # alone, it needs no role


def test_all_parts_of_a_role_are_read_in_sorted_order(tmp_path):
    names = [f"train-{i:05}-of-00003.jsonl" for i in (2, 0, 1)]
    folder = folder_of(tmp_path, *names, "validation-00000-of-00001.jsonl", "dataset_infos.json")
    expected = {"train": sorted(names), "valid": ["validation-00000-of-00001.jsonl"]}
    assert roles_of(folder) == expected
    assert list(locate_files(folder).left_out) == ["dataset_infos.json"]
    numbered = folder_of(tmp_path / "numbered", "train1.txt", "train2.txt", "val1.txt")
    assert roles_of(numbered) == {"train": ["train1.txt", "train2.txt"], "valid": ["val1.txt"]}


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        ("train-00000-of-00003.txt train-00002-of-00003.txt", "number 1"),
        ("part-2-of-3.txt part-3-of-3.txt", "number 1"),
        ("a_0_of_2.txt", "number 1"),
        ("train-0-of-1.txt val-0-of-2.txt", "number 1"),
    ],
)
def test_a_missing_part_of_a_file_is_refused(tmp_path, names, missing):
    with pytest.raises(SweepError, match=missing):
        locate_files(folder_of(tmp_path, *names.split()))


def test_parts_may_be_counted_from_one(tmp_path):
    assert len(roles_of(folder_of(tmp_path, "p-1-of-2.txt", "p-2-of-2.txt"))["text"]) == 2


@pytest.mark.parametrize(
    "names",
    [
        "valid.txt other.txt",  # what is for training?
        "my-dev.txt",
        "train.txt train.jsonl",  # the same twice?
        "TinyStories-train.txt TinyStoriesV2-GPT4-train.txt",
        "val.txt valid.txt train.txt",
        "train-0-of-1.txt train-0-of-2.txt train-1-of-2.txt",
        "the-train-to-york.txt cats.txt",
        "valid.html train.txt",  # a role that cannot be read
        "train.bin val.bin input.txt",
        "test.txt",  # nothing is for training
        "test.txt eval.jsonl",
        "page.html README.md",
        "storiesvalid.txt storiestrain.txt",  # roles that are not words of their own
        "storiesvalid.txt corpus.txt",
        "storiesvalidation.txt corpus.txt",
        "storiesholdout.txt",
        "storyval.txt story.txt",
        "stories.txt stories-testing.txt",
        "evaluation_stories.txt training_stories.txt",
        "xdev.txt xtrn.txt",
        "valstories.txt trnstories.txt",
        "wikitest2.txt wiki1.txt",
    ],
)
def test_a_folder_that_does_not_tell_what_is_for_training_is_refused(tmp_path, names):
    with pytest.raises(SweepError, match=r"\A[^\n]+\Z") as caught:
        locate_files(folder_of(tmp_path, *names.split()))
    assert names.split()[0] in str(caught.value)


@pytest.mark.parametrize(
    "names",
    [
        "trainer.txt tester.txt trained.txt tested.txt",
        "interval.txt medieval.txt rival.txt latest.txt contest.txt",
        "training-plan.md evaluation_notes.md",
        "invalid.txt strain.txt constraint.txt restrain.txt retrain.txt",
        "developer.md device.md value.md validity.md",
        "storiestrain.txt",
        "chapter.txt chapter_one.txt chapter_two.txt",
    ],
)
def test_words_that_only_begin_or_end_like_a_role_have_none(tmp_path, names):
    assert roles_of(folder_of(tmp_path, *names.split())) == {"text": sorted(names.split())}


def test_a_file_whose_role_is_not_a_word_of_its_own_is_left_out_beside_training_data(tmp_path):
    folder = folder_of(tmp_path, "train.txt", "storiesvalid.txt")
    assert roles_of(folder) == {"text": ["train.txt"]}
    assert list(locate_files(folder).left_out) == ["storiesvalid.txt"]


@pytest.mark.parametrize(
    "name",
    [
        *("SHA256SUMS", "md5sums.txt", "sha512-sum.txt", "checksums.txt", "CITATION.cff"),
        *("requirements.txt", "requirements-dev.txt", "CHANGELOG.md", "AUTHORS", "metadata.txt"),
        *("stories.txt.sha256", "stories.md5"),
    ],
)
def test_a_file_about_the_others_is_left_out_with_a_reason(tmp_path, name):
    folder = folder_of(tmp_path, "authors_of_the_south.txt", "requirements_analysis.md", name)
    texts = ["authors_of_the_south.txt", "requirements_analysis.md"]
    assert roles_of(folder) == {"text": texts}
    assert list(locate_files(folder).left_out) == [name]


@pytest.mark.parametrize("together", [False, True])
@given(
    stem=st.sampled_from(["stories", "wiki", "ptb", "text", "big_corpus", "x"]),
    word=st.sampled_from(
        [
            *("valid", "validation", "validate", "val", "vld", "dev"),
            *("test", "tst", "eval", "evaluation", "testing", "unseen", "holdout"),
        ]
    ),
    is_last=st.booleans(),
)
def test_a_validation_file_is_never_trained_on_without_a_word(
    tmp_path_factory, together, stem, word, is_last
):
    parts = [stem, word] if is_last else [word, stem]
    name = f"{('' if together else '_').join(parts)}.txt"
    folder = folder_of(tmp_path_factory.mktemp("names"), f"{stem}.txt", name)
    try:
        located = locate_files(folder)
    except SweepError as error:
        assert name in str(error)
        return
    assert name in located.left_out


def test_what_is_not_read_is_left_out_with_a_reason(tmp_path):
    names = (
        "train.txt val.txt notes.txt test.txt README.md .hidden page.html old.txt~ noticeboard.md"
    )
    folder = folder_of(tmp_path, *names.split())
    (tmp_path / "sub").mkdir()
    assert roles_of(folder) == {"train": ["train.txt"], "valid": ["val.txt"]}
    left_out = locate_files(folder).left_out
    assert left_out.keys() == {*names.split(), "sub"} - {"train.txt", "val.txt"}
    assert left_out["test.txt"] == "named like test data"
    assert left_out["sub"] == "a sub-folder"
    assert left_out["page.html"] == "markup"


def test_a_readme_is_known_by_its_first_word(tmp_path):
    folder = folder_of(tmp_path, "noticeboard.txt", "README_first.txt", "licence", "a.txt")
    assert roles_of(folder) == {"text": ["a.txt", "noticeboard.txt"]}


def test_test_data_are_never_for_training_without_a_word(tmp_path):
    folder = folder_of(tmp_path, "stories.txt", "test.txt")
    assert roles_of(folder) == {"text": ["stories.txt"]}
    assert locate_files(str(tmp_path / "test.txt")).notes  # named alone


def test_a_single_part_of_a_file_is_said_to_be_one(tmp_path):
    folder_of(tmp_path, "train-00000-of-00002.txt", "train-00001-of-00002.txt")
    assert locate_files(str(tmp_path / "train-00000-of-00002.txt")).notes
    assert not locate_files(str(tmp_path)).notes


NAMES = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "train",
                "valid",
                "val",
                "dev",
                "test",
                "eval",
                "holdout",
                "notes",
                "Story",
                "x",
                "trainer",
            ]
        ),
        st.sampled_from(
            ["", "-", "_data", "-00000-of-00002", "-00001-of-00002", "2", " copy", "~"]
        ),
        st.sampled_from(["", ".txt", ".md", ".jsonl", ".csv.gz", ".html", ".zip", ".py", ".valid"]),
    ).map("".join),
    max_size=7,
    unique_by=str.lower,
)


@given(NAMES)
def test_every_file_has_one_place_or_the_folder_is_refused(tmp_path_factory, names):
    folder = folder_of(tmp_path_factory.mktemp("names"), *names)
    try:
        located = locate_files(folder)
    except SweepError as error:
        assert "\n" not in str(error)
        return
    places = [path.name for paths in located.roles.values() for path in paths]
    places += located.left_out
    assert sorted(places) == sorted(names)
    assert set(located.roles) in ({"train", "valid"}, {"text"})
    for role, paths in located.roles.items():
        assert paths == sorted(paths) and paths
        for path in paths:
            assert role_of(path.name) == role or (role == "text" and role_of(path.name) != "valid")
            assert role_of(path.name) != "test"


def test_the_order_of_parts_does_not_change_old_identities(tmp_path):
    pair = identify_data(folder_of(tmp_path / "pair", "train.txt", "valid.txt"))
    named = identify_data(folder_of(tmp_path / "named", "my_train.txt", "my_val.txt", "notes.txt"))
    assert pair == named and "split" not in pair
    alone = identify_data(folder_of(tmp_path / "alone", "train.txt", "test.txt", "notes.txt"))
    assert alone == identify_data(str(tmp_path / "alone" / "train.txt"))


@pytest.mark.parametrize(
    "name", ["a.ipynb", "a.HTML", "a.xml", "a.pdf", "a.docx", "a.zip", "a.arrow", "a.html.gz"]
)
def test_formats_whose_bytes_are_not_their_text_are_refused_by_name(tmp_path, name):
    (tmp_path / name).write_text(TEXT)
    with pytest.raises(SweepError, match="plain text or a table"):
        identify_data(str(tmp_path / name))


@pytest.mark.parametrize("is_dictionary", [False, True])
def test_a_folder_of_save_to_disk_is_refused_with_the_command_that_converts_it(
    tmp_path, is_dictionary
):
    names = ["dataset_dict.json"] if is_dictionary else ["state.json", "data-0-of-1.arrow"]
    with pytest.raises(SweepError, match=r"save_to_disk.*load_from_disk.*to_parquet"):
        locate_files(folder_of(tmp_path, *names, "dataset_info.json"))


def test_a_state_json_alone_is_not_a_saved_data_set(tmp_path):
    (tmp_path / "state.json").write_text(json.dumps([{"text": "a"}, {"text": "b"}]))
    assert roles_of(str(tmp_path)) == {"text": ["state.json"]}


@pytest.mark.parametrize("source", ["a" * 5000, "a\0b", "x/" * 2000])
def test_a_message_shows_at_most_200_characters_of_a_source(source):
    with pytest.raises(SweepError, match=r"data must be") as caught:
        find_files(source)
    assert len(str(caught.value)) < 400


def test_a_message_shows_the_end_of_a_long_path(tmp_path):
    folder = tmp_path / ("a" * 200) / "stories"
    with pytest.raises(SweepError, match="stories'"):
        locate_files(folder_of(folder, "valid.txt"))
