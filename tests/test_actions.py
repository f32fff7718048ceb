"""The parser: any text gives calls or an error the model can act on, never an exception (case S1)."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfgc_envs.actions import TOOLS, CallError, ToolCall, format_call, parse_action


def test_format_and_parse_are_inverse():
    call = ToolCall("str_replace", {"path": "a.py", "old": 'x = "</b>"\n', "new": "é\u2028"})
    assert parse_action(format_call(call)).calls == (call,)


def test_several_calls_and_text_around_them():
    text = f"first\n{format_call(ToolCall('submit'))} middle {format_call(ToolCall('plan', {'text': 'p'}))} end"
    parsed = parse_action(text)
    assert [c.name for c in parsed.calls] == ["submit", "plan"]
    assert parsed.thought == "first\n middle  end"


def test_arguments_as_json_string_and_code_fence():
    body = json.dumps({"name": "run_bash", "arguments": json.dumps({"cmd": "ls"})})
    assert parse_action(f"<tool_call>```json\n{body}\n```</tool_call>").calls == (ToolCall("run_bash", {"cmd": "ls"}),)


def test_calls_inside_think_are_not_executed():
    parsed = parse_action(
        f"<think>maybe {format_call(ToolCall('submit'))}</think>{format_call(ToolCall('list_files'))}"
    )
    assert parsed.calls == (ToolCall("list_files"),)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no tool call"),
        ("<tool_call>{", "not closed"),
        ("<tool_call>{]</tool_call>", "invalid JSON"),
        ("<tool_call>[1]</tool_call>", "JSON object"),
        ('<tool_call>{"name": "rm"}</tool_call>', "unknown tool"),
        ('<tool_call>{"name": "fold", "arguments": {"id": 3}}</tool_call>', "must be str"),
        ('<tool_call>{"name": "fold", "arguments": {}}</tool_call>', "missing argument 'id'"),
        ('<tool_call>{"name": "fold", "arguments": {"ids": "x"}}</tool_call>', "unknown argument"),
        ('<tool_call>{"name": "fold", "arguments": [1]}</tool_call>', "must be a JSON object"),
        ("<tool_call>" + "[" * 100_000, "not closed"),
    ],
)
def test_errors_say_what_to_change(text, says):
    (error,) = parse_action(text).calls
    assert isinstance(error, CallError) and says in error.message


def test_tools_outside_the_strategy_are_errors():
    (error,) = parse_action(format_call(ToolCall("drop", {"id": "x"})), tools=("submit",)).calls
    assert isinstance(error, CallError) and "unknown tool 'drop'" in error.message


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "```",
        '{"name": "fold", "arguments": ',
        '{"id": "obs_001"}',
        "}",
    ]
)
TEXTS = st.lists(FRAGMENTS | st.text(st.characters(), max_size=12), max_size=14).map("".join)


@settings(max_examples=2000, deadline=None)
@given(TEXTS)
def test_any_text_gives_calls_or_errors(text):
    parsed = parse_action(text)
    assert parsed.calls
    for call in parsed.calls:
        assert isinstance(call, CallError | ToolCall)
        if isinstance(call, ToolCall):
            assert call.name in TOOLS
            format_call(call).encode("utf-8")  # no lone surrogate survives
