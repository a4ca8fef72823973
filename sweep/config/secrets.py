"""Find passwords, tokens and keys in commands, which plans, logs, reports and MLflow would keep."""

import itertools
import logging
import os
import re
import shlex
from collections.abc import Iterator

from sweep.errors import SweepError

LOG = logging.getLogger(__name__)
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # of names such as HF_TOKEN, api-key, apiKey
# NAME=VALUE, --name=value, "name": "value" and those in lists; an option's value may be a word.
PAIR = re.compile(r"([A-Za-z_][\w.-]*)[\"']?\s*([=:])\s*[\"']?([^\s\"',;&]+)")
OPTION = re.compile(r"--?([A-Za-z_][\w.-]*)")
ADDRESS_PASSWORD = re.compile(r"://[^/\s:@]*:([^@\s/]+)@")
# Forms that the owners of credentials publish: Hugging Face, OpenAI, GitHub, GitLab, Slack, AWS.
CREDENTIAL = re.compile(
    r"(?<![\w-])(hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abp]-|AKIA|eyJ)[\w.-]{14}"
)
SECRET = {"secret", "secrets", "password", "passwd", "passphrase", "passcode", "apikey"}
SECRET |= {"credential", "credentials", "authorization"}
# A key or a token is a secret if its name ends so; these say of which kind it is.
ENDING = {"key", "token"}
OF_SERVICES = {"api", "access", "auth", "bearer", "hf", "hub", "private", "wandb"}
OF_DATA = {"bos", "eos", "pad", "unk", "mask", "sep", "cls", "special", "extra", "stop", "start"}
OF_DATA |= {"end", "text", "image", "label", "input", "output", "target", "prompt", "answer"}
OF_DATA |= {"response", "sort", "group", "data", "dataset", "column", "metric", "feature"}
# Names that end so tell where a secret is.
POINTER = {"file", "path", "dir", "env", "var", "variable", "name", "id", "size", "dim"}
SWITCH = {"true", "false", "none", "null", "yes", "no", "auto"}
REFERENCE = re.compile(r"\$|\{\w+\}")  # to a variable of a shell, or a placeholder
PLAIN = re.compile(r"[A-Za-z][A-Za-z_. -]{0,19}|[-+]?\d[\d.e+-]*|[<\[].*")  # words, numbers, <pad>


def refuse_secrets(text: str, subject: str = "the command") -> None:
    """Refuse a command with a value whose name says that it is secret; warn if it may be."""
    if CREDENTIAL.search(text):
        raise _refusal(subject, "one in the form of a service's")
    for match in ADDRESS_PASSWORD.finditer(text):
        if not REFERENCE.match(match[1]):
            raise _refusal(subject, "an address with a password")
    words = _words(text)
    for name, value, is_variable in _values(words):
        if _is_harmless(value):
            continue
        parts = [part.lower() for part in WORD.findall(name)]
        shown = f"a value of {name[:60]}"
        if _is_secret(parts, value, is_variable):
            raise _refusal(subject, shown)
        if _may_be_secret(parts):
            advice = "If it is secret, export a variable that the script reads instead."
            LOG.warning("%s contains %s, which will be stored. %s", subject, shown, advice)


def _refusal(subject: str, shown: str) -> SweepError:
    remedy = "Export it as a variable before `sweep run`, which the script inherits and can read"
    return SweepError(f"{subject} must not contain a secret, got {shown}. {remedy}.")


def _words(text: str) -> list[str]:
    """Return the words of a command, and those of words that are texts, such as `sh -c TEXT`."""
    try:
        words = shlex.split(text)
    except ValueError:  # quotes are not balanced
        return text.split()
    parts: list[str] = []
    for word in words:
        is_text = word != text and any(map(str.isspace, word))
        parts += _words(word) if is_text else [word]
        if is_text:
            parts.append(word)  # for values after a colon and a space
    return parts


def _values(words: list[str]) -> Iterator[tuple[str, str, bool]]:
    """Yield names, their values, and whether they are variables of the environment."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        for name, sign, value in PAIR.findall(word):
            yield name, value, sign == "=" and name.isupper()
        option = OPTION.fullmatch(word)
        if option and not following.startswith("-"):
            yield option[1], following, False


def _is_harmless(value: str) -> bool:
    """Return True for no value, a reference to one, a switch, or the name of a file."""
    if not value or REFERENCE.match(value):
        return True
    return value.lower() in SWITCH or os.path.exists(value)


def _is_secret(parts: list[str], value: str, is_variable: bool) -> bool:
    if not parts or parts[-1] in POINTER:
        return False
    if SECRET.intersection(parts):
        return True
    pairs = itertools.pairwise(parts)
    if any(first in OF_SERVICES and second in ENDING for first, second in pairs):
        return True
    if parts[-1] not in ENDING or OF_DATA.intersection(parts):
        return False
    return is_variable or parts == ["token"] or not PLAIN.fullmatch(value)


def _may_be_secret(parts: list[str]) -> bool:
    return bool(parts) and parts[-1] in ENDING and not OF_DATA.intersection(parts)
