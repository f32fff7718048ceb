"""What the model may emit: tool schemas, tool calls, and the parser from text to calls.

Wire format: Hermes blocks in the assistant text, ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``; any
text outside the blocks is the thought. Invariants:

* :func:`parse_action` never raises, whatever the bytes: each block becomes either a :class:`ToolCall` that fits its
  schema or a :class:`CallError` whose text tells the model what to change.
* :func:`format_call` and :func:`parse_action` are inverse on valid calls.
* Tool schemas live here once; prompts, the parser and the environment all read :data:`TOOLS`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

MAX_ACTION_CHARS = 200_000  # a reply is capped by max_new_tokens; this bounds work on a hostile endpoint's answer
MAX_CALLS = 64


@dataclass(frozen=True)
class ToolSpec:
    """Schema of one tool: parameter name -> type, and which may be left out."""

    name: str
    params: dict[str, type]
    optional: frozenset[str] = frozenset()
    management: bool = False
    help: str = ""

    def signature(self) -> str:
        args = ", ".join(p + ("?" if p in self.optional else "") for p in self.params)
        return f"{self.name}({args})"


TOOLS: dict[str, ToolSpec] = {
    t.name: t
    for t in (
        ToolSpec(
            "read_file", {"path": str, "start": int, "end": int}, frozenset({"start", "end"}), help="lines of a file"
        ),
        ToolSpec("write_file", {"path": str, "content": str}, help="create or overwrite a file"),
        ToolSpec("str_replace", {"path": str, "old": str, "new": str}, help="replace one exact, unique passage"),
        ToolSpec("run_bash", {"cmd": str}, help="run a command in the persistent shell"),
        ToolSpec("list_files", {}, help="paths in the workspace"),
        ToolSpec("plan", {"text": str}, help="note a plan"),
        ToolSpec("submit", {}, help="finish; the task is graded as it stands"),
        ToolSpec("fold", {"id": str, "summary": str}, frozenset({"summary"}), True, "keep one line of an object"),
        ToolSpec("drop", {"id": str}, management=True, help="remove an object, call and result"),
        ToolSpec("expand", {"id": str}, management=True, help="bring a folded body back"),
        ToolSpec("search_ledger", {"query": str}, management=True, help="ids whose summary or call matches"),
    )
}
WORK_TOOLS = tuple(t.name for t in TOOLS.values() if not t.management)
MANAGEMENT_TOOLS = tuple(t.name for t in TOOLS.values() if t.management)


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CallError:
    """A block that is no valid call; ``message`` is shown to the model."""

    message: str


@dataclass(frozen=True)
class ParsedAction:
    thought: str
    calls: tuple[ToolCall | CallError, ...]


def format_call(call: ToolCall) -> str:
    """The canonical Hermes block of a call."""
    body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return f"<tool_call>{body}</tool_call>"


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)
_FENCE = re.compile(r"\A```\w*\n?(.*?)\n?```\Z", re.DOTALL)


def _blocks(text: str) -> tuple[str, list[tuple[str, bool]]]:
    """Split into the text outside the blocks and the blocks with a flag 'was closed'."""
    outside: list[str] = []
    blocks: list[tuple[str, bool]] = []
    pos = 0
    while True:
        start = text.find(_OPEN, pos)
        if start < 0:
            outside.append(text[pos:])
            return "".join(outside), blocks
        outside.append(text[pos:start])
        body_start = start + len(_OPEN)
        end = text.find(_CLOSE, body_start)
        reopened = text.find(_OPEN, body_start)
        if end < 0 or 0 <= reopened < end:  # unterminated: up to the next opening or the end of the text
            stop = reopened if reopened >= 0 else len(text)
            blocks.append((text[body_start:stop], False))
            pos = stop
        else:
            blocks.append((text[body_start:end], True))
            pos = end + len(_CLOSE)


def _parse_block(body: str, closed: bool, tools: Collection[str]) -> ToolCall | CallError:
    body = body.strip()
    if fence := _FENCE.match(body):
        body = fence.group(1).strip()
    try:
        data = json.loads(body, strict=False)
    except (ValueError, RecursionError) as e:
        what = "the <tool_call> block was not closed" if not closed else f"invalid JSON ({str(e)[:80]})"
        return CallError(f'{what}; write {_OPEN}{{"name": ..., "arguments": {{...}}}}{_CLOSE}')
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return CallError('a call must be a JSON object with "name" and "arguments"')
    name, arguments = data["name"], data.get("arguments", {})
    if name not in tools:
        return CallError(f"unknown tool '{name[:40]}'; tools: {', '.join(tools)}")
    if isinstance(arguments, str):  # some models send the arguments as a JSON string
        try:
            arguments = json.loads(arguments or "{}", strict=False)
        except (ValueError, RecursionError):
            return CallError(f"{name}: arguments are not valid JSON")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return CallError(f"{name}: arguments must be a JSON object, got {type(arguments).__name__}")
    return _check_arguments(TOOLS[name], arguments)


def _check_arguments(spec: ToolSpec, arguments: dict[str, Any]) -> ToolCall | CallError:
    clean: dict[str, Any] = {}
    for key, value in arguments.items():
        want = spec.params.get(key)
        if want is None:
            return CallError(f"{spec.name}: unknown argument '{key[:40]}'; use {spec.signature()}")
        if value is None and key in spec.optional:
            continue
        if want is int and isinstance(value, str) and re.fullmatch(r"-?\d{1,9}", value):
            value = int(value)
        if not isinstance(value, want) or isinstance(value, bool):
            return CallError(f"{spec.name}: argument '{key}' must be {want.__name__}, got {type(value).__name__}")
        if isinstance(value, str):  # lone surrogates cannot be encoded: neither tokenised nor written to a file
            value = value.encode("utf-8", "replace").decode("utf-8")
        clean[key] = value
    missing = [p for p in spec.params if p not in clean and p not in spec.optional]
    if missing:
        return CallError(f"{spec.name}: missing argument '{missing[0]}'; use {spec.signature()}")
    return ToolCall(spec.name, clean)


def parse_action(text: str, tools: Collection[str] = tuple(TOOLS)) -> ParsedAction:
    """Parse an assistant reply into its thought and its calls, in order. Never raises.

    Args:
        text: the reply; ``<think>`` blocks count as thought, calls inside them are ignored.
        tools: names allowed by the strategy; others give a :class:`CallError`.
    """
    text = text[:MAX_ACTION_CHARS].encode("utf-8", "replace").decode("utf-8")
    thinking: list[str] = []

    def _take(match: re.Match[str]) -> str:
        thinking.append(match.group(1).strip())
        return ""

    outside, blocks = _blocks(_THINK.sub(_take, text))
    calls = [_parse_block(body, closed, tools) for body, closed in blocks[:MAX_CALLS]]
    if len(blocks) > MAX_CALLS:
        calls.append(CallError(f"more than {MAX_CALLS} calls in one message; the rest was ignored"))
    if not calls:
        calls.append(CallError(f'no tool call found; write {_OPEN}{{"name": ..., "arguments": {{...}}}}{_CLOSE}'))
    thought = "\n".join(t for t in (*thinking, outside.strip()) if t)
    return ParsedAction(thought, tuple(calls))
