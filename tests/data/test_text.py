import gzip

import pytest

from sweep.data.sources import identify_data, open_data
from sweep.data.text import SPLIT_RULE, read_text
from sweep.errors import SweepError


def documents(pieces):
    """Join pieces into whole documents."""
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


def test_documents_stand_between_separator_lines(tmp_path):
    line = "<|endoftext|>\n"
    text = f"\ufeff\n one\n\ntwo \n{line}<|endoftext|>  \n \n{line}three{line}4"
    assert read(write(tmp_path / "a.txt", text)) == ["one\n\ntwo", "three<|endoftext|>\n4"]


def test_windows_line_ends_become_line_feeds(tmp_path):
    assert read(write(tmp_path / "a.txt", "a\r\nb\r\n<|endoftext|>\r\nc\r\n")) == ["a\nb", "c"]


def test_a_compressed_text_gives_the_same_documents(tmp_path, story_file, stories):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(story_file.read_bytes()))
    assert read(story_file) == read(tmp_path / "a.txt.gz") == stories


@pytest.mark.parametrize("block", [16, 17, 23, 61, 1000])
def test_the_block_that_is_read_at_once_changes_no_document(story_file, stories, block):
    assert read(story_file, block=block) == stories


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
    readers = open_data(identify_data(str(path)), str(path))
    return documents(readers["train"]()), documents(readers["valid"]())


def test_the_split_is_by_document_disjoint_complete_and_repeatable(story_file, stories):
    train, valid = split_of(story_file)
    assert len(valid) == 10  # 5 % of 200
    assert not set(train) & set(valid)
    assert sorted(train + valid) == sorted(stories)
    assert [story for story in stories if story in set(valid)] == valid  # file order
    assert split_of(story_file) == (train, valid)


def test_equal_documents_stay_on_one_side_in_any_order(tmp_path, story_file, stories):
    path = write(tmp_path / "b.txt", "\n<|endoftext|>\n".join([*stories, *reversed(stories)]))
    train, valid = split_of(path)
    assert valid == split_of(story_file)[1] + split_of(story_file)[1][::-1]
    assert not set(train) & set(valid)


def test_many_copies_of_one_document_cannot_be_split(tmp_path):
    path = write(tmp_path / "b.txt", "one\n<|endoftext|>\none\n<|endoftext|>\n")
    with pytest.raises(SweepError, match="at least two different documents, got 1"):
        split_of(path)


@pytest.mark.parametrize(
    ("lines", "characters"), [(40, 944), (30_000, 787_449)], ids=["one piece", "several pieces"]
)
def test_the_end_of_a_single_document_is_for_validation(tmp_path, lines, characters):
    text = "\n".join(f"line {i} of one long text" for i in range(lines))
    [train], [valid] = split_of(write(tmp_path / "b.txt", text))
    assert (train, valid) == (text[:characters], text[characters:])
    assert valid[0] in "\n "


# The second: where 5 % begin just where a piece does.
@pytest.mark.parametrize(("characters", "expected"), [(1, 1), (68_985, 3449)])
def test_a_single_document_without_white_space_is_cut_all_the_same(tmp_path, characters, expected):
    [train], [valid] = split_of(write(tmp_path / "b.txt", "x" * characters))
    assert train + valid == "x" * characters
    assert len(valid) == expected


def test_split_rule_1_never_changes(tmp_path):
    """It is part of the identity of data; another choice of documents is another version."""
    assert SPLIT_RULE["version"] == 1
    text = "\n<|endoftext|>\n".join(f"document {i}" for i in range(40))
    assert split_of(write(tmp_path / "b.txt", text))[1] == ["document 15", "document 27"]


def test_the_files_of_a_folder_are_documents_whatever_their_extensions(tmp_path, stories):
    folder = tmp_path / "stories"
    folder.mkdir()
    suffixes = [".txt", ".md", ".py", ".html", ""]
    for index, story in enumerate(stories[:50]):
        write(folder / f"{index:02}{suffixes[index % 5]}", story)
    (folder / "50.log.gz").write_bytes(
        gzip.compress("\n<|endoftext|>\n".join(stories[50:]).encode())
    )
    write(folder / "51.txt", "")
    train, valid = split_of(folder)
    assert sorted(train + valid) == sorted(stories)
    assert len(valid) == 10
