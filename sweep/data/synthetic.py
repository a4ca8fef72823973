"""Built-in stories from a probabilistic grammar whose entropy is known exactly.

Every story has one derivation, so −log p(story) is the sum over the choices made, and its mean, the
entropy, follows from the rules alone. No model can have a lower expected loss per document; divided
by the mean tokens per document (separator included) it bounds the loss per token from below.
"""

import functools
import itertools
import math
import random
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sweep.data.grammar import FORMS, GRAMMAR_VERSION, RULES, START, VALUES
from sweep.errors import SweepError

WORD = re.compile(r"\"?[A-Za-z']+|[.,!?]+\"?")
SYMBOL = re.compile(rf"\[\w+\]|<\w+(?::\w+)?>|{{\w+}}|{WORD.pattern}")
SPACE_BEFORE_POINT = re.compile(r" (?=[.,!?])")


@dataclass(frozen=True)
class Rule:
    """A place that the named rule expands."""

    name: str


@dataclass(frozen=True)
class Bind:
    """A place that draws a value, says it and keeps it."""

    variable: str
    given: str | None


@dataclass(frozen=True)
class Get:
    """A place that says a kept value, or a word that agrees with it."""

    form: str


Symbol = str | Rule | Bind | Get  # str: one word or punctuation mark


def _falling_weights(count: int) -> list[float]:
    """Return the probabilities of n choices, proportional to n, n − 1, …, 1."""
    return [2 * (count - i) / (count * (count + 1)) for i in range(count)]


def _entropy(count: int) -> float:
    return -sum(p * math.log(p) for p in _falling_weights(count))


def _parse_template(template: str) -> tuple[Symbol, ...]:
    symbols: list[Symbol] = []
    for part in SYMBOL.findall(template):
        if part[0] == "[":
            symbols.append(Rule(part[1:-1]))
        elif part[0] == "<":
            variable, _, given = part[1:-1].partition(":")
            symbols.append(Bind(variable, given or None))
        elif part[0] == "{":
            symbols.append(Get(part[1:-1]))
        else:
            symbols.append(part)
    return tuple(symbols)


class Grammar:
    """A probabilistic grammar with kept values: generation, exact probability, exact entropy.

    The choice among a rule's alternatives never depends on kept values, so that the entropy is a
    sum over places, each weighted with the probability that it is reached.
    """

    def __init__(
        self,
        rules: Mapping[str, Sequence[str]],
        values: Mapping[str, Mapping[str, str]],
        forms: Mapping[str, tuple[str, Mapping[str, str]]],
        start: str,
    ) -> None:
        self.start = start
        self.forms = forms
        self.rules = {
            name: [_parse_template(alternative) for alternative in alternatives]
            for name, alternatives in rules.items()
        }
        self.values = {
            variable: {given: text.split(", ") for given, text in lists.items()}
            for variable, lists in values.items()
        }
        self.givens = {
            symbol.variable: symbol.given
            for alternatives in self.rules.values()
            for symbol in itertools.chain.from_iterable(alternatives)
            if isinstance(symbol, Bind)
        }
        counts = {len(alternatives) for alternatives in self.rules.values()}
        counts |= {len(one) for lists in self.values.values() for one in lists.values()}
        self._probability = {n: _falling_weights(n) for n in counts}
        self._cumulative = {n: list(itertools.accumulate(_falling_weights(n))) for n in counts}

    def generate(self, rng: random.Random) -> tuple[str, float]:
        """Return a story and the log of its probability (nats)."""
        words: list[str] = []
        kept: dict[str, str] = {}
        log_probability = 0.0
        pending: list[Symbol] = [Rule(self.start)]
        while pending:
            symbol = pending.pop()
            if isinstance(symbol, str):
                words.append(symbol)
            elif isinstance(symbol, Get):
                words.append(self._say(symbol, kept))
            else:
                choices: Sequence[Any] = (
                    self.rules[symbol.name]
                    if isinstance(symbol, Rule)
                    else self._choices(symbol, kept)
                )
                count = len(choices)
                chosen = min(bisect_right(self._cumulative[count], rng.random()), count - 1)
                log_probability += math.log(self._probability[count][chosen])
                if isinstance(symbol, Rule):
                    pending.extend(reversed(choices[chosen]))
                else:
                    kept[symbol.variable] = choices[chosen]
                    words.append(choices[chosen])
        return SPACE_BEFORE_POINT.sub("", " ".join(words)), log_probability

    def _choices(self, bind: Bind, kept: Mapping[str, str]) -> list[str]:
        return self.values[bind.variable][kept[bind.given] if bind.given else ""]

    def _say(self, get: Get, kept: Mapping[str, str]) -> str:
        if get.form in self.forms:
            variable, words = self.forms[get.form]
            return words[kept[variable]]
        return kept[get.form]

    def entropy(self) -> float:
        """Return the entropy of a story in nats, exactly: no sampling."""
        return self._entropy_of(Rule(self.start))

    def _entropy_of(self, symbol: Symbol) -> float:
        if isinstance(symbol, Rule):
            alternatives = self.rules[symbol.name]
            return _entropy(len(alternatives)) + sum(
                p * sum(map(self._entropy_of, alternative))
                for alternative, p in zip(
                    alternatives, self._probability[len(alternatives)], strict=True
                )
            )
        if isinstance(symbol, Bind):
            given = self._marginal(symbol.given) if symbol.given else {"": 1.0}
            lists = self.values[symbol.variable]
            return sum(p * _entropy(len(lists[value])) for value, p in given.items())
        return 0.0

    def _marginal(self, variable: str) -> dict[str, float]:
        """Return the distribution of a variable where it is bound."""
        above = self.givens[variable]
        marginal: dict[str, float] = {}
        for given, p in (self._marginal(above) if above else {"": 1.0}).items():
            values = self.values[variable][given]
            for value, q in zip(values, self._probability[len(values)], strict=True):
                marginal[value] = marginal.get(value, 0.0) + p * q
        return marginal


@functools.cache
def story_grammar() -> Grammar:
    """Return the grammar of the built-in stories."""
    return Grammar(RULES, VALUES, FORMS, START)


def synthetic_identity(seed: int = 0, train: int = 5000, valid: int = 350) -> dict[str, Any]:
    """Return the identity of a set of stories: grammar version, seed and numbers of documents."""
    documents = {"train": train, "valid": valid}
    return {
        "name": "synthetic",
        "grammar_version": GRAMMAR_VERSION,
        "seed": seed,
        "documents": documents,
    }


def synthetic_documents(identity: Mapping[str, Any], split: str) -> Iterator[str]:
    """Generate the documents of a split, each from (seed, split, its index) alone.

    Raises:
        SweepError: if another version of the grammar is asked for.
    """
    if identity["grammar_version"] != GRAMMAR_VERSION:
        raise SweepError(
            f"synthetic stories must be of grammar version {GRAMMAR_VERSION}, got "
            f"{identity['grammar_version']!r}. Use the version of sweep that planned this."
        )
    grammar = story_grammar()
    for index in range(identity["documents"][split]):
        rng = random.Random(f"{GRAMMAR_VERSION}/{identity['seed']}/{split}/{index}")
        yield grammar.generate(rng)[0]


def entropy_per_document() -> float:
    """Return the exact entropy of a story in nats, its end included."""
    return story_grammar().entropy()
