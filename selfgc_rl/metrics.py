"""The record of one training step: what the episodes did, in one flat-enough JSON object per line.

``metrics.jsonl`` has one line per optimizer step, in step order, each written at once; a resumed run first removes the
lines of steps that its checkpoint does not contain. Means are over valid episodes, shares in [0, 1], counts per episode
where the name is a plural of an action. ``None`` means that there was nothing to measure, never zero.
"""

from __future__ import annotations

import json
import math
import os
import resource
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selfgc_rl.types import Episode

ACTIONS = ("folds", "drops", "expands")


def episode_metrics(groups: Sequence[Sequence[Episode]]) -> dict[str, Any]:
    """What the episodes of one step did; see the module docstring for units."""
    episodes = [episode for group in groups for episode in group]
    valid = [episode for episode in episodes if episode.valid]
    turns = [turn for episode in valid for turn in episode.turns]
    budgets = sorted(turn.budget_used for turn in turns)

    def total(name: str) -> float:
        return sum(episode.metrics.get(name, 0.0) for episode in valid)

    calls = total("work_calls") + total("management_calls") + total("invalid_calls")
    return {
        "reward": _mean([episode.reward for episode in valid]),
        "success": _mean([episode.success for episode in valid]),
        "penalty": _mean([episode.penalty for episode in valid]),
        "budget_p50": _quantile(budgets, 0.5),
        "budget_p95": _quantile(budgets, 0.95),
        "budget_max": budgets[-1] if budgets else None,
        **{name: total(name) / len(valid) if valid else None for name in ACTIONS},
        "invalid_rate": total("invalid_calls") / calls if calls else None,
        "turns": len(turns) / len(valid) if valid else None,
        "episodes": len(episodes),
        "invalid_episodes": len(episodes) - len(valid),
        "stop_reasons": dict(sorted(Counter(str(episode.stop_reason) for episode in episodes).items())),
        "truncated_replies": _mean([float(turn.sample.finish_reason == "length") for turn in turns]),
        "sampled_tokens": sum(episode.sampled_tokens for episode in valid),
        "tasks": [group[0].task_id for group in groups if group],
    }


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _quantile(ordered: Sequence[float], q: float) -> float | None:
    """The smallest value that at least the share ``q`` does not exceed."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else None


def peak_rss_mb() -> float:
    """Peak resident memory of this process, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


class MetricsLog:
    """Appends records to ``metrics.jsonl``.

    Args:
        path: the file.
        steps_done: steps in the checkpoint the run goes on from; later lines are removed.
    """

    def __init__(self, path: Path, steps_done: int = 0) -> None:
        self._path = path
        kept = []
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    if json.loads(line)["step"] <= steps_done:
                        kept.append(line + "\n")
                except (ValueError, KeyError, TypeError):
                    continue  # the half-written last line of a killed run
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        temporary.replace(path)

    def write(self, record: dict[str, Any]) -> None:
        """Append one line. NaN and infinity become null: they are not JSON."""
        line = json.dumps(_finite(record), allow_nan=False) + "\n"
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
