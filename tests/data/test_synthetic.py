import hashlib
import itertools
import math
import random
import re
import runpy
import statistics
from pathlib import Path

import pytest

from sweep.data.synthetic import (
    WORD,
    Bind,
    Get,
    Grammar,
    Rule,
    entropy_per_document,
    story_grammar,
    synthetic_documents,
    synthetic_identity,
)
from sweep.errors import SweepError

END = "(end)"
PARSER = runpy.run_path(str(Path(__file__).with_name("grammar_parser.py")))
log_probability = PARSER["log_probability"]


@pytest.fixture(scope="module")
def generated():
    rng = random.Random(7)
    return [story_grammar().generate(rng) for _ in range(3000)]


def words_of(grammar, symbol):
    """Every word that a terminal, a value or a form can be."""
    if isinstance(symbol, str):
        return {symbol}
    if isinstance(symbol, Get) and symbol.form in grammar.forms:
        return set(grammar.forms[symbol.form][1].values())
    variable = symbol.form if isinstance(symbol, Get) else symbol.variable
    return set(itertools.chain.from_iterable(grammar.values[variable].values()))


def first_words(grammar, symbols, follow):
    """The words that symbols can begin with; `follow` where they can be empty."""
    found = set()
    for symbol in symbols:
        if not isinstance(symbol, Rule):
            return found | words_of(grammar, symbol)
        inner = [first_words(grammar, one, {None}) for one in grammar.rules[symbol.name]]
        found |= set().union(*inner) - {None}
        if not any(None in one for one in inner):
            return found
    return found | follow


def follow_words(grammar):
    """The words that can come after each rule, by iteration to the fixed point."""
    follow = {name: set() for name in grammar.rules} | {grammar.start: {END}}
    for _ in range(len(grammar.rules)):
        for name, alternatives in grammar.rules.items():
            for alternative in alternatives:
                for i, symbol in enumerate(alternative):
                    if isinstance(symbol, Rule):
                        rest = alternative[i + 1 :]
                        follow[symbol.name] |= first_words(grammar, rest, follow[name])
    return follow


def ambiguous_rules(grammar):
    follow = follow_words(grammar)
    return [
        name
        for name, alternatives in grammar.rules.items()
        for one, other in itertools.combinations(alternatives, 2)
        if first_words(grammar, one, follow[name]) & first_words(grammar, other, follow[name])
    ]


def test_one_word_of_foresight_decides_every_choice_so_the_grammar_is_unambiguous():
    """Alternatives of every rule differ in their first word (LL(1)); values are different words."""
    grammar = story_grammar()
    assert ambiguous_rules(grammar) == []
    for lists in grammar.values.values():
        for values in lists.values():
            assert len(set(values)) == len(values)
            assert all(WORD.fullmatch(value) for value in values)


def test_the_check_of_ambiguity_can_fail():
    rules = {"s": ("a [x] b.", "c."), "x": ("", "b", "a")}
    assert ambiguous_rules(Grammar(rules, {}, {}, "s")) == ["x"]


def test_the_parser_sums_over_all_derivations():
    """`a b.` has two derivations, of probabilities 2/3 · 1/3 and 1/3 · 2/3."""
    grammar = Grammar({"s": ("[x] [y].",), "x": ("a", "a b"), "y": ("b", "")}, {}, {}, "s")
    assert math.exp(log_probability("a b.", grammar)) == pytest.approx(4 / 9 + 1 / 9)


def test_all_derivations_of_a_story_have_the_probability_of_the_one_that_made_it(generated):
    for document, recorded in generated[:1000]:
        assert log_probability(document) == pytest.approx(recorded, rel=1e-12)


def test_text_that_is_no_story_has_no_probability(generated):
    story = generated[0][0]
    other_name = "Lily" if "Lily" not in story else "Anna"
    for text in ("", "Hello.", story + " ", story[:-1], story + " " + story):
        assert log_probability(text) == -math.inf
    name = re.search(r"named (\w+)", story)[1]
    assert log_probability(story.replace(name, other_name, 1)) == -math.inf  # was not kept


def test_the_entropy_of_a_small_grammar_equals_its_enumeration():
    rules = {"s": ("A <pet> [did] {it}[more].", "No."), "did": ("saw", "[bit]", "lost"),
             "bit": ("bit", "ate"), "more": ("", "and <toy:pet> the {toy}")}  # fmt: skip
    values = {"pet": {"": "cat, dog, cow"}, "toy": {"cat": "a, b", "dog": "a, b, c", "cow": "d"}}
    grammar = Grammar(rules, values, {"it": ("pet", {"cat": "c", "dog": "d", "cow": "e"})}, "s")
    rng, seen = random.Random(0), {}
    while 1 - sum(seen.values()) > 1e-12:
        document, recorded = grammar.generate(rng)
        seen[document] = math.exp(recorded)
    enumerated = -sum(p * math.log(p) for p in seen.values())
    assert grammar.entropy() == pytest.approx(enumerated, abs=1e-12)


def test_the_entropy_is_the_mean_of_minus_log_p_within_its_standard_error(generated):
    surprise = [-recorded for _, recorded in generated]
    error = statistics.stdev(surprise) / math.sqrt(len(surprise))
    assert abs(statistics.mean(surprise) - entropy_per_document()) < 3 * error
    assert error < 0.1


def test_names_pronouns_and_things_are_kept_through_a_story(generated):
    girls = [story for story, _ in generated if " girl " in story]
    assert len(girls) > 1000
    for story in girls:
        words = set(WORD.findall(story))
        assert not words & {"he", "He", "his", "His"}, story
    rules = story_grammar().rules
    kept = {s.form for alternatives in rules.values() for one in alternatives for s in one
            if isinstance(s, Get)}  # fmt: skip
    bound = {s.variable for alternatives in rules.values() for one in alternatives for s in one
             if isinstance(s, Bind)}  # fmt: skip
    assert {"name", "thing", "look", "friend", "place", "sight"} <= kept & bound


def test_a_story_depends_on_seed_split_and_index_alone():
    identity = synthetic_identity(seed=5, train=40, valid=10)
    again = synthetic_identity(seed=5, train=20, valid=10)
    documents = list(synthetic_documents(identity, "train"))
    assert documents[:20] == list(synthetic_documents(again, "train"))
    assert documents != list(synthetic_documents(synthetic_identity(6, 40, 10), "train"))


def test_no_validation_story_is_a_training_story():
    identity = synthetic_identity()
    train = set(synthetic_documents(identity, "train"))
    valid = list(synthetic_documents(identity, "valid"))
    assert len(train) == identity["documents"]["train"]
    assert len(valid) == identity["documents"]["valid"]
    assert not train & set(valid)


def test_the_stories_of_this_grammar_version_never_change():
    """A change of the rules must change GRAMMAR_VERSION, and then this hash."""
    identity = synthetic_identity(train=300)
    assert identity["grammar_version"] == 1
    text = "\n".join(synthetic_documents(identity, "train"))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "036b834dcfbf8c48"


def test_stories_of_another_grammar_version_are_refused():
    identity = synthetic_identity() | {"grammar_version": 99}
    with pytest.raises(SweepError, match="grammar version 1, got 99"):
        next(iter(synthetic_documents(identity, "train")))
