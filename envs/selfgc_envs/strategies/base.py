"""What a context strategy is: a frozen description the environment acts on. One file per strategy beside this one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from selfgc_envs.actions import WORK_TOOLS
from selfgc_envs.errors import UserError


@dataclass(frozen=True)
class Strategy:
    """How the context is managed.

    Attributes:
        name: the registered name.
        tools: names the model may call; anything else is an error it can read.
        rules: sentences of the system prompt about managing the context.
        show_ledger: whether the tail carries the ledger table.
        protect_last: newest objects that cannot be folded or dropped.
        recoverable: whether a folded body can be expanded again.
    """

    name: str
    tools: tuple[str, ...] = WORK_TOOLS
    rules: str = ""
    show_ledger: bool = False
    protect_last: int = 1
    recoverable: bool = True


def take_options(strategy: str, options: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Merge options over defaults; unknown names and wrong types are errors."""
    for key, value in options.items():
        if key not in known:
            raise UserError(
                f"strategy '{strategy}': unknown option '{key}'", f"known options: {', '.join(known) or 'none'}"
            )
        if type(value) is not type(known[key]):
            want = type(known[key]).__name__
            raise UserError(f"strategy '{strategy}': option '{key}' must be {want}, got {value!r}", "correct the value")
    return {**known, **options}
