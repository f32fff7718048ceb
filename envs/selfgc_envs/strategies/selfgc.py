"""``selfgc``: the model folds, drops and expands ledger objects by itself.

Options:
    actions: ``fold+drop`` (default), ``fold`` or ``drop``: the action mask of the ablation.
    mode: ``recoverable`` (default) or ``permanent`` folds.
    protect_last: newest objects that cannot be edited (default 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from selfgc_envs.actions import WORK_TOOLS
from selfgc_envs.errors import UserError
from selfgc_envs.strategies.base import Strategy, take_options

_ACTIONS = {
    "fold+drop": ("fold", "drop", "expand", "search_ledger"),
    "fold": ("fold", "expand", "search_ledger"),
    "drop": ("drop",),
}
_SENTENCES = {
    "fold": "fold keeps one line of a result and expand brings it back.",
    "drop": "drop removes a call and its result.",
}


def make(options: Mapping[str, Any]) -> Strategy:
    chosen = take_options("selfgc", options, {"actions": "fold+drop", "mode": "recoverable", "protect_last": 1})
    if chosen["actions"] not in _ACTIONS:
        raise UserError(f"strategy 'selfgc': unknown actions '{chosen['actions']}'", f"one of {', '.join(_ACTIONS)}")
    if chosen["mode"] not in ("recoverable", "permanent"):
        raise UserError(f"strategy 'selfgc': unknown mode '{chosen['mode']}'", "recoverable or permanent")
    if chosen["protect_last"] < 0:
        raise UserError("strategy 'selfgc': protect_last must be >= 0", "correct the value")
    tools = _ACTIONS[chosen["actions"]]
    sentences = [text for name, text in _SENTENCES.items() if name in tools]
    return Strategy(
        name="selfgc",
        tools=WORK_TOOLS + tools,
        rules=" ".join(["The window is small; make room before it is full:", *sentences]),
        show_ledger=True,
        protect_last=chosen["protect_last"],
        recoverable=chosen["mode"] == "recoverable",
    )
