"""Tasks of GRPO: prompts by number, and rewards that a program computes."""

import sys

import numpy as np
import pytest

from sweep.config.trial import TokenizerSettings
from sweep.config.workloads import GrpoSettings
from sweep.data.synthetic_stories import synthetic_identity
from sweep.data.tokens import prepare_data
from sweep.errors import SweepError
from sweep.models.generation import completion_uniforms
from sweep.workloads.grpo import HELD_OUT
from sweep.workloads.tasks.build import build_reward, build_task
from sweep.workloads.tasks.task import Completion, Prompt

CHESS = "chess"
WORDS = Prompt("Words: dog, happy, little.\n", facts={"words": ["dog", "happy", "little"]})
START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"


@pytest.fixture(scope="module")
def text():
    return prepare_data(synthetic_identity(), None, TokenizerSettings(kind="bpe", vocabulary=512))


def task_of(text=None, seed=0, **settings):
    return build_task(GrpoSettings(**settings), text, seed)


@pytest.mark.parametrize("name", ["words", "text"])
def test_equal_numbers_give_equal_prompts(text, name):
    task, again = task_of(text, task=name), task_of(text, task=name)
    prompts = [task.prompt(number, False) for number in range(40)]
    assert prompts == [again.prompt(number, False) for number in range(40)]
    assert len({prompt.text for prompt in prompts}) > 20
    assert prompts != [task_of(text, seed=1, task=name).prompt(n, False) for n in range(40)]
    assert prompts[0] != task.prompt(0, True)


def test_words_are_taken_from_one_story_each(text):
    stories = text.tokenizer.decode(text.train).lower()
    for number in range(20):
        prompt = task_of(text).prompt(number, False)
        words = prompt.facts["words"]
        assert prompt.text == f"Words: {', '.join(words)}.\n" and len(set(words)) == len(words)
        assert all(len(word) >= 4 and word in stories for word in words)


def test_only_words_that_do_not_fit_are_drawn_again(text):
    def prompts(room):
        task = task_of(text, prompt_tokens=room)
        return [task.prompt(number, False) for number in range(100)]

    roomy, sizes = prompts(64), []
    for first, other in zip(roomy, prompts(14), strict=True):
        ids, other_ids = text.tokenizer.encode_batch([first.text, other.text])
        assert len(other_ids) <= 14 and list(other.ids) == other_ids.tolist()
        assert (first == other) == (len(ids) <= 14)
        sizes.append(len(ids))
    assert min(sizes) <= 14 < max(sizes) and prompts(14) == prompts(14)


def test_a_prompt_asks_for_fewer_words_if_three_do_not_fit(text):
    prompts = [task_of(text, prompt_tokens=11).prompt(number, False) for number in range(100)]
    assert all(len(prompt.ids) <= 11 for prompt in prompts)
    assert {len(prompt.facts["words"]) for prompt in prompts} >= {1, 2}


@pytest.mark.parametrize(
    ("story", "has_ended", "words", "end"),
    [
        ("The Dog was happy. It was little!", True, 1.0, 0.1),
        ("The dog was happy.", False, 2 / 3, 0.0),
        ("The dog was happy.", True, 2 / 3, 0.2 / 3),
        ("dogs are unhappy", True, 0.0, 0.0),  # whole words only
        ("dog dog dog dog", False, 1 / 3, 0.0),
        ("", True, 0.0, 0.0),  # the end alone has no reward
    ],
)
def test_a_story_is_rewarded_for_its_words_and_its_end(text, story, has_ended, words, end):
    reward = task_of(text).reward(WORDS, Completion(story, has_ended))
    assert reward == pytest.approx({"words": words, "end": end})


def test_openings_are_the_first_tokens_of_stories(text):
    task = task_of(text, task="text", prompt_tokens=5)
    first = text.tokenizer.decode(text.valid[:5])
    prompt = task.prompt(0, True)
    assert prompt.text == first and list(prompt.ids) == text.valid[:5].tolist()


@pytest.mark.parametrize(
    ("name", "reward"),
    [
        ("length", {"own": 3.0}),
        ("parts", {"a": 1.0, "b": 1.0}),
        ("word", "ValueError.*'good'"),
        ("infinite", "must return a finite .*inf"),
        ("undefined", "must return a finite .*nan"),
        ("reserved", "without the names .*std"),
        ("absent", "has no attribute 'absent'"),
    ],
)
def test_a_user_reward_returns_finite_numbers(text, tmp_path, monkeypatch, name, reward):
    (tmp_path / "own_reward.py").write_text(
        "def length(prompt, completion): return len(completion)\n"
        "def parts(prompt, completion): return {'a': 1, 'b': prompt.count('W')}\n"
        "def word(prompt, completion): return 'good'\n"
        "def infinite(prompt, completion): return {'a': 1, 'b': float('inf')}\n"
        "def reserved(prompt, completion): return {'a': 1, 'std': 2}\n"
        "def undefined(prompt, completion): return float('nan')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_reward", raising=False)
    if isinstance(reward, dict):
        own = build_reward(GrpoSettings(reward=f"own_reward:{name}"), task_of(text))
        assert own(WORDS, Completion("abc", False)) == reward
    else:
        with pytest.raises(SweepError, match=reward):
            own = build_reward(GrpoSettings(reward=f"own_reward:{name}"), task_of(text))
            own(WORDS, Completion("abc", False))


def test_an_error_without_the_extra_names_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "chess", None)
    with pytest.raises(SweepError, match=r"batch-size-sweep\[chess\]"):
        task_of(task=CHESS)


@pytest.fixture
def chess():
    return pytest.importorskip("chess")


def test_positions_are_legal_undecided_and_repeatable(chess):
    task = task_of(task=CHESS)
    prompts = [task.prompt(number, False) for number in range(30)]
    assert prompts == [task_of(task=CHESS).prompt(number, False) for number in range(30)]
    assert len({prompt.text for prompt in prompts}) == 30
    for prompt in prompts:
        board = chess.Board(prompt.facts["fen"])
        assert board.is_valid() and not board.is_game_over()
        assert len(prompt.text) <= 90


@pytest.mark.parametrize(
    ("fen", "answer", "expected"),
    [
        (START, "hello", (0, 0, 0)),
        (START, " e2e5", (0.2, 0, 0)),
        (START, "e2e4 and more", (0.2, 0.3, None)),
        (START, "e2e4e5", (0, 0, 0)),
        (START, "e4e4", (0.2, 0, 0)),  # from a square to itself
        (START, "e2e4q", (0.2, 0, 0)),  # not a promotion
        ("6k1/5ppp/8/8/8/8/8/R3K3 w - - 0 1", "a1a8", (0.2, 0.3, 0.5)),  # mate
        ("4k3/8/8/3q4/4P3/8/8/4K3 w - - 0 1", "e4d5", (0.2, 0.3, 0.5)),  # takes the queen
    ],
)
def test_moves_are_graded(chess, fen, answer, expected):
    prompt = Prompt("", facts={"fen": fen})
    reward = task_of(task=CHESS).reward(prompt, Completion(answer, True))
    for name, value in zip(("format", "legal", "best"), expected, strict=True):
        assert value is None or reward[name] == value
    assert 0 <= reward["best"] <= 0.5


def test_positions_and_completions_use_different_random_streams(chess, monkeypatch):
    task, seeded = task_of(task=CHESS), []
    drawn_from = np.random.Philox

    def philox(key):
        seeded.append(tuple(key))
        return drawn_from(key=key)

    monkeypatch.setattr(np.random, "Philox", philox)
    for is_held_out in (False, True):
        for number in range(4):
            task.prompt(number, is_held_out)
    positions = set(seeded)
    seeded.clear()
    for first in (0, HELD_OUT):
        completion_uniforms(0, np.arange(first, first + 4), 1)
    assert len(positions) == 8 and positions.isdisjoint(seeded)
