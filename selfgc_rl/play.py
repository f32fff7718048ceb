"""Watch one episode in the terminal: each turn's calls, the ledger, and a bar of the budget used.

The episode runs through :func:`selfgc_rl.episode.run_episode`, the loop of training and evaluation; this module only
draws what it reports.
"""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from selfgc_envs.actions import ToolCall, format_call, parse_action
from selfgc_rl.types import Episode, Turn

_BAR_CELLS = 50
_STATE_STYLE = {"shown": "green", "folded": "yellow", "stub": "yellow", "dropped": "red"}


def budget_bar(used: float, window: int, threshold: float) -> Text:
    """A bar of ``used`` (share of the window): green below the line, yellow above it, red past the window."""
    filled = min(_BAR_CELLS, round(used * _BAR_CELLS))
    line = round(threshold * _BAR_CELLS)
    colour = "green" if used <= threshold else "yellow" if used <= 1 else "red"
    bar = Text("budget ")
    for cell in range(_BAR_CELLS):
        if cell == line:
            bar.append("|", "bold")
        bar.append("█" if cell < filled else "░", colour if cell < filled else "bright_black")
    bar.append(f" {used:.0%} of {window} tokens")
    return bar


def _calls(text: str, limit: int = 200) -> list[Text]:
    action = parse_action(text)
    lines = [Text(f"  {action.thought[:limit]}", "italic bright_black")] if action.thought else []
    for call in action.calls:
        if not isinstance(call, ToolCall):
            lines.append(Text(f"  ✗ {call.message[:limit]}", "red"))
            continue
        shown = format_call(call).removeprefix("<tool_call>").removesuffix("</tool_call>")
        lines.append(Text(f"  → {shown[:limit]}{'…' if len(shown) > limit else ''}", "cyan"))
    return lines


def ledger_table(rows: Any) -> Table:
    """The ledger as the model saw it, one row per object."""
    table = Table("id", "state", "tokens", "turn", "call", box=None, padding=(0, 2), header_style="bright_black")
    for row in rows:
        state = Text(str(row["state"]), _STATE_STYLE.get(str(row["state"]), ""))
        table.add_row(Text(str(row["id"])), state, str(row["tokens"]), str(row["turn"]), Text(str(row["call"])[:70]))
    return table


def render_turn(turn: Turn, *, window: int, threshold: float) -> RenderableType:
    """One turn: what the model saw (ledger, budget), what it did, and what it was told about it."""
    parts: list[RenderableType] = [
        Text(f"turn {turn.index + 1}", "bold"),
        budget_bar(turn.budget_used, window, threshold),
    ]
    if turn.ledger:
        parts.append(ledger_table(turn.ledger))
    outcomes = [str(event["text"]) for event in turn.events if event.get("event") == "outcome"]
    told = [Text(f"  ← {text[:200]}", "red" if text.startswith("error") else "bright_black") for text in outcomes]
    return Group(*parts, *_calls(turn.sample.text), *told, Text())


def render_end(episode: Episode, *, coefficient: float) -> RenderableType:
    """How the episode ended and what it earned."""
    good = episode.success >= 1.0
    head = Text(f"{episode.stop_reason}: success {episode.success:g}", "bold green" if good else "bold red")
    head.append(f", reward {episode.reward:.3f} (penalty {episode.penalty:.3f} × {coefficient:g})", "default")
    counts = ", ".join(f"{name} {value:g}" for name, value in sorted(episode.metrics.items()) if value)
    return Group(head, Text(f"{len(episode.turns)} turns, {episode.seconds:.1f} s; {counts}", "bright_black"))
