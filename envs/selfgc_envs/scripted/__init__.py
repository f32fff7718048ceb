"""Demonstrators: the oracle's work turns of a task, combined with a garbage-collection style.

The work is the same in every style; only what happens to spent observations differs, so a policy cloned from a
mixture acts validly but manages its context unreliably. Styles never appear in a prompt.

=============  =====================================================================================
``never``      nothing is folded or dropped
``fold``       spent observations are folded; those with a fact get a summary that keeps it
``drop``       spent observations are dropped; those with a fact stay as they are
``fold_drop``  facts are folded with a summary, everything else is dropped: the good habit
``expand``     facts are folded without a summary and expanded when needed; the rest is dropped
``lazy``       like ``fold_drop``, but each spent observation is dealt with only with probability 1/2
``drop_all``   everything is dropped, facts too: a cheater that must fail
=============  =====================================================================================
"""

from __future__ import annotations

import random
from typing import Any

from selfgc_envs.actions import ToolCall, format_call
from selfgc_envs.coding_env import CodingEnv
from selfgc_envs.errors import UserError
from selfgc_envs.ledger import ContextObject, State

STYLES = ("never", "fold", "drop", "fold_drop", "expand", "lazy", "drop_all")
DEFAULT_MIXTURE = {
    "never": 0.30, "lazy": 0.10, "fold": 0.15, "drop": 0.12, "fold_drop": 0.25, "expand": 0.06, "drop_all": 0.02,
}  # fmt: skip


class Demonstrator:
    """Plays a task's oracle in one style. Call :meth:`act` once per turn with the latest observation."""

    def __init__(self, env: CodingEnv, style: str, rng: random.Random) -> None:
        if style not in STYLES:
            raise UserError(f"unknown style '{style}'", f"one of {', '.join(STYLES)}")
        if style != "never" and not {"fold", "drop"} <= set(env.strategy.tools):
            raise UserError(f"style '{style}' needs a strategy with fold and drop", "strategy selfgc, or style never")
        self._env, self._style, self._rng = env, style, rng
        self._next = 0
        self._facts: dict[str, str] = {}  # object id -> summary that keeps its fact
        self._lost = False

    @property
    def blind(self) -> bool:
        """Whether the next work turn needs a fact this style has thrown away (not a turn to imitate)."""
        oracle = self._env.task.oracle
        return self._lost and self._next < len(oracle) and oracle[self._next].needs_facts

    def act(self, obs: dict[str, Any]) -> str:
        oracle = self._env.task.oracle
        turn = oracle[min(self._next, len(oracle) - 1)]
        self._note_facts()
        if turn.needs_facts and self._style == "expand":
            objects = [(self._env.ledger[i], fact) for i, fact in self._facts.items()]
            hidden = [o.id for o, fact in objects if o.state is State.FOLDED and o.summary != fact]
            if hidden:
                return "\n".join(format_call(ToolCall("expand", {"id": i})) for i in hidden)
        calls = [ToolCall(name, dict(args)) for name, args in turn.calls]
        if not turn.needs_facts:
            calls += self._manage()
        self._next += 1
        return "\n".join(format_call(c) for c in calls)

    def _note_facts(self) -> None:
        """The newest observation belongs to the oracle turn before; remember whether it holds a fact."""
        if self._next == 0 or not (live := self._env.ledger.live()):
            return
        done = self._env.task.oracle[self._next - 1]
        newest = live[-1]
        if done.keep and newest.created_at_turn == self._env.turn - 1:
            if done.supersedes:
                self._facts.clear()
            self._facts[newest.id] = done.keep

    def _manage(self) -> list[ToolCall]:
        """Management calls for what is spent once this turn's work calls are made."""
        calls = []
        for obj in self._env.ledger.live():
            if obj.state is not State.SHOWN or obj.tool in ("write_file", "str_replace", "plan") or obj.expanded:
                continue
            call = self._treat(obj, self._facts.get(obj.id, ""))
            if call is not None and not (self._style == "lazy" and self._rng.random() < 0.5):
                calls.append(call)
        return calls

    def _treat(self, obj: ContextObject, fact: str) -> ToolCall | None:
        fold = ToolCall("fold", {"id": obj.id})
        drop = ToolCall("drop", {"id": obj.id})
        keep = ToolCall("fold", {"id": obj.id, "summary": fact})
        match self._style:
            case "never":
                return None
            case "fold":
                return keep if fact else fold
            case "drop":
                return None if fact else drop
            case "expand" if obj.tokens < self._env.window / 4:  # else there may be no room to expand into
                return fold if fact else drop
            case "drop_all":
                self._lost = self._lost or bool(fact)
                return drop
            case _:
                return keep if fact else drop


def make_demonstrator(env: CodingEnv, style: str, rng: random.Random) -> Demonstrator:
    return Demonstrator(env, style, rng)


__all__ = ["DEFAULT_MIXTURE", "STYLES", "Demonstrator", "make_demonstrator"]
