"""The probability of a text under a grammar, by parsing it, and the exact entropy of a story."""

import math

from sweep.data.synthetic import (
    SPACE_BEFORE_POINT,
    WORD,
    choice_probabilities,
    story_grammar,
)


def log_probability(document, grammar=None):
    """Return the log of the probability, summed over all derivations; −inf if there is none."""
    grammar = grammar or story_grammar()
    words = WORD.findall(document)
    if SPACE_BEFORE_POINT.sub("", " ".join(words)) != document:
        return -math.inf
    probability = probability_of(words, [grammar.start], grammar, {"": ""})
    return math.log(probability) if probability else -math.inf


def probability_of(words, symbols, grammar, remembered):
    """Return the probability that symbols produce exactly these words."""
    if not symbols:
        return 0.0 if words else 1.0
    (kind, name, given), *rest = symbols
    if kind == "rule":
        alternatives = grammar.rules[name]
        return sum(
            p * probability_of(words, [*alternative, *rest], grammar, remembered)
            for alternative, p in weighted(alternatives)
        )
    if not words:
        return 0.0
    word, *others = words
    if kind == "variable":
        p = dict(weighted(grammar.values[name][remembered[given]])).get(word, 0.0)
        return p and p * probability_of(others, rest, grammar, {**remembered, name: word})
    expected = name if kind == "word" else grammar.form(name, remembered)
    return probability_of(others, rest, grammar, remembered) if word == expected else 0.0


def weighted(choices):
    """Return pairs of choice and probability."""
    return list(zip(choices, choice_probabilities(len(choices)), strict=True))


def entropy(grammar, symbol=None):
    """Return the exact entropy in nats of what a symbol becomes, by default a story: no sampling.

    The choice among alternatives does not depend on remembered values, so it is a sum over symbols,
    each weighted with the probability that a derivation reaches it.
    """
    kind, name, given = symbol or grammar.start
    if kind == "rule":
        return entropy_of_choice(grammar.rules[name]) + sum(
            p * sum(entropy(grammar, part) for part in alternative)
            for alternative, p in weighted(grammar.rules[name])
        )
    if kind != "variable":
        return 0.0
    conditions = weighted(grammar.values[given][""]) if given else [("", 1.0)]
    return sum(p * entropy_of_choice(grammar.values[name][value]) for value, p in conditions)


def entropy_of_choice(choices):
    return -sum(p * math.log(p) for _, p in weighted(choices))
