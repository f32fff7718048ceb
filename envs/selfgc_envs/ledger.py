"""The ledger: typed context objects and the one state machine that moves them. Pure Python.

States: ``shown`` (full body in the context), ``folded`` (one-line placeholder; call and arguments stay), ``dropped``
(call and result gone as one unit). Invariants:

* every object is in exactly one state; ids are never reused; every state change is appended to :attr:`Ledger.events`;
* an operation either happens completely or answers with an error text and changes nothing;
* protected objects (made in the current turn, or among the ``protect_last`` newest) cannot be folded or dropped;
* ``recoverable`` folds keep the body for ``expand``; ``permanent`` folds destroy it and say so.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

SUMMARY_CHARS = 200


class State(StrEnum):
    SHOWN = "shown"
    FOLDED = "folded"
    DROPPED = "dropped"


class Kind(StrEnum):
    OBSERVATION = "observation"
    PLAN = "plan"
    FILE = "file"
    THOUGHT = "thought"
    RESULT = "result"


ID_PREFIX = {
    Kind.OBSERVATION: "obs",
    Kind.PLAN: "plan",
    Kind.FILE: "file",
    Kind.THOUGHT: "thought",
    Kind.RESULT: "result",
}


@dataclass(frozen=True)
class ContextObject:
    """One tool call with its result (or a thought). ``tokens`` counts the body."""

    id: str
    kind: Kind
    tool: str
    args: dict[str, Any]
    summary: str
    body: str
    created_at_turn: int
    last_touched_turn: int
    tokens: int
    state: State = State.SHOWN
    recoverable: bool = True
    expanded: bool = False  # shown again at the tail; the placeholder stays in its old place

    def call_text(self) -> str:
        """Tool and arguments on one line, for ledger rows and search."""
        values = " ".join(str(v).replace("\n", " ") for v in self.args.values())
        return f"{self.tool} {values}".strip()

    def placeholder(self) -> str:
        """What stands for the body while the object is folded. The summary is data, on one line (case C5)."""
        return f"[{self.id} folded: {self.summary}]"


@dataclass(frozen=True)
class Outcome:
    """Answer to a management call: ``ok`` and one line for the tail."""

    ok: bool
    text: str
    object_id: str = ""


def one_line(text: str, limit: int = SUMMARY_CHARS) -> str:
    """Collapse whitespace and cap the length, so that data cannot look like a message of its own."""
    flat = re.sub(r"\s+", " ", text).strip()
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def automatic_summary(body: str, tokens: int, exit_code: int | None = None) -> str:
    """Deterministic summary: exit code, size, first informative line (tool and arguments stay in the call)."""
    lines = (line.strip() for line in body.splitlines())
    first = next((line for line in lines if re.search(r"\w{2}", line)), "")
    code = f"exit {exit_code}, " if exit_code is not None else ""
    return one_line(f"{code}{tokens} tokens, {one_line(first, 60)}")


class Ledger:
    """Owner of all context objects of one episode.

    Args:
        protect_last: how many of the newest objects cannot be folded or dropped.
        recoverable: whether folded bodies can come back.
        count_text: tokens of a text under the served model's tokenizer.
    """

    def __init__(self, *, count_text: Callable[[str], int], protect_last: int = 1, recoverable: bool = True) -> None:
        self._count = count_text
        self._protect_last = protect_last
        self._recoverable = recoverable
        self._objects: dict[str, ContextObject] = {}
        self._next = 1
        self.events: list[dict[str, Any]] = []

    # -- reading -----------------------------------------------------------------------------------------------
    def __getitem__(self, object_id: str) -> ContextObject:
        return self._objects[object_id]

    def __contains__(self, object_id: str) -> bool:
        return object_id in self._objects

    def objects(self) -> list[ContextObject]:
        """All objects ever made, oldest first, dropped ones included."""
        return list(self._objects.values())

    def live(self) -> list[ContextObject]:
        """Objects that have a ledger row: shown and folded, oldest first."""
        return [o for o in self._objects.values() if o.state is not State.DROPPED]

    # -- writing -----------------------------------------------------------------------------------------------
    def add(
        self, kind: Kind, tool: str, args: dict[str, Any], body: str, turn: int, exit_code: int | None = None
    ) -> ContextObject:
        """Store a new shown object and return it."""
        tokens = self._count(body)
        obj = ContextObject(
            id=f"{ID_PREFIX[kind]}_{self._next:03d}",
            kind=kind,
            tool=tool,
            args=args,
            summary=automatic_summary(body, tokens, exit_code),
            body=body,
            created_at_turn=turn,
            last_touched_turn=turn,
            tokens=tokens,
            recoverable=True,
        )
        self._next += 1
        self._objects[obj.id] = obj
        self._record("created", obj, turn)
        return obj

    def _record(self, event: str, obj: ContextObject, turn: int) -> None:
        self.events.append(
            {"event": event, "id": obj.id, "kind": str(obj.kind), "state": str(obj.state), "turn": turn,
             "age": turn - obj.last_touched_turn, "tokens": obj.tokens}
        )  # fmt: skip

    def _find(self, object_id: str, turn: int, *, editing: bool) -> ContextObject | Outcome:
        obj = self._objects.get(object_id)
        if obj is None:
            near = difflib.get_close_matches(object_id, [o.id for o in self.live()], n=3, cutoff=0.3)
            near = near or [o.id for o in self.live()[-3:]]
            hint = f"; live ids: {', '.join(near)}" if near else "; there are no objects yet"
            return Outcome(False, f"no object {one_line(object_id, 24)}{hint}")
        if obj.state is State.DROPPED:
            return Outcome(False, f"{obj.id} was dropped and is gone", obj.id)
        if editing and obj.created_at_turn == turn:
            return Outcome(False, f"{obj.id} was made this turn and is protected", obj.id)
        if editing and self._protect_last and obj.id in {o.id for o in self.objects()[-self._protect_last :]}:
            return Outcome(False, f"{obj.id} is among the {self._protect_last} newest and is protected", obj.id)
        return obj

    def fold(self, object_id: str, summary: str | None, turn: int) -> Outcome:
        """Replace a body by its one-line placeholder; refused when that would not save tokens (case C10)."""
        obj = self._find(object_id, turn, editing=True)
        if isinstance(obj, Outcome):
            return obj
        if obj.state is State.FOLDED:
            return Outcome(False, f"{obj.id} is already folded", obj.id)
        text = obj.summary if summary is None else one_line(summary)
        if not re.search(r"\w", text):
            return Outcome(False, f"fold {obj.id}: the summary is empty", obj.id)
        folded = replace(obj, summary=text, state=State.FOLDED, expanded=False)
        if not obj.expanded and self._count(folded.placeholder()) >= obj.tokens:
            return Outcome(False, f"fold {obj.id}: nothing to gain", obj.id)
        if not self._recoverable:
            folded = replace(folded, body="", recoverable=False)
        self._objects[obj.id] = folded
        self._record("fold", folded, turn)
        return Outcome(True, f"{obj.id} folded", obj.id)

    def drop(self, object_id: str, turn: int) -> Outcome:
        """Remove call and result as one unit."""
        obj = self._find(object_id, turn, editing=True)
        if isinstance(obj, Outcome):
            return obj
        dropped = replace(obj, state=State.DROPPED, expanded=False)
        self._objects[obj.id] = dropped
        self._record("drop", dropped, turn)
        return Outcome(True, f"{obj.id} dropped", obj.id)

    def expand(self, object_id: str, turn: int, room: int) -> Outcome:
        """Bring a folded body back at the tail.

        Args:
            room: tokens left in the window; a body that does not fit is refused with the number missing.
        """
        obj = self._find(object_id, turn, editing=False)
        if isinstance(obj, Outcome):
            return obj
        if obj.state is State.SHOWN:
            return Outcome(False, f"{obj.id} is already shown", obj.id)
        if not obj.recoverable:
            return Outcome(False, f"{obj.id} was folded for good; it was: {obj.call_text()}: {obj.summary}", obj.id)
        if obj.tokens > room:
            return Outcome(False, f"{obj.id} needs {obj.tokens - room} tokens more than are left", obj.id)
        self._objects[obj.id] = replace(obj, state=State.SHOWN, expanded=True, last_touched_turn=turn)
        self._record("expand", self._objects[obj.id], turn)
        return Outcome(True, f"{obj.id} expanded", obj.id)

    def search(self, query: str, limit: int = 8) -> Outcome:
        """Ids of live objects whose summary, tool or arguments contain the query (case-insensitive)."""
        needle = query.casefold().strip()
        if not needle:
            return Outcome(False, "search_ledger: the query is empty")
        hits = [o for o in self.live() if needle in f"{o.id} {o.call_text()} {o.summary}".casefold()]
        if not hits:
            return Outcome(True, f"search '{one_line(query, 40)}': no match")
        rows = ", ".join(f"{o.id} ({one_line(o.call_text(), 40)})" for o in hits[-limit:])
        return Outcome(True, f"search '{one_line(query, 40)}': {rows}")
