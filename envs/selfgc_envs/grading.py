"""Graders: run in the trusted process, on values, never on what the agent's code says about itself.

A check reads a file of the workspace (without following links out of it) and compares by value. Nothing the agent
wrote is executed: constants are read from the syntax tree.
"""

from __future__ import annotations

import ast
import threading
from dataclasses import dataclass

from selfgc_envs.sandbox import PathError, Sandbox
from selfgc_envs.tasks.base import Task

# CPython 3.11's ast.parse raises SystemError ("AST constructor recursion depth mismatch") in concurrent threads.
_PARSER = threading.Lock()


@dataclass(frozen=True)
class Grade:
    """``fraction`` is 1.0 only when every check passes, else 0.0; ``failed`` says which did not."""

    fraction: float
    failed: tuple[str, ...] = ()


def _constant(source: str, name: str) -> object:
    """The last top-level literal assigned to ``name``; None if there is none."""
    value: object = None
    with _PARSER:
        tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            try:
                value = ast.literal_eval(node.value)
            except ValueError:
                value = None
    return value


def grade(task: Task, sandbox: Sandbox) -> Grade:
    """Grade the workspace as it stands."""
    failed = []
    for check in task.checks:
        try:
            text = sandbox.read_text(check["path"])
            if check["type"] == "file":
                ok = text.strip() == check["equals"]
            else:
                value = _constant(text, check["name"])
                ok = type(value) is type(check["equals"]) and value == check["equals"]
        except (PathError, SyntaxError, ValueError, RecursionError, MemoryError):
            ok = False
        if not ok:
            failed.append(f"{check['path']}{':' + check['name'] if 'name' in check else ''}")
    return Grade(0.0 if failed else 1.0, tuple(failed))
