"""The power law of the best batch size over training tokens, and over model sizes.

    ln B* = c + β·ln D (+ γ·ln N)

It is a regression on the best batch sizes of complete sweeps. Their weights are 1/(w² + τ²): w is
the standard error of one, and τ, by restricted maximum likelihood, how far true values lie off the
line. The intervals of exponents are those of Knapp and Hartung (2003, doi:10.1002/sim.1482). Few
points that lie on a line by luck make these narrow, so a prediction, and the verdict whether the
law is known well enough for one, take at least the errors that the points have (Röver et al. 2015,
doi:10.1186/s12874-015-0091-1).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import stdtrit

from sweep.analysis.tables import Estimate
from sweep.decision.curves import Floats
from sweep.decision.decision import ALPHA

LEAST_BUDGETS = 3  # two parameters and a residual
LEAST_MODELS = 3
DEVIATIONS = 4.0  # width of a 95 % interval in standard errors
LEAST_ERROR = 1e-6  # least standard error of a log batch size
LARGEST_SPREAD = 10.0  # τ that is tried, in natural logarithms


@dataclass(frozen=True)
class Optimum:
    """The best batch size of one budget of one model, inside the batch sizes that were tried."""

    tokens: float  # training tokens
    batch_size: float  # in sequences, or in tokens
    low: float  # its 95 % interval
    high: float
    parameters: float | None = None  # model size; None: not known


@dataclass(frozen=True, eq=False)
class Law:
    coefficients: Floats  # c, β and, with a term in N, γ
    covariance: Floats  # by the residuals
    least_covariance: Floats  # by the errors of the points and their spread
    spread: float  # τ, a standard deviation of ln B*
    degrees: int  # degrees of freedom
    has_parameters: bool  # whether there is a term in N
    log_tokens: float  # mean ln D, from which D is measured
    log_parameters: float  # mean ln N, or 0

    @property
    def exponent(self) -> Estimate:
        """β with its 95 % interval."""
        return self._estimate(1)

    @property
    def exponent_of_parameters(self) -> Estimate | None:
        """γ with its 95 % interval; None without a term in N."""
        return self._estimate(2) if self.has_parameters else None

    @property
    def width(self) -> float:
        """The width of the 95 % interval of β, at least that by the errors of the points."""
        row = np.zeros(len(self.coefficients))
        row[1] = 1.0
        return 2 * self._critical_value * math.sqrt(self._variance(row))

    def at(self, tokens: float, parameters: float | None = None) -> Estimate:
        """Return the best batch size of a training, with its 95 % prediction interval.

        Args:
            tokens: D.
            parameters: N, which counts only with a term in N.
        """
        point = [1.0, math.log(tokens) - self.log_tokens]
        if self.has_parameters:
            assert parameters is not None
            point.append(math.log(parameters) - self.log_parameters)
        row = np.array(point)
        half = self._critical_value * math.sqrt(self._variance(row) + self.spread**2)
        log_size = float(row @ self.coefficients)
        return Estimate(math.exp(log_size), math.exp(log_size - half), math.exp(log_size + half))

    @property
    def _critical_value(self) -> float:
        return float(stdtrit(self.degrees, 1 - ALPHA / 2))

    def _variance(self, row: Floats) -> float:
        """Return the variance of a sum of coefficients, at least that by the points' errors."""
        return float(max(row @ self.covariance @ row, row @ self.least_covariance @ row))

    def _estimate(self, index: int) -> Estimate:
        value = float(self.coefficients[index])
        half = self._critical_value * math.sqrt(self.covariance[index, index])
        return Estimate(value, value - half, value + half)


def fit_law(optima: Sequence[Optimum]) -> Law:
    """Fit the law to the best batch sizes of at least three budgets.

    There is a term in N if the models have at least three sizes; otherwise all must be of one size,
    or of sizes that are not known.
    """
    sizes = {optimum.parameters for optimum in optima}
    has_parameters = len(sizes) >= LEAST_MODELS and None not in sizes

    log_tokens = np.log([optimum.tokens for optimum in optima])
    columns = [np.ones(len(optima)), log_tokens - log_tokens.mean()]
    mean_parameters = 0.0
    if has_parameters:
        log_parameters = np.log([optimum.parameters or math.nan for optimum in optima])
        mean_parameters = float(log_parameters.mean())
        columns.append(log_parameters - mean_parameters)
    design = np.stack(columns, axis=1)
    degrees = len(optima) - design.shape[1]
    assert degrees >= 1, "a law needs more budgets than it has coefficients"

    log_sizes = np.log([optimum.batch_size for optimum in optima])
    errors = _moderated_errors(np.log([optimum.high / optimum.low for optimum in optima]))
    spread = _spread(design, log_sizes, errors)
    fit = _Fit.of(design, log_sizes, errors, spread)
    least_covariance = np.asarray(np.linalg.inv(fit.information), float)
    return Law(
        coefficients=fit.coefficients,
        covariance=least_covariance * fit.squares / degrees,
        least_covariance=least_covariance,
        spread=spread,
        degrees=degrees,
        has_parameters=has_parameters,
        log_tokens=float(log_tokens.mean()),
        log_parameters=mean_parameters,
    )


def _moderated_errors(widths: Floats) -> Floats:
    """Return the standard errors of log batch sizes from the widths of their intervals.

    Widths are estimates, too: each is moved halfway, in logarithms, to their geometric mean. With
    the widths as they are, the interval of the exponent covered it in 92 to 95 % of simulated
    studies, with moderated ones in 94 to 95 %.
    """
    errors = np.maximum(widths / DEVIATIONS, LEAST_ERROR)
    return np.asarray(np.sqrt(errors * np.exp(np.log(errors).mean())))


@dataclass(frozen=True, eq=False)
class _Fit:
    """Weighted least squares."""

    coefficients: Floats
    information: Floats  # X' W X
    squares: float  # weighted sum of squared residuals
    log_weights: float  # sum over the points

    @classmethod
    def of(cls, design: Floats, values: Floats, errors: Floats, spread: float) -> "_Fit":
        weights = 1 / (np.square(errors) + spread**2)
        information = (design * weights[:, None]).T @ design
        coefficients = np.linalg.solve(information, design.T @ (weights * values))
        residuals = values - design @ coefficients
        return cls(
            coefficients=np.asarray(coefficients, float),
            information=information,
            squares=float(weights @ np.square(residuals)),
            log_weights=float(np.log(weights).sum()),
        )


def _spread(design: Floats, values: Floats, errors: Floats) -> float:
    """Return τ, at least 0, by restricted maximum likelihood."""

    def deviance(spread: float) -> float:
        fit = _Fit.of(design, values, errors, spread)
        _, log_determinant = np.linalg.slogdet(fit.information)
        return float(log_determinant + fit.squares - fit.log_weights)

    result = minimize_scalar(deviance, bounds=(0.0, LARGEST_SPREAD), method="bounded")
    spread = float(result.x)
    return spread if deviance(spread) < deviance(0.0) else 0.0
