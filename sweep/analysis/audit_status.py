"""What a status cell of somebody's sweep says: ended well, failed, diverged, out of memory.

A word of failure counts unless it is denied ("no OOM", "0 errors", "errors: none"), or the cell
begins with one of success ("OK after one retry"). In words: docs/audit.md.
"""

import re

LONGEST = 200  # characters of a cell that are read
OUT_OF_MEMORY = r"(?<![a-z])oom(?![a-z])|oom.?kill|out.?of.?memory"
DIVERGED = r"diverg|\bnan\b"
UNFINISHED = (
    r"waiting|running|pending|queued|prune|abort|kill|timed?.?out|\blost\b|unfinished|incomplete|"
    r"\bnot (?:yet )?(?:finished|complete|done)"
)
FAILED = rf"{OUT_OF_MEMORY}|{DIVERGED}|{UNFINISHED}|fail|error|crash|✗|✘|❌"
WORD = rf"(?:run |ran |running )?\w*(?:{FAILED})\w*(?:[\s-]+(?:errors?|failures?|crash(?:es)?))?"
BETWEEN = (  # a denial and what it denies
    r"(?:(?:an?|any|single|signs?|of|the|more|further|longer|ever|ha[sd]|been|was|were|cuda|gpu|"
    r"memory|numerical|training|runs?|seeds?|trials?)[\s-]+)*?"
)
NO = r"(?:\b(?:no|not|non|never|none|neither|without|zero)|n['’]t)[\s-]+"
ZERO = r"(?:^|[,;(]|\bwith|\band)\s*0\s*(?:(?:of|/)\s*[0-9]+\s+)?"  # not that of "seed 0 failed"
DENIED = re.compile(
    rf"(?:{NO}|{ZERO}){BETWEEN}{WORD}(?:(?:\s*/\s*|,?\s+n?or\s+){BETWEEN}{WORD})*"
    rf"|{WORD}\s*[:=?]\s*(?:no|none|never|0|false)(?=\s*(?:$|[,;.)|]))"
)
BEGINS_WELL = re.compile(
    r"[\s*_`\[(]*(?:(?:ok|okay|done|finished|completed?|success|successful|successfully|succeeded|"
    r"passed|converged)\b|[✓✔✅])"
)
ENDS_BADLY = re.compile(rf"{DIVERGED}|\b(?:until|then|except)\b")


def has_failed(text: str) -> bool:
    """Tell whether a trial failed, or has not ended."""
    return _says(text, FAILED)


def has_diverged(text: str) -> bool:
    """Tell whether a trial failed because its loss did."""
    return _says(text, DIVERGED)


def is_out_of_memory(text: str) -> bool:
    """Tell whether a trial failed for want of memory."""
    return _says(text, OUT_OF_MEMORY)


def _says(text: str, pattern: str) -> bool:
    left = DENIED.sub(" ", text[:LONGEST].lower())
    if BEGINS_WELL.match(left) and not ENDS_BADLY.search(left):
        return False
    return re.search(pattern, left) is not None
