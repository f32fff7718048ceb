"""Ledger → messages: the transcript of shown and folded units, and the tail made afresh each turn.

``[system] [user: task] [transcript] [user: tail]``. Invariants:

* every rendered call has its result and every result its call, after any sequence of folds and drops (C1–C3): a unit
  is rendered or left out as a whole, and a message whose units are all gone disappears with them;
* system prompt and task are rendered verbatim, always (C11);
* the tail is one user-role message, last, never stored; where a template forbids two user messages in a row it is
  merged into the message before it (C12).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from selfgc_envs.actions import TOOLS, ToolCall, format_call
from selfgc_envs.ledger import ContextObject, Ledger, State, one_line
from selfgc_envs.strategies.base import Strategy

Message = dict[str, str]
TokenCounter = Callable[[Sequence[Message]], int]


@dataclass(frozen=True)
class Entry:
    """One assistant message of the transcript: a thought (maybe) and its work calls, or an expansion of one object."""

    turn: int
    object_ids: tuple[str, ...]
    thought_id: str = ""
    expansion: bool = False


def system_prompt(strategy: Strategy) -> str:
    """Role, tools and rules. No example id ever appears here: models repeat them."""
    tools = ", ".join(TOOLS[name].signature() for name in strategy.tools)
    return (
        "You are a coding agent. Reply with tool calls only, as "
        '<tool_call>{"name": ..., "arguments": {...}}</tool_call>\n'
        f"Tools: {tools}.\n{strategy.rules}"
    ).strip()


def render_entry(entry: Entry, ledger: Ledger) -> list[Message]:
    """Messages of one transcript entry; empty when all its units are dropped."""
    if entry.expansion:
        obj = ledger[entry.object_ids[0]]
        if not obj.expanded:
            return []
        call = format_call(ToolCall("expand", {"id": obj.id}))
        return [{"role": "assistant", "content": call}, {"role": "tool", "content": obj.body}]
    units = [o for o in map(ledger.__getitem__, entry.object_ids) if o.state is not State.DROPPED]
    parts = [format_call(ToolCall(o.tool, o.args)) for o in units]
    if entry.thought_id and (thought := ledger[entry.thought_id]).state is not State.DROPPED:
        parts.insert(0, _content(thought))
    if not parts:
        return []
    assistant = {"role": "assistant", "content": "\n".join(parts)}
    return [assistant, *({"role": "tool", "content": _content(o)} for o in units)]


def _content(obj: ContextObject) -> str:
    """What stands at the object's own place; an expanded object's body stands at the tail instead."""
    return obj.body if obj.state is State.SHOWN and not obj.expanded else obj.placeholder()


def ledger_rows(ledger: Ledger, turn: int) -> list[dict[str, Any]]:
    """One row per live object, oldest first."""
    return [
        {"id": o.id, "kind": str(o.kind), "state": str(o.state), "tokens": o.tokens, "turn": o.created_at_turn,
         "age": turn - o.last_touched_turn, "call": o.call_text(), "summary": o.summary}
        for o in ledger.live()
    ]  # fmt: skip


def _row_text(row: dict[str, Any]) -> str:
    return f"{row['id']} {row['state']} {row['tokens']} t{row['turn']} {one_line(row['call'], 28)}"


def tail_text(
    rows: Sequence[dict[str, Any]],
    *,
    used_tokens: int,
    window: int,
    outcomes: Sequence[str],
    show_ledger: bool,
    row_cap_tokens: int,
    count_text: Callable[[str], int],
) -> str:
    """The tail: ledger table under its cap, budget, outcome of the last management calls.

    Every shown object keeps its row; rows of folded objects give way first, oldest first, and the tail says how many
    are hidden (they stay searchable).
    """
    lines: list[str] = []
    if show_ledger and rows:
        texts = [_row_text(r) for r in rows]
        costs = [count_text(t) + 1 for t in texts]
        excess = sum(costs) - row_cap_tokens
        keep = [True] * len(rows)
        for i, row in enumerate(rows):
            if excess <= 0:
                break
            if row["state"] != State.SHOWN:
                keep[i] = False
                excess -= costs[i]
        lines.append("ledger (id state tokens turn call):")
        lines += [t for t, k in zip(texts, keep, strict=True) if k]
        if hidden := keep.count(False):
            lines.append(f"{hidden} folded rows hidden; use search_ledger")
    lines += outcomes
    lines.append(f"budget_used_pct: {round(100 * used_tokens / window)}, tokens left: {max(0, window - used_tokens)}")
    return "\n".join(lines)


def append_tail(messages: Sequence[Message], tail: str, *, merge: bool) -> list[Message]:
    """Add the tail as a user message, or merge it into a user or tool message before it."""
    if merge and messages[-1]["role"] in ("user", "tool"):
        last = messages[-1]
        return [*messages[:-1], {"role": last["role"], "content": f"{last['content']}\n\n{tail}"}]
    return [*messages, {"role": "user", "content": tail}]
