"""The cost model fitted online to what prefills and decode steps really took.

Responsibility: `CostFitter` starts from a table's CostModel and takes observations one by one; `costs()` is the
model fitted so far. Two linear fits: prefill over (n^2 - p^2, n - p, 1), decode steps over (1, context, requests), each
by least squares of the relative error, since a prefill takes between 20 ms and 30 s and all of them matter.

Invariants: with no observation the table's coefficients stand. Older observations fade by DECAY each, so that the
fit follows a driver update or a throttled device. No coefficient is negative.

Costs: an observation is a rank-1 update of a 3 x 3 matrix; solving it is left to `costs()`.

Concurrency: one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvfs.errors import InvalidRequest
from scheduler.routing.cost import CostModel

PRIOR_OBSERVATIONS = 4.0
"""The table's weight at first: it is right about the shape and often wrong by a factor."""
PRIOR_FADES = 0.9
PRIOR_FLOOR = 1e-4
"""The table's weight shrinks by PRIOR_FADES with each observation, to this share: enough to decide what was never
seen to vary. With its full weight kept for good a table of half the true decode step was still 3 % off after
30,000 steps, since context and batch size vary together."""
DECAY = 0.999
"""Half of the weight is younger than 700 observations."""


class LinearFit:
    """y = sum of coefficient x feature, by weighted least squares around a prior."""

    __slots__ = ("_information", "_moments", "_prior", "observations")

    def __init__(self, prior: Sequence[float]) -> None:
        self._prior = tuple(prior)
        """Features are scaled by these, so that every coefficient begins as 1."""
        count = len(self._prior)
        self._information = [[0.0] * count for _ in range(count)]
        self._moments = [0.0] * count
        self.observations = 0

    def observe(self, features: Sequence[float], value: float) -> None:
        """Update the fit with one measurement. Raises InvalidRequest unless that is a number above 0."""
        if not 0 < value < float("inf"):
            raise InvalidRequest(f"an observed time is {value} s: must be above 0")
        scaled = self._scaled(features, value)
        for row, x in enumerate(scaled):
            self._moments[row] = self._moments[row] * DECAY + x
            for column, y in enumerate(scaled):
                self._information[row][column] = self._information[row][column] * DECAY + x * y
        self.observations += 1

    def coefficients(self) -> tuple[float, ...]:
        """Return the fitted coefficients, none below 0."""
        prior = self._prior_weight()
        solved = _solve(self._matrix(), [moment + prior for moment in self._moments])
        return tuple(max(c, 0.0) * p for c, p in zip(solved, self._prior, strict=True))

    def _scaled(self, features: Sequence[float], value: float) -> list[float]:
        return [x * p / value for x, p in zip(features, self._prior, strict=True)]

    def _prior_weight(self) -> float:
        return PRIOR_OBSERVATIONS * max(PRIOR_FADES**self.observations, PRIOR_FLOOR)

    def _matrix(self) -> list[list[float]]:
        prior = self._prior_weight()
        return [
            [x + (prior if row == column else 0.0) for column, x in enumerate(line)]
            for row, line in enumerate(self._information)
        ]


class CostFitter:
    """A CostModel that learns."""

    def __init__(self, table: CostModel) -> None:
        self._table = table
        self._prefill = LinearFit((table.prefill_pair_s, table.prefill_token_s, table.prefill_fixed_s))
        self._step = LinearFit((table.step_fixed_s, table.step_context_s, table.step_request_s))

    def observe_prefill(self, tokens: int, cached: int, seconds: float) -> None:
        """Observe a prefill of `tokens` of which `cached` were there, unless it waited for its cached layers."""
        if cached * self._table.kv_token_bytes / self._table.host_bytes_s < seconds:
            self._prefill.observe(_prefill_features(tokens, cached), seconds)

    def observe_step(self, context_tokens: int, requests: int, seconds: float) -> None:
        """Observe a decode step over a batch of `requests` with `context_tokens` in all."""
        self._step.observe((1.0, context_tokens, requests), seconds)

    def costs(self) -> CostModel:
        """Return the model as fitted so far."""
        pair, token, fixed = self._prefill.coefficients()
        step_fixed, step_context, step_request = self._step.coefficients()
        return replace(
            self._table,
            prefill_pair_s=pair,
            prefill_token_s=token,
            prefill_fixed_s=fixed,
            step_fixed_s=step_fixed,
            step_context_s=step_context,
            step_request_s=step_request,
        )


def _prefill_features(tokens: int, cached: int) -> tuple[float, float, float]:
    return float(tokens * tokens - cached * cached), float(tokens - cached), 1.0


def _solve(matrix: list[list[float]], right: Sequence[float]) -> list[float]:
    """Solve by Gaussian elimination; the matrix is positive definite, so it needs no pivoting. Changes `matrix`."""
    values = list(right)
    size = len(values)
    for row in range(size):
        for below in range(row + 1, size):
            factor = matrix[below][row] / matrix[row][row]
            values[below] -= factor * values[row]
            for column in range(row, size):
                matrix[below][column] -= factor * matrix[row][column]
    for row in range(size - 1, -1, -1):
        known = sum(matrix[row][column] * values[column] for column in range(row + 1, size))
        values[row] = (values[row] - known) / matrix[row][row]
    return values
