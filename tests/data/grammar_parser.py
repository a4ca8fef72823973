"""The probability of a text under a grammar, by parsing it, and the exact entropy of a story."""

import math

from sweep.data.synthetic import SPACE_BEFORE_POINT, WORD, parse_template, story_grammar


def log_probability(document, grammar=None):
    """Return the log of the probability, summed over all derivations; −inf if there is none."""
    grammar = grammar or story_grammar()
    words = WORD.findall(document)
    if SPACE_BEFORE_POINT.sub("", " ".join(words)) != document:
        return -math.inf
    probability = probability_of(words, parse_template(f"[{grammar['start']}]"), grammar, {})
    return math.log(probability) if probability else -math.inf


def probability_of(words, symbols, grammar, remembered):
    """Return the probability that symbols produce exactly these words."""
    if not symbols:
        return 0.0 if words else 1.0
    (rule, variable, given, form, expected), *rest = symbols
    if rule:
        return sum(
            p * probability_of(words, [*parse_template(template), *rest], grammar, remembered)
            for template, p in weighted(grammar["rules"][rule])
        )
    if not words:
        return 0.0
    word, *others = words
    if variable:
        values = grammar["values"][variable]
        p = dict(weighted(values[remembered[given]] if given else values)).get(word, 0.0)
        return p and p * probability_of(others, rest, grammar, {**remembered, variable: word})
    if form in grammar["forms"]:
        variable, agreeing = grammar["forms"][form]
        expected = agreeing[remembered[variable]]
    elif form:
        expected = remembered[form]
    return probability_of(others, rest, grammar, remembered) if word == expected else 0.0


def weighted(choices):
    """Return pairs of choice and probability, proportional to n, n − 1, …, 1."""
    count = len(choices)
    return [(choice, 2 * (count - i) / (count * (count + 1))) for i, choice in enumerate(choices)]


def entropy(grammar, template=None):
    """Return the exact entropy in nats of what a template becomes, by default a story: no sampling.

    The choice among alternatives does not depend on remembered values, so it is a sum over symbols,
    each weighted with the probability that a derivation reaches it.
    """
    total = 0.0
    for rule, variable, given, _, _ in parse_template(template or f"[{grammar['start']}]"):
        if rule:
            alternatives = weighted(grammar["rules"][rule])
            total += entropy_of_choice(grammar["rules"][rule])
            total += sum(p * entropy(grammar, text) for text, p in alternatives if text)
        elif given:
            conditions, values = weighted(grammar["values"][given]), grammar["values"][variable]
            total += sum(p * entropy_of_choice(values[condition]) for condition, p in conditions)
        elif variable:
            total += entropy_of_choice(grammar["values"][variable])
    return total


def entropy_of_choice(choices):
    return -sum(p * math.log(p) for _, p in weighted(choices))
