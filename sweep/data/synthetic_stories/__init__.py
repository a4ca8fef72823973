"""Generate the built-in stories from a probabilistic grammar (grammar.toml).

Every story has one derivation, so the rules give its entropy: the least expected loss of a model.
"""

import functools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sweep.data.plain_text import Piece, Reader
from sweep.errors import SweepError
from sweep.resources import read_toml

GRAMMAR_VERSION = 1
WORD = re.compile(r"\"?[A-Za-z']+|[.,!?]+\"?")
# The groups are rule, variable, the variable that its values depend on, form, and word.
SYMBOL = re.compile(rf"\[(\w+)\]|<(\w+)(?::(\w+))?>|{{(\w+)}}|({WORD.pattern})")
SPACE_BEFORE_POINT = re.compile(r" (?=[.,!?])")


@functools.cache
def parse_template(template: str) -> list[tuple[str, ...]]:
    return SYMBOL.findall(template)


@functools.cache
def story_grammar() -> dict[str, Any]:
    return read_toml(__file__, "grammar.toml")


def generate_story(grammar: Mapping[str, Any], rng: random.Random) -> str:
    """Return a random story. The probabilities of n choices are proportional to n, n − 1, …, 1."""
    remembered: dict[str, str] = {}  # values by variable

    def choose(choices: Sequence[str]) -> str:
        return rng.choices(choices, weights=range(len(choices), 0, -1))[0]

    def expand(template: str) -> Iterator[str]:
        for rule, variable, condition, form, word in parse_template(template):
            if rule:
                yield from expand(choose(grammar["rules"][rule]))
            elif variable:
                values = grammar["values"][variable]
                if condition:
                    values = values[remembered[condition]]
                remembered[variable] = choose(values)
                yield remembered[variable]
            elif form in grammar["forms"]:
                variable, words = grammar["forms"][form]
                yield words[remembered[variable]]
            else:
                yield word or remembered[form]

    return SPACE_BEFORE_POINT.sub("", " ".join(expand(f"[{grammar['start']}]")))


def synthetic_identity(seed: int = 0, train: int = 5000, valid: int = 350) -> dict[str, Any]:
    identity = {"name": "synthetic", "grammar_version": GRAMMAR_VERSION, "seed": seed}
    return identity | {"documents": {"train": train, "valid": valid}}


def synthetic_documents(identity: Mapping[str, Any], split: str) -> Iterator[str]:
    """Generate the documents of a split, each from (seed, split, its index) alone."""
    version = identity["grammar_version"]
    if version != GRAMMAR_VERSION:
        raise SweepError(f"stories must have grammar version {GRAMMAR_VERSION}, got {version!r}.")
    for index in range(identity["documents"][split]):
        rng = random.Random(f"{GRAMMAR_VERSION}/{identity['seed']}/{split}/{index}")
        yield generate_story(story_grammar(), rng)


def open_split(identity: Mapping[str, Any], split: str) -> Reader:
    return lambda: map(Piece, synthetic_documents(identity, split))
