"""The probability of a text under a grammar, by parsing it, and the exact entropy of a story."""

import math

from sweep.data.synthetic_stories import (
    SPACE_BEFORE_POINT,
    WORD,
    parse_template,
    story_grammar,
)


def log_probability(document, grammar=None):
    """Return the log of the probability, summed over all derivations; −inf if there is none."""
    probability = sum_derivations(document, grammar or story_grammar(), weighted)
    return math.log(probability) if probability else -math.inf


def derivation_count(document, grammar=None):
    def unweighted(choices):
        return [(choice, 1) for choice in choices]

    return sum_derivations(document, grammar or story_grammar(), unweighted)


def sum_derivations(document, grammar, weigh):

    def total(words, symbols, remembered):
        if not symbols:
            return 0 if words else 1
        (rule, variable, condition, form, expected), *rest = symbols
        if rule:
            return sum(
                weight * total(words, [*parse_template(template), *rest], remembered)
                for template, weight in weigh(grammar["rules"][rule])
            )
        if not words:
            return 0
        word, *others = words
        if variable:
            values = grammar["values"][variable]
            choices = values[remembered[condition]] if condition else values
            weight = dict(weigh(choices)).get(word, 0)
            return weight and weight * total(others, rest, {**remembered, variable: word})
        if form in grammar["forms"]:
            variable, agreeing = grammar["forms"][form]
            expected = agreeing[remembered[variable]]
        elif form:
            expected = remembered[form]
        return total(others, rest, remembered) if word == expected else 0

    words = WORD.findall(document)
    if SPACE_BEFORE_POINT.sub("", " ".join(words)) != document:
        return 0
    return total(words, parse_template(f"[{grammar['start']}]"), {})


def weighted(choices):
    count = len(choices)
    return [(choice, 2 * (count - i) / (count * (count + 1))) for i, choice in enumerate(choices)]


def entropy(grammar, template=None):
    """Return the exact entropy in nats of a template, by default of a story."""
    # No choice among alternatives depends on remembered values: a sum over symbols, each weighted
    # with the probability that a derivation reaches it.
    total = 0.0
    for rule, variable, condition, _, _ in parse_template(template or f"[{grammar['start']}]"):
        if rule:
            alternatives = weighted(grammar["rules"][rule])
            total += entropy_of_choice(grammar["rules"][rule])
            total += sum(p * entropy(grammar, text) for text, p in alternatives if text)
        elif condition:
            conditions, values = weighted(grammar["values"][condition]), grammar["values"][variable]
            total += sum(p * entropy_of_choice(values[value]) for value, p in conditions)
        elif variable:
            total += entropy_of_choice(grammar["values"][variable])
    return total


def entropy_of_choice(choices):
    return -sum(p * math.log(p) for _, p in weighted(choices))
