"""Task: what an episode is about. Immutable; the trusted side (secrets, grading) never enters the sandbox."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TextCounter = Callable[[str], int]
HELDOUT_SEED_BASE = 1_000_000  # training and demonstrations use seeds below, held-out evaluation from here on


@dataclass(frozen=True)
class Task:
    """One task instance.

    Attributes:
        id: ``family:level:seed:pressure:window``; the same id (and tokenizer) gives the same task, byte for byte.
        instruction: the user message; pinned.
        files: workspace path -> content; ``executables`` get the x bit.
        checks: what the trusted grader compares, by value (see :mod:`selfgc_envs.grading`).
        oracle: the scripted solution, trusted: work turns and what each observation is good for.
    """

    id: str
    family: str
    level: str
    seed: int
    pressure: float
    window: int
    instruction: str
    files: Mapping[str, str]
    executables: frozenset[str] = frozenset()
    checks: tuple[Mapping[str, Any], ...] = ()
    oracle: tuple[OracleTurn, ...] = ()


@dataclass(frozen=True)
class OracleTurn:
    """One work turn of the scripted solution: the calls, and the fact to keep from this turn's observation.

    ``keep`` is the one-line summary that preserves a fact needed at the end; empty when the observation is spent as
    soon as the next turn's calls are written. ``supersedes`` says that it replaces every earlier fact.
    """

    calls: tuple[tuple[str, Mapping[str, Any]], ...]
    keep: str = ""
    supersedes: bool = False
    needs_facts: bool = False  # these calls use the kept facts


@dataclass(frozen=True)
class FamilyInfo:
    """A task family: how to make an instance, and whether it is held out of training and demonstrations."""

    name: str
    description: str
    make: Callable[..., Task]
    heldout: bool = False
    levels: Sequence[str] = field(default_factory=lambda: ("nano", "small"))
