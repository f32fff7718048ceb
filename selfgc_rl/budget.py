"""The reward: success, less a penalty on context kept above a share of the window. Pure.

``R = success − λ · penalty``, ``penalty = aggregate over turns of φ(u_t)``, and

    φ(u) = (max(0, u − threshold) / (1 − threshold))^p

where ``u_t`` is the budget used at turn t (prompt ids as sent / window), so φ is 0 up to the threshold and 1 for a
full window. An episode that overflows is charged one more turn at 1, for the prompt that did not fit. An episode's
``penalty`` is stated before the coefficient λ, in the same way for every λ and scope.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from selfgc_rl.config import RewardConfig


def phi(used: float, threshold: float, power: float) -> float:
    """The charge of one turn; ``used`` is a share of the window, the result is 0 at the threshold and 1 at 1."""
    return (max(0.0, used - threshold) / (1.0 - threshold)) ** power


def penalty(budgets: Sequence[float], config: RewardConfig) -> float:
    """φ over the turns of an episode, aggregated as configured (mean, max or last), without λ.

    Raises:
        ValueError: no turns.
    """
    if not budgets:
        raise ValueError("an episode without turns has no penalty")
    charges = [phi(used, config.threshold, config.power) for used in budgets]
    match config.aggregate:
        case "max":
            return max(charges)
        case "last":
            return charges[-1]
        case _:
            return math.fsum(charges) / len(charges)


def reward(success: float, budgets: Sequence[float], config: RewardConfig) -> float:
    """The episode's reward. With ``scope: on_success`` an episode that achieved nothing is not charged."""
    if config.scope == "on_success" and success <= 0.0:
        return success
    return success - config.coefficient * penalty(budgets, config)
