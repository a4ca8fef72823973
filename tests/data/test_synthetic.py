import hashlib
import math
import random
import statistics

import pytest

from sweep.data.synthetic_stories import (
    generate_story,
    story_grammar,
    synthetic_documents,
    synthetic_identity,
)
from sweep.errors import SweepError
from tests.data.grammar_parser import derivation_count, entropy, log_probability


@pytest.fixture(scope="module")
def generated():
    rng = random.Random(7)
    return [generate_story(story_grammar(), rng) for _ in range(3000)]


def grammar_of(rules, values=None, forms=None):
    return {"start": "s", "rules": rules, "values": values or {}, "forms": forms or {}}


def test_every_story_has_one_derivation(generated):
    """The entropy of stories is that of derivations only if the grammar is unambiguous."""
    assert {derivation_count(story) for story in generated[:1000]} == {1}
    ambiguous = grammar_of({"s": ("a [x] b.",), "x": ("", "b", "b [x]")})
    assert derivation_count("a b b.", ambiguous) == 2
    for values in story_grammar()["values"].values():
        for choices in values.values() if isinstance(values, dict) else [values]:
            assert len(set(choices)) == len(choices)


def test_the_entropy_of_a_small_grammar_equals_its_enumeration():
    rules = {"s": ("A <pet> [did] {it}[more].", "No."), "did": ("saw", "[bit]", "lost"),
             "bit": ("bit", "ate"), "more": ("", "and <toy:pet> the {toy}")}  # fmt: skip
    toys = {"cat": ["a", "b"], "dog": ["a", "b", "c"], "cow": ["d"]}
    values = {"pet": ["cat", "dog", "cow"], "toy": toys}
    grammar = grammar_of(rules, values, {"it": ("pet", {"cat": "c", "dog": "d", "cow": "e"})})
    rng, probabilities = random.Random(0), {}
    while 1 - sum(probabilities.values()) > 1e-12:
        document = generate_story(grammar, rng)
        probabilities[document] = math.exp(log_probability(document, grammar))
    enumerated = -sum(p * math.log(p) for p in probabilities.values())
    assert entropy(grammar) == pytest.approx(enumerated, abs=1e-12)


def test_the_entropy_is_the_mean_of_minus_log_p_within_its_standard_error(generated):
    assert entropy(story_grammar()) == pytest.approx(30.828, abs=5e-4)  # docs/data.md
    surprise = [-log_probability(story) for story in generated]
    error = statistics.stdev(surprise) / math.sqrt(len(surprise))
    assert abs(statistics.mean(surprise) - entropy(story_grammar())) < 3 * error
    assert error < 0.1


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
