"""The checks: every fact that a claim about batch sizes rests on, judged once.

The report and `sweep audit` make these checks. A check is one function with the decorator `check`
in trials.py (a table of trials), curves.py (steps to a target) or commands.py (`sweep check`). A
package adds one to tables of trials by the same decorator, and names the module in the group of
entry points `sweep.checks`.
"""

from sweep.analysis.checks.curves import MISSING_CURVES
from sweep.analysis.checks.evaluate import (
    about_examples,
    build_check,
    check_curve,
    check_rows,
    checks_of_command,
    supports_crossings,
    supports_fit,
)
from sweep.analysis.checks.registry import (
    DEFINITIONS,
    FAIL,
    NOT_APPLICABLE,
    PASS,
    Check,
    CheckDefinition,
    NotApplicable,
    Subject,
    Verdict,
    check,
)
from sweep.analysis.checks.table import TrialTable
from sweep.analysis.checks.trials import learning_rate_at_edge, single_seed, tokens_differ

# The codes of the checks that need the curves of the trials.
CURVE_CHECKS = tuple(
    definition.code
    for definition in DEFINITIONS.values()
    if definition.subject in (Subject.FIT, Subject.CROSSINGS)
)

__all__ = [
    "CURVE_CHECKS",
    "DEFINITIONS",
    "FAIL",
    "MISSING_CURVES",
    "NOT_APPLICABLE",
    "PASS",
    "Check",
    "CheckDefinition",
    "NotApplicable",
    "Subject",
    "TrialTable",
    "Verdict",
    "about_examples",
    "build_check",
    "check",
    "check_curve",
    "check_rows",
    "checks_of_command",
    "learning_rate_at_edge",
    "single_seed",
    "supports_crossings",
    "supports_fit",
    "tokens_differ",
]
