"""Records of what happened: samples, turns, episodes, rows. Frozen where they can be; no behaviour.

Shapes: ``*_ids`` are tuples of token ids; ``logprobs`` has one float per sampled id (natural log, at the sampling
temperature). ``budget_used`` is ``len(prompt ids as sent) / window``: the one counter of the project.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from selfgc_envs.coding_env import StopReason


@dataclass(frozen=True)
class Sample:
    """One model call, token-exact. Text is for reading only; training uses the ids."""

    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: str  # "stop" | "length"
    policy_version: str  # the model name the request was sent to


@dataclass(frozen=True)
class Turn:
    """One turn of an episode: the model call, what the window looked like, what the environment did with it."""

    index: int
    sample: Sample
    budget_used: float
    events: tuple[dict[str, Any], ...] = ()  # ledger state changes and tool outcomes of this turn
    messages: tuple[dict[str, str], ...] = ()  # what the model saw (kept only when traces are wanted)
    ledger: tuple[dict[str, Any], ...] = ()  # ledger rows as shown this turn


@dataclass
class Episode:
    """One episode, from reset to grading. ``success`` is the grader's fraction in [0, 1]."""

    episode_id: str
    group_id: str
    task_id: str
    family: str
    pressure: float
    window: int
    turns: list[Turn] = field(default_factory=list)
    success: float = 0.0
    stop_reason: StopReason = StopReason.INFRASTRUCTURE
    error: str = ""  # why, when stop_reason is INFRASTRUCTURE
    penalty: float = 0.0  # mean phi(u_t), before the coefficient
    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)  # folds, drops, expands, ... from the environment
    seconds: float = 0.0

    @property
    def valid(self) -> bool:
        """Whether the episode may enter its group's baseline (infrastructure failures may not)."""
        return self.stop_reason is not StopReason.INFRASTRUCTURE and bool(self.turns)

    @property
    def sampled_tokens(self) -> int:
        return sum(len(t.sample.sampled_ids) for t in self.turns)


@dataclass(frozen=True)
class Row:
    """One training row: one model call of one episode, with the episode's advantage."""

    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    advantage: float
    episode_id: str
    group_id: str
    turn: int
