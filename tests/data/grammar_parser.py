"""The probability of a text under a grammar, by parsing it: what checks the built-in stories."""

import math

from sweep.data.synthetic import SPACE_BEFORE_POINT, WORD, Bind, Rule, story_grammar


def log_probability(document, grammar=None):
    """Return log of the probability, summed over all derivations; −inf where there is none."""
    grammar = grammar or story_grammar()
    words = WORD.findall(document)
    if SPACE_BEFORE_POINT.sub("", " ".join(words)) != document:
        return -math.inf
    probability = probability_of(words, [Rule(grammar.start)], grammar, {})
    return math.log(probability) if probability else -math.inf


def probability_of(words, symbols, grammar, kept):
    """Return the probability that symbols say exactly these words, after what was kept."""
    if not symbols:
        return 0.0 if words else 1.0
    symbol, *rest = symbols
    if isinstance(symbol, Rule):
        alternatives = grammar.rules[symbol.name]
        return sum(
            weight(i, alternatives) * probability_of(words, [*one, *rest], grammar, kept)
            for i, one in enumerate(alternatives)
        )
    if not words:
        return 0.0
    word, *others = words
    if isinstance(symbol, Bind):
        choices = grammar.values[symbol.variable][kept[symbol.given] if symbol.given else ""]
        if word not in choices:
            return 0.0
        p = weight(choices.index(word), choices)
        return p * probability_of(others, rest, grammar, {**kept, symbol.variable: word})
    return probability_of(others, rest, grammar, kept) if word == said(symbol, grammar, kept) else 0


def weight(index, choices):
    """Return the probability of one of n choices, proportional to n, n − 1, …, 1."""
    return (len(choices) - index) / (len(choices) * (len(choices) + 1) / 2)


def said(symbol, grammar, kept):
    """Return the word that a word, or a place that says a kept value, stands for."""
    if isinstance(symbol, str):
        return symbol
    if symbol.form not in grammar.forms:
        return kept[symbol.form]
    variable, words = grammar.forms[symbol.form]
    return words[kept[variable]]
