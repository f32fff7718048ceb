"""Group-relative advantages over episodes (GRPO, Shao et al. 2024, without the division by the standard deviation).

``A_i = R_i - mean(R over the valid episodes of the group)``. The baseline never sees an infrastructure failure. The
default leaves the scale alone (Dr. GRPO, Liu et al. 2025): dividing by the standard deviation would blow a 1 % budget
difference within an all-successful group up to the size of a success.

A group that cannot teach (fewer than two valid episodes, or all rewards equal) is skipped and counted with its reason.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from selfgc_rl.types import Episode

TOO_FEW_VALID = "fewer than two valid episodes"
EQUAL_REWARDS = "all rewards equal"
_EQUAL_WITHIN = 1e-9


@dataclass(frozen=True)
class AdvantageResult:
    """Advantages of the groups that teach, and why the others do not."""

    advantages: dict[str, float] = field(default_factory=dict)  # episode id -> advantage
    skip_reasons: Counter[str] = field(default_factory=Counter)  # reason -> groups

    @property
    def skipped_groups(self) -> int:
        return self.skip_reasons.total()


def group_advantages(groups: Sequence[Sequence[Episode]], *, scale: Literal["none", "std"] = "none") -> AdvantageResult:
    """One advantage per valid episode of each group that is not skipped.

    Args:
        groups: the episodes of each task.
        scale: "std" divides by the group's standard deviation (population), as the original GRPO does.

    Raises:
        ValueError: a valid episode's reward is not finite.
    """
    result = AdvantageResult()
    for group in groups:
        valid = [episode for episode in group if episode.valid]
        for episode in valid:
            if not math.isfinite(episode.reward):
                raise ValueError(f"episode {episode.episode_id}: its reward is {episode.reward}")
        if len(valid) < 2:
            result.skip_reasons[TOO_FEW_VALID] += 1
            continue
        rewards = [episode.reward for episode in valid]
        if max(rewards) - min(rewards) <= _EQUAL_WITHIN:
            result.skip_reasons[EQUAL_REWARDS] += 1
            continue
        mean = math.fsum(rewards) / len(rewards)
        divisor = 1.0
        if scale == "std":
            divisor = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
        for episode in valid:
            result.advantages[episode.episode_id] = (episode.reward - mean) / divisor
    return result
