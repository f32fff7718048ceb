"""Intervals and tests for evaluations: one number per held-out task, policies paired on the same tasks. Pure.

Resampling is over tasks, because episodes of one task are not independent of each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

Interval = tuple[float, float]


def wilson_interval(successes: int, trials: int, confidence: float = 0.95) -> Interval:
    """Score interval of a proportion (Wilson 1927), without continuity correction.

    Raises:
        ValueError: no trials, or more successes than trials.
    """
    found = stats.binomtest(successes, trials).proportion_ci(confidence, method="wilson")
    return float(found.low), float(found.high)


def bootstrap_interval(
    values: Sequence[float], *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Percentile bootstrap of a mean (Efron 1979). For a paired comparison, ``values`` are the differences by task.

    Raises:
        ValueError: fewer than two values.
    """
    data = np.asarray(values, dtype=float)
    if np.ptp(data) == 0.0 and len(data) > 1:  # every resample has this mean
        return float(data[0]), float(data[0])
    found = stats.bootstrap(
        (data,),
        np.mean,
        n_resamples=resamples,
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def mcnemar_exact(gained: int, lost: int) -> float:
    """Two-sided exact p-value that two paired policies are equally good (McNemar 1947; the sign test).

    Args:
        gained: tasks on which the second policy did better than the first.
        lost: tasks on which it did worse. Ties say nothing.
    """
    return float(stats.binomtest(gained, gained + lost, 0.5).pvalue) if gained + lost else 1.0


def pass_at_k(trials: int, successes: int, k: int) -> float:
    """Probability that at least one of ``k`` episodes succeeds, estimated from ``trials`` without bias (Chen 2021).

    Raises:
        ValueError: not ``0 <= successes <= trials`` or not ``1 <= k <= trials``.
    """
    if not 0 <= successes <= trials or not 1 <= k <= trials:
        raise ValueError(f"pass@{k} cannot be estimated from {successes} successes in {trials} episodes")
    return 1.0 - math.comb(trials - successes, k) / math.comb(trials, k)
