"""What `--data` can name, the documents that are read from it, and their split."""

import gzip
import hashlib
import json
import re

import pandas as pd
import pytest

from sweep.data import plain_text, tinystories
from sweep.data.plain_text import read_text
from sweep.data.sources import (
    SPLIT_RULE,
    find_files,
    identify_data,
    is_path,
    open_data,
    read_files,
)
from sweep.data.tokens import prepare_data
from sweep.errors import SweepError
from tests.data.conftest import BYTES, COMMIT, STORIES, json_lines

TEXT = "a cat\n<|endoftext|>\na dog\n"
CONTENT = b"a cat sat\n<|endoftext|>\n" * 500


def put(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.encode()
        (folder / name.replace("__", ".")).write_bytes(data)
    return str(folder)


def roles(source):
    return {role: [path.name for path in paths] for role, paths in find_files(source).roles.items()}


def test_built_in_sets_are_identified_without_network_or_disk(cache):
    assert identify_data("tinystories") == {
        "name": "tinystories",
        "revision": "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64",
        "sha256": {
            "train": "6418d412de72888f52b5142c761ac21a582f7d1166f0bfbdb5f03ccfdec90443",
            "valid": "6874bae9a4c1a4e7edcf0e53b86c17817e9cf881fc75ff2368da457b80c0585d",
        },
    }
    assert set(identify_data("synthetic")) == {"name", "grammar_version", "seed", "documents"}
    assert identify_data(f"hf:someone/stories@{COMMIT}")["revision"] == COMMIT
    assert not cache.exists()
    names = ("tinystories", "synthetic", "hf:a/b", "a/b", "text.txt")
    assert [is_path(name) for name in names] == [False, False, False, True, True]


def test_the_identity_of_files_depends_on_their_order_contents_and_formats_alone(tmp_path):
    identities = [
        identify_data(put(tmp_path / name, **files))
        for name, files in {
            "one": {"a__txt": "a", "b__md": "b"},
            "same": {"c__txt": "a", "d__txt": "b"},
            "order": {"a__txt": "b", "b__txt": "a"},
            "kind": {"a__txt": "a", "b__csv": "b"},
            "joined": {"a__txt": "ab"},
            "table": {"a__jsonl": "ab"},
        }.items()
    ]
    assert identities[0] == identities[1]
    assert len({json.dumps(identity) for identity in identities}) == 5
    joined = identify_data(str(tmp_path / "joined" / "a.txt"))
    assert joined == identities[4] == json.loads(json.dumps(joined))
    assert joined["split"]["valid_fraction"] == 0.05


def test_a_folder_with_train_and_valid_is_a_pair_without_a_split(tmp_path):
    folder = put(tmp_path, train__txt=TEXT, valid__jsonl='{"text": "a"}\n', other__txt=TEXT)
    assert roles(folder) == {"train": ["train.txt"], "valid": ["valid.jsonl"]}
    identity = identify_data(folder)
    assert identity["kind"] == {"train": "text", "valid": "json"}
    assert "split" not in identity


@pytest.mark.parametrize("name", ["validation.txt", "val.text", "VALID.md"])
def test_other_names_of_the_validation_file_are_understood(tmp_path, name):
    assert roles(put(tmp_path, train__txt=TEXT, **{name: TEXT}))["valid"] == [name]


def test_a_folder_of_other_files_uses_all_in_sorted_order_but_not_the_readme(tmp_path):
    folder = put(tmp_path, b__txt=TEXT, a__py=TEXT, c=TEXT, README__txt="about", __hidden="no")
    assert roles(folder) == {"text": ["a.py", "b.txt", "c"]}
    assert roles(put(tmp_path, train__txt=TEXT)) == {"text": ["train.txt"]}


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "has no text file"),
        ({"README__md": TEXT}, "has no text file"),
        ({"valid__txt": TEXT}, "got valid.txt"),
        ({"train__txt": TEXT, "train__jsonl": '{"text": "a"}'}, "got train.jsonl, train.txt"),
    ],
)
def test_folders_without_usable_files_are_refused(tmp_path, files, says):
    with pytest.raises(SweepError, match=says):
        find_files(put(tmp_path / "folder", **files))


@pytest.mark.parametrize("source", ["./not-there", "tinystory", "", "wikitext"])
def test_an_unknown_source_lists_the_choices(source):
    with pytest.raises(SweepError, match=r"tinystories, synthetic, hf:OWNER/NAME.*got"):
        identify_data(source)
    for name in ("hf:", "hf:stories", "hf:a/b/c", "hf:a/b@"):
        with pytest.raises(SweepError, match=r"form hf:OWNER/NAME.*got"):
            identify_data(name)


HUB = """
from sweep.data.sources import identify_data, open_data
try:
    identity = identify_data("hf:someone/stories")
    readers = open_data(identity, None).readers
    texts = {split: [piece.text for piece in read()] for split, read in readers.items()}
    print(json.dumps([identity, texts]))
except SweepError as error:
    print(json.dumps([str(error)]))
"""


def test_a_data_set_of_the_hub_is_identified_by_its_commit_or_refused(hub):
    hub.files = {"train.jsonl": json_lines(STORIES[:9]), "validation.jsonl": json_lines(["a"])}
    identity, texts = hub.run(HUB)
    expected = {"name": "hf", "repository": "someone/stories", "revision": COMMIT}
    assert identity | expected == identity
    assert texts == {"train": STORIES[:9], "valid": ["a"]}
    [message] = hub.run(HUB.replace("someone/stories", "someone/else"))
    assert "hf:someone/else" in message
    assert "\n" not in message


def test_another_column_of_a_data_set_of_the_hub_holds_the_texts(hub):
    rows = "".join(json.dumps({"id": i, "story": text}) + "\n" for i, text in enumerate(STORIES))
    hub.files = {"train.jsonl": rows.encode()}
    _, texts = hub.run(HUB.replace('stories")', 'stories", "story")'))
    assert sorted(texts["train"] + texts["valid"]) == sorted(STORIES)
    [message] = hub.run(HUB)
    assert "must have the column 'text', got id, story" in message and "--text-column" in message


def test_a_data_set_of_the_hub_without_validation_is_split_by_document(hub):
    hub.files = {"train.jsonl": json_lines(STORIES)}
    _, texts = hub.run(HUB)
    assert sorted(texts["train"] + texts["valid"]) == sorted(STORIES)
    assert len(texts["valid"]) == 10


HUB_SUMMARY = """
from dataclasses import asdict
from sweep.config.trial import TokenizerSettings
from sweep.data.describe import summarize_data
from sweep.data.sources import identify_data
from sweep.data.tokens import prepare_data
try:
    identity = identify_data("hf:someone/stories")
    tokenizer = TokenizerSettings(kind="bytes", vocabulary=256)
    prepare_data(identity, None, tokenizer)
    print(json.dumps(asdict(summarize_data(identity, "hf:someone/stories", tokenizer))))
except SweepError as error:
    print(json.dumps([str(error)]))
"""


def test_the_splits_of_the_hub_are_counted_and_others_left_out(hub):
    hub.files = {
        "train.jsonl": json_lines([*STORIES[:9], " "]),
        "validation.jsonl": json_lines(["a", STORIES[0]]),
        "test.jsonl": json_lines(["b"]),
    }
    summary = hub.run(HUB_SUMMARY)
    numbers = [(f["file"], f["role"], f["rows"], f["empty"]) for f in summary["files"]]
    assert numbers == [("default/train", "train", 10, 1), ("default/validation", "valid", 2, 0)]
    assert summary["left_out"].keys() == {"test"}
    assert any("1 of 2 validation documents" in note for note in summary["notes"])


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"test.jsonl": json_lines(["a", "b"])}, "must have a split train, got test"),
        ({"train.jsonl": json_lines(["a", 3])}, "must declare the column 'text' as text"),
        ({"train.jsonl": json_lines(["a", None])}, r"row 2: 'text' must be a text, got null"),
        ({"train.csv": b"id,text\n1,Once, a\n2,Then, b\n"}, "got CSV"),
        ({"train.jsonl": json_lines([1, 2])}, "as text, got int64"),
        (
            {"README.md": b"---\nconfigs:\n- config_name: a\n  data_files: a.jsonl\n"
             b"- config_name: b\n  data_files: b.jsonl\n---\n",
             "a.jsonl": json_lines(["a"]), "b.jsonl": json_lines(["b"])},
            r"'a', 'b'.*default configuration",
        ),
    ],
)  # fmt: skip
def test_a_data_set_of_the_hub_without_declared_texts_is_refused(hub, files, says):
    hub.files = files
    [message] = hub.run(HUB_SUMMARY)
    assert re.search(says, message), message


def test_a_local_folder_is_never_read_as_a_data_set_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone" / "stories").mkdir(parents=True)
    with pytest.raises(SweepError, match="local path"):
        prepare_data(identify_data(f"hf:someone/stories@{COMMIT}"), None, BYTES)


DOWNLOAD = f"""
from sweep.data import tinystories
tinystories.REPOSITORY, tinystories.REVISION = "someone/stories", {COMMIT!r}
tinystories.SHA256 = {{"train": {hashlib.sha256(CONTENT).hexdigest()!r}}}
try:
    path = tinystories.download("train")
    print(json.dumps([str(path), path.read_text()]))
except SweepError as error:
    print(json.dumps([str(error)]))
"""
TRAIN_FILE = "TinyStoriesV2-GPT4-train.txt"


def test_tinystories_is_downloaded_once_into_the_library_s_cache(hub, tmp_path):
    hub.files[TRAIN_FILE] = CONTENT
    path, text = hub.run(DOWNLOAD)
    assert text.encode() == CONTENT
    assert path.startswith(str(tmp_path / "hugging_face"))
    count = len(hub.requests)
    assert hub.run(DOWNLOAD) == [path, text]
    assert len(hub.requests) == count


def test_a_failed_download_is_one_sentence_with_remedies(hub, cache):
    hub.environment["HF_HUB_OFFLINE"] = "1"
    [message] = hub.run(DOWNLOAD)
    assert "\n" not in message
    for remedy in ("--data PATH", "--data synthetic", "copy the file to"):
        assert remedy in message
    # The long path of a test's cache loses its middle.
    assert str(cache)[:20] in message and message.endswith(f"{TRAIN_FILE[-15:]}.")


def test_copied_files_of_tinystories_are_checked_and_read_without_network(cache, monkeypatch):
    digest = hashlib.sha256(CONTENT).hexdigest()
    monkeypatch.setattr(tinystories, "SHA256", {"train": digest, "valid": digest})
    for split in ("train", "valid"):
        put(cache / "tinystories", **{f"TinyStoriesV2-GPT4-{split}.txt": CONTENT})
    readers = open_data(identify_data("tinystories"), None).readers
    assert [len(list(readers[split]())) for split in ("train", "valid")] == [500, 500]
    put(cache / "tinystories", **{TRAIN_FILE: CONTENT.replace(b"cat", b"bat")})
    with pytest.raises(SweepError, match="sha256"):
        tinystories.download("train")


def write_table(path, texts):
    table = pd.DataFrame({"id": range(len(texts)), "text": texts})
    if path.suffix == ".parquet":
        table.to_parquet(path)
    elif path.suffix == ".csv":
        table.to_csv(path, index=False)
    else:
        table.to_json(path, orient="records", lines=path.suffix != ".json")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a[1].csv", "a.parquet", "a.json"])
def test_every_row_of_a_table_is_a_document(tmp_path, name):
    texts = ["NA", "007", " with spaces\n", *STORIES]
    write_table(tmp_path / name, texts)
    pieces = list(read_files([tmp_path / name])())
    assert [piece.text for piece in pieces] == [text.strip() for text in texts]
    assert all(piece.ends_document for piece in pieces)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_a_column_of_a_table_is_part_of_the_identity_unless_it_is_text(tmp_path, name):
    path = tmp_path / name
    write_table(path, ["NA", "007", *STORIES])
    plain = identify_data(str(path))
    assert identify_data(str(path), "text") == plain and "column" not in plain
    identity = identify_data(str(path), "id")
    assert identity == plain | {"column": "id"}
    if name == "a.csv":  # its numbers are texts
        readers = open_data(identity, str(path)).readers
        texts = [piece.text for split in ("train", "valid") for piece in readers[split]()]
        assert sorted(texts, key=int) == [str(i) for i in range(len(STORIES) + 2)]
    with pytest.raises(SweepError, match="must have the column 'story', got id, text"):
        open_data(identify_data(str(path), "story"), str(path))


def test_a_column_of_plain_text_is_refused(story_file):
    for source in (str(story_file), "synthetic", "tinystories"):
        with pytest.raises(SweepError, match="text_column applies to tables"):
            identify_data(source, "story")


def test_a_folder_may_hold_tables(tmp_path):
    write_table(tmp_path / "train.jsonl", STORIES[:150])
    write_table(tmp_path / "validation.parquet", STORIES[150:])
    text = prepare_data(identify_data(str(tmp_path)), str(tmp_path), BYTES)
    assert (text.train_documents, text.valid_documents) == (150, 50)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("other.jsonl", b'{"text": "a"}\n{"story": "b"}\n'),
        ("number.jsonl", b'{"text": 3}\n'),
        ("nul.jsonl", b'{"text": "a\\u0000b"}\n'),
        ("broken.jsonl", b'{"text": \n'),
        ("other.csv", b"a,b\n1,2\n"),
        ("empty.csv", b""),
        ("latin.csv", "text\ncafé\n".encode("latin-1")),
        ("damaged.parquet", b"PAR1"),
        ("damaged.jsonl.gz", gzip.compress(json_lines(["a"] * 9999), mtime=0)[:50]),
    ],
)
def test_a_table_without_text_is_refused_in_one_sentence(tmp_path, cache, capfd, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(SweepError) as caught:
        prepare_data(identify_data(str(path)), str(path), BYTES)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    assert [entry for entry in cache.glob("tokens/*") if entry.suffix != ".lock"] == []
    assert capfd.readouterr().err == ""


def test_a_text_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    def fail(*_, **options):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(plain_text, "open", fail, raising=False)
    with pytest.raises(SweepError, match=r"a\.txt.*Input/output error"):
        find_files(str(write(tmp_path / "a.txt", TEXT)))


def documents(pieces):
    whole, parts = [], []
    for piece in pieces:
        parts.append(piece.text)
        if piece.ends_document:
            whole.append("".join(parts))
            parts = []
    assert not parts, "the last document must be ended"
    return whole


def read(path, **options):
    return documents(read_text(path, **options))


def write(path, text):
    path.write_bytes(text.encode())
    return path


def test_documents_stand_between_separator_lines_and_get_line_feeds(tmp_path):
    line = "<|endoftext|>\n"
    text = f"\ufeff\n one\n\ntwo \n{line}<|endoftext|>  \n \n{line}three{line}4"
    assert read(write(tmp_path / "a.txt", text)) == ["one\n\ntwo", "three<|endoftext|>\n4"]
    assert read(write(tmp_path / "a.txt", "a\r\nb\r\n<|endoftext|>\r\nc\r\n")) == ["a\nb", "c"]


@pytest.mark.parametrize("block", [16, 17, 23, 61, 1000, 1 << 18])
def test_blocks_and_compression_change_no_document(tmp_path, story_file, block):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(story_file.read_bytes()))
    assert read(story_file, block=block) == read(tmp_path / "a.txt.gz", block=block) == STORIES


def test_a_long_document_comes_in_parts_that_are_cut_before_white_space(tmp_path):
    text = ("word " * 9 + "word\n\n") * 5000
    path = write(tmp_path / "a.txt", text)
    pieces = list(read_text(path))
    assert len(pieces) > 3
    assert "".join(piece.text for piece in pieces) == text.strip()
    for piece in pieces[1:]:
        assert piece.text[:1] in (" ", "\n", "")
    for piece in pieces[:-1]:
        assert not piece.text[-1].isspace()
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def split_of(path):
    readers = open_data(identify_data(str(path)), str(path)).readers
    return documents(readers["train"]()), documents(readers["valid"]())


def test_the_split_is_by_document_disjoint_complete_and_repeatable(story_file):
    train, valid = split_of(story_file)
    assert len(valid) == 10  # 5 % of 200
    assert not set(train) & set(valid)
    assert sorted(train + valid) == sorted(STORIES)
    assert [story for story in STORIES if story in set(valid)] == valid  # file order
    assert split_of(story_file) == (train, valid)


def test_equal_documents_stay_on_one_side_in_any_order(tmp_path, story_file):
    path = write(tmp_path / "b.txt", "\n<|endoftext|>\n".join([*STORIES, *reversed(STORIES)]))
    train, valid = split_of(path)
    assert valid == split_of(story_file)[1] + split_of(story_file)[1][::-1]
    assert not set(train) & set(valid)


@pytest.mark.parametrize(
    ("lines", "characters"), [(40, 944), (30_000, 787_449)], ids=["one piece", "several pieces"]
)
def test_the_end_of_a_single_document_is_for_validation(tmp_path, lines, characters):
    text = "\n".join(f"line {i} of one long text" for i in range(lines))
    [train], [valid] = split_of(write(tmp_path / "b.txt", text))
    assert (train, valid) == (text[:characters], text[characters:])
    assert valid[0] in "\n "


# The second: 5 % begin just where a piece does.
@pytest.mark.parametrize(("characters", "expected"), [(1, 1), (68_985, 3449)])
def test_a_single_document_without_white_space_is_cut_all_the_same(tmp_path, characters, expected):
    [train], [valid] = split_of(write(tmp_path / "b.txt", "x" * characters))
    assert train + valid == "x" * characters
    assert len(valid) == expected


def test_split_rule_1_never_changes(tmp_path):
    assert SPLIT_RULE["version"] == 1
    text = "\n<|endoftext|>\n".join(f"document {i}" for i in range(40))
    assert split_of(write(tmp_path / "b.txt", text))[1] == ["document 15", "document 27"]


def test_the_plain_text_of_a_folder_may_have_any_extension(tmp_path):
    suffixes = ["__txt", "__md", "__py", "__tokens", ""]
    files = {f"{i:02}{suffixes[i % 5]}": story for i, story in enumerate(STORIES[:50])}
    files["50__log__gz"] = gzip.compress("\n<|endoftext|>\n".join(STORIES[50:]).encode())
    train, valid = split_of(put(tmp_path / "stories", **files, **{"51__txt": ""}))
    assert sorted(train + valid) == sorted(STORIES)
    assert len(valid) == 10
