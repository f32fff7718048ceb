"""Tasks: the record, the registry of families, and task ids.

A task id is ``family:level:seed:pressure:window``. Making a task needs a text counter, because the sizes of its
observations follow the window, which is counted in the served model's tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from selfgc_envs.errors import UserError
from selfgc_envs.tasks.base import HELDOUT_SEED_BASE, FamilyInfo, OracleTurn, Task
from selfgc_envs.tasks.families import FAMILIES

DEFAULT_WINDOW = {"nano": 1024, "small": 16_384, "full": 131_072}


def list_families() -> list[FamilyInfo]:
    return list(FAMILIES.values())


def _text_counter(token_counter: Callable[[Sequence[dict[str, str]]], int] | None) -> Callable[[str], int]:
    """Tokens of a text; without a tokenizer, about 3.2 characters per token."""
    if token_counter is None:
        return lambda text: round(len(text) / 3.2)
    system = {"role": "system", "content": "."}
    empty = token_counter([system, {"role": "tool", "content": ""}])
    return functools.lru_cache(4096)(lambda text: token_counter([system, {"role": "tool", "content": text}]) - empty)


def make_task(
    family: str,
    *,
    level: str = "nano",
    seed: int = 0,
    pressure: float = 1.2,
    window: int | None = None,
    token_counter: Callable[[Sequence[dict[str, str]]], int] | None = None,
) -> Task:
    """Make one task instance.

    Args:
        pressure: sum of the needed observations' tokens divided by the window.
        window: tokens; default: the level's.
        token_counter: messages → tokens, by the tokenizer of the model that will act.

    Raises:
        UserError: unknown family or level, or a number out of range.
    """
    if family not in FAMILIES:
        raise UserError(f"unknown task family '{family}'", f"one of {', '.join(FAMILIES)}")
    info = FAMILIES[family]
    if level not in info.levels:
        raise UserError(f"family '{family}' has no level '{level}'", f"one of {', '.join(info.levels)}")
    window = window or DEFAULT_WINDOW[level]
    if seed < 0 or not 0 < pressure <= 16 or window < 128:
        raise UserError(f"task {family}: seed {seed}, pressure {pressure}, window {window} out of range",
                        "seed >= 0, 0 < pressure <= 16, window >= 128")  # fmt: skip
    task_id = f"{family}:{level}:{seed}:{pressure:g}:{window}"
    return info.make(task_id, level, seed, float(pressure), window, _text_counter(token_counter))


def parse_task(spec: str, token_counter: Callable[..., Any] | None = None) -> Task:
    """Make the task named by ``family[:level[:seed[:pressure[:window]]]]``."""
    parts = spec.split(":")
    try:
        family, level = parts[0], parts[1] if len(parts) > 1 else "nano"
        seed = int(parts[2]) if len(parts) > 2 else 0
        pressure = float(parts[3]) if len(parts) > 3 else 1.2
        window = int(parts[4]) if len(parts) > 4 else None
        if len(parts) > 5:
            raise ValueError
    except ValueError:
        raise UserError(
            f"task '{spec}' is not family:level:seed:pressure:window", "e.g. chain:nano:7:1.2:1024"
        ) from None
    return make_task(family, level=level, seed=seed, pressure=pressure, window=window, token_counter=token_counter)


__all__ = ["HELDOUT_SEED_BASE", "FamilyInfo", "OracleTurn", "Task", "list_families", "make_task", "parse_task"]
