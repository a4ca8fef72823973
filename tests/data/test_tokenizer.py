import subprocess

import numpy as np
import pytest

from sweep.config.trial import TokenizerSettings
from sweep.data.text import Piece
from sweep.data.tokens import check_tokenizer, load_tokenizer, prepare_data, train_bpe
from sweep.errors import SweepError

ODD_TEXT = "Tabs\t, two  spaces, “quotes”, 日本語, 😀, <|endoftext|> inside,\r\n\n and an end \n"


def pieces(stories):
    return [Piece(story) for story in stories]


@pytest.fixture
def bpe(tmp_path, stories):
    train_bpe(pieces(stories), 400, tmp_path / "tokenizer.json")
    return load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_decoding_what_was_encoded_gives_the_text_back(kind, bpe):
    tokenizer = bpe if kind == "bpe" else load_tokenizer(None)
    for text in (ODD_TEXT, "", " ", "a"):
        [ids] = tokenizer.encode_batch([text])
        assert tokenizer.decode(ids.tolist()) == text
        assert 0 not in ids.tolist()
        assert all(i < tokenizer.vocabulary_used for i in ids.tolist())


def test_separators_decode_visibly_and_unused_ids_to_nothing(bpe):
    a = bpe.encode_batch(["a"])[0].tolist()
    assert bpe.decode([*a, 0, *a, 399_999]) == "a<|endoftext|>a"
    assert load_tokenizer(None).decode([97, 300, 98]) == "ab"


def test_a_text_cut_where_pieces_are_cut_gives_the_same_tokens(bpe):
    """Before white space that follows none: wherever that is."""
    text = ODD_TEXT + "It's the dog's 12 hats!  They're\n\nnice ... " * 3
    [whole] = bpe.encode_batch([text])
    cuts = [i for i in range(1, len(text)) if text[i] in " \n" and not text[i - 1].isspace()]
    assert len(cuts) > 20
    for cut in cuts:
        parts = bpe.encode_batch([text[:cut], text[cut:]])
        np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_training_takes_merges_from_the_text_up_to_the_vocabulary(bpe, stories, tmp_path):
    assert bpe.vocabulary_used == 400
    assert len(bpe.encode_batch([stories[0]])[0]) < len(stories[0].encode()) / 2
    train_bpe(pieces(["ab ab"]), 400, tmp_path / "small.json")
    assert 257 <= load_tokenizer(tmp_path / "small.json").vocabulary_used < 262


def test_training_is_deterministic_across_processes_and_threads(tmp_path, stories, python):
    script = (
        "import sys, pathlib\n"
        "from sweep.data.text import Piece\n"
        "from sweep.data.tokens import train_bpe\n"
        "texts = sys.stdin.read().split('\\0')\n"
        "train_bpe([Piece(t) for t in texts], 400, pathlib.Path(sys.argv[1]))\n"
    )
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for file, parallel in zip(files, ("true", "false"), strict=True):
        subprocess.run(
            [*python, script, str(file)],
            input="\0".join(stories),
            text=True,
            encoding="utf-8",
            check=True,
            env={"TOKENIZERS_PARALLELISM": parallel, "PYTHONPATH": ".", "PYTHONUTF8": "1"},
        )
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(("kind", "least"), [("bpe", 257), ("bytes", 256)])
def test_a_vocabulary_that_cannot_hold_all_bytes_names_the_minimum(kind, least):
    check_tokenizer(TokenizerSettings(kind=kind, vocabulary=least))
    with pytest.raises(SweepError, match=f"at least {least}, got {least - 1}"):
        prepare_data(
            {"name": "synthetic"}, None, TokenizerSettings(kind=kind, vocabulary=least - 1)
        )
