"""Generate the built-in stories from a probabilistic grammar (grammar.toml).

Every story has one derivation, so the entropy of a story follows from the rules alone. No model can
have a lower expected loss per document; the tests use this as a bound.
"""

import functools
import itertools
import random
import re
import tomllib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sweep.errors import SweepError

GRAMMAR_VERSION = 1
WORD = re.compile(r"\"?[A-Za-z']+|[.,!?]+\"?")
SYMBOL = re.compile(
    r"\[(?P<rule>\w+)\]|<(?P<variable>\w+)(?::(?P<given>\w+))?>|{(?P<form>\w+)}"
    rf"|(?P<word>{WORD.pattern})"
)
SPACE_BEFORE_POINT = re.compile(r" (?=[.,!?])")


class Symbol(NamedTuple):
    """A part of a template: a rule, a variable, a form of a remembered value, or a word."""

    kind: str  # rule, variable, form or word
    name: str
    given: str = ""  # the variable that the choice of a variable's value depends on


def parse_template(template: str) -> list[Symbol]:
    """Return the symbols of one alternative of a rule."""
    return [
        Symbol(kind, match[kind], match["given"] or "")
        for match in SYMBOL.finditer(template)
        for kind in ("rule", "variable", "form", "word")
        if match[kind]
    ]


def choice_probabilities(count: int) -> list[float]:
    """Return the probabilities of n choices, proportional to n, n − 1, …, 1."""
    return [2 * (count - i) / (count * (count + 1)) for i in range(count)]


@functools.cache
def _cumulative_probabilities(count: int) -> tuple[float, ...]:
    return tuple(itertools.accumulate(choice_probabilities(count)))


class Grammar:
    """A probabilistic grammar with remembered values, from a document such as grammar.toml."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.start = Symbol("rule", document["start"])
        self.rules = {
            name: [parse_template(alternative) for alternative in alternatives]
            for name, alternatives in document["rules"].items()
        }
        self.values: dict[str, dict[str, list[str]]] = {}
        for variable, lists in document["values"].items():
            by_given = {"": lists} if isinstance(lists, str) else lists
            self.values[variable] = {given: text.split(", ") for given, text in by_given.items()}
        self.forms: Mapping[str, tuple[str, Mapping[str, str]]] = document["forms"]

    def generate(self, rng: random.Random) -> str:
        """Return a random story."""
        words: list[str] = []
        remembered = {"": ""}
        pending = [self.start]
        while pending:
            kind, name, given = pending.pop()
            if kind == "word":
                words.append(name)
            elif kind == "form":
                words.append(self.form(name, remembered))
            else:
                choices: Sequence[Any] = (
                    self.rules[name] if kind == "rule" else self.values[name][remembered[given]]
                )
                cumulative = _cumulative_probabilities(len(choices))
                choice = choices[min(bisect_right(cumulative, rng.random()), len(choices) - 1)]
                if kind == "rule":
                    pending.extend(reversed(choice))
                else:
                    remembered[name] = choice
                    words.append(choice)
        return SPACE_BEFORE_POINT.sub("", " ".join(words))

    def form(self, name: str, remembered: Mapping[str, str]) -> str:
        """Return a remembered value, or the word that agrees with it."""
        if name not in self.forms:
            return remembered[name]
        variable, words = self.forms[name]
        return words[remembered[variable]]


@functools.cache
def story_grammar() -> Grammar:
    """Return the grammar of the built-in stories."""
    return Grammar(tomllib.loads(Path(__file__).with_name("grammar.toml").read_text("utf-8")))


def synthetic_identity(seed: int = 0, train: int = 5000, valid: int = 350) -> dict[str, Any]:
    """Return the identity of a set of stories: grammar version, seed and numbers of documents."""
    documents = {"train": train, "valid": valid}
    version = GRAMMAR_VERSION
    return {"name": "synthetic", "grammar_version": version, "seed": seed, "documents": documents}


def synthetic_documents(identity: Mapping[str, Any], split: str) -> Iterator[str]:
    """Generate the documents of a split, each from (seed, split, its index) alone.

    Raises:
        SweepError: if the identity names another version of the grammar.
    """
    if (version := identity["grammar_version"]) != GRAMMAR_VERSION:
        raise SweepError(
            f"synthetic stories must be of grammar version {GRAMMAR_VERSION}, got {version!r}. "
            "Use the version of sweep that planned this."
        )
    for index in range(identity["documents"][split]):
        rng = random.Random(f"{GRAMMAR_VERSION}/{identity['seed']}/{split}/{index}")
        yield story_grammar().generate(rng)
