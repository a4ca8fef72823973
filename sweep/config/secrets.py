"""Find passwords, tokens and keys in commands, which plans, logs, reports and MLflow would keep."""

import logging
import os
import re
import shlex
from collections.abc import Iterator
from itertools import zip_longest

from sweep.errors import SweepError, cut

LOG = logging.getLogger(__name__)
WORD = re.compile(r"[A-Z]+s?(?![a-z])|[A-Z]?[a-z]+")  # words of HF_TOKEN, api-key, apiKey
# NAME=VALUE, --name=value, "name": "value" and those in lists; an option's value may be a word. The
# value is looked ahead, because it may hold a pair itself, as in --export=HF_TOKEN=value.
PAIR = re.compile(r"([A-Za-z_][\w.-]*)[\"']?\s*([=:])\s*[\"']?(?=([^\s\"',;&]+))")
OPTION = re.compile(r"--?([A-Za-z_][\w.-]*)")
ADDRESS_PASSWORD = re.compile(r"://[^/\s:@]*:([^@\s/]+)@")
ADDRESS_USER = re.compile(r"https?://([^/\s:@?#]+):?@")  # may be a token; databases have users
# Addresses that are secrets themselves: Slack, Discord, Teams.
WEBHOOK = re.compile(
    r"hooks\.slack\.com/\w+/\w|discord(app)?\.com/api/webhooks/\w|webhook\.office\.com/\w"
)
# Forms that the owners of credentials publish: Hugging Face, OpenAI, GitHub, GitLab, Slack, AWS.
CREDENTIAL = re.compile(
    r"(?<![\w-])(hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abp]-|AKIA|eyJ)[\w.-]{14}"
)
# The expressions below are for names in lower case with `_` between the words.
SECRET = re.compile(r"secret|password|passwd|passphrase|passcode|apikey|credential|authorization")
OF_SERVICES = re.compile(
    r"(?<![a-z])(api|access|auth|bearer|hf|hub|private|wandb)_(key|token)s?(?![a-z])"
)
SHORT = re.compile(r"(?<![a-z])(pass|pw|pwd|pat|o?auth)\Z|(?<!by|om|ow|gh|nd)(pass|pwd)\Z")
KEY_OR_TOKEN = re.compile(r"(key|token)\Z")
CONTAINED = re.compile(r"key|token")
# Words that only look like secrets, and keys and tokens that belong to models and data.
HARMLESS = re.compile(
    r"tokeni[sz][a-z]*|key(board|word|point|frame|stroke)[a-z]*|(mon|tur|don|hoc|joc|whis|hot)keys?"
    r"|secretary|passwordless|key_value_[a-z]+|(key|token)_(dim|size|level)[a-z]*"
    r"|(?<![a-z])(max|min|num|n|total)(_[a-z]+)?_?tokens|tokens_(per|seen|trained)"
    r"|(?<![a-z])(bos|eos|pad|unk|mask|sep|cls|special|extra|stop)_?tokens?"
)
FIELD = re.compile(  # in an option; a variable of this name may be for a service
    r"(?<![a-z])(text|image|label|input|output|target|prompt|answer|response)_(key|token)s?"
    r"|(?<![a-z])(sort|group|data|dataset|column|metric|feature)_keys?|(?<![a-z])(start|end)_tokens?"
)
# Names with these endings tell where a secret is stored, and have no secret as their value.
POINTER = re.compile(r"(?<![a-z])(file|path|dir|env|var|variable|name)\Z")
SWITCH = {"true", "false", "none", "null", "yes", "no", "auto"}
REFERENCE = re.compile(r"\$|\{\w+\}")  # to a variable of a shell, or a placeholder
PLAIN = re.compile(r"[A-Za-z][A-Za-z_. -]{0,19}|[-+]?\d[\d.e+-]*|[<\[].*")  # words, numbers, <pad>
NUMBER = re.compile(r"[-+]?\d[\d_.]*(e[-+]?\d+)?[kMGBT]?")
LEAST_TOKEN = 16  # characters of a user in an address that can only be a token


def refuse_secrets(text: str, subject: str = "the command") -> None:
    """Refuse a command with a value whose name says that it is secret; warn if it may be."""
    if CREDENTIAL.search(text):
        raise _refusal(subject, "one in the form of a service's")
    if WEBHOOK.search(text):
        raise _refusal(subject, "the address of a webhook")
    for match in ADDRESS_PASSWORD.finditer(text):
        if not REFERENCE.match(match[1]):
            raise _refusal(subject, "an address with a password")
    for match in ADDRESS_USER.finditer(text):
        if REFERENCE.match(match[1]):
            continue
        if len(match[1]) >= LEAST_TOKEN and not PLAIN.fullmatch(match[1]):
            raise _refusal(subject, "an address with a token")
        _warn(subject, "an address with a user or a token")
    for name, value, is_variable in dict.fromkeys(_values(_words(text))):
        if _is_harmless(value):
            continue
        words = "_".join(part.lower() for part in WORD.findall(name))
        secret = f"a value of {cut(name, 60)}"
        if _is_secret(words, value, is_variable):
            raise _refusal(subject, secret)
        if _may_be_secret(words, value, is_variable):
            _warn(subject, secret)


def _warn(subject: str, secret: str) -> None:
    advice = "If it is secret, export a variable that the script reads instead."
    LOG.warning("%s contains %s, which will be stored. %s", subject, secret, advice)


def _refusal(subject: str, secret: str) -> SweepError:
    remedy = "Export it as a variable before `sweep run`, which the script inherits and can read"
    return SweepError(f"{subject} must not contain a secret, got {secret}. {remedy}.")


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
            parts.append(word)  # a value may follow a colon and a space
    return parts


def _values(words: list[str]) -> Iterator[tuple[str, str, bool]]:
    """Yield names, their values, and whether they are variables of the environment."""
    for word, following in zip_longest(words, words[1:], fillvalue=""):
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


def _is_secret(words: str, value: str, is_variable: bool) -> bool:
    """Return True if the words of a name, and its value, leave no doubt."""
    name = HARMLESS.sub("", words)
    if POINTER.search(name) or name.endswith("_id"):
        return False
    if SECRET.search(name) or OF_SERVICES.search(words):
        return True
    if FIELD.search(name):
        return False
    if SHORT.search(name):
        if value.startswith("/") or NUMBER.fullmatch(value):  # PWD=/work, FORWARD_PASS=2
            return False
        return is_variable or not PLAIN.fullmatch(value)
    if not KEY_OR_TOKEN.search(name):
        return False
    if is_variable or name == "token":
        return True
    is_word = name.split("_")[-1] in ("key", "token")
    return is_word and not PLAIN.fullmatch(value)


def _may_be_secret(words: str, value: str, is_variable: bool) -> bool:
    """Return True if a name contains a word for secrets that is not known to be harmless."""
    name = HARMLESS.sub("", words)
    if not is_variable:
        name = FIELD.sub("", name)
    if POINTER.search(name):
        return False
    if SECRET.search(name) or SHORT.search(name) or KEY_OR_TOKEN.search(name):
        return True
    return bool(CONTAINED.search(name)) and not NUMBER.fullmatch(value)  # a number counts tokens
