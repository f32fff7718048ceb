"""``selfgc-rl tasks``: list the task families, show one task as the agent gets it."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from selfgc_envs.tasks import Task, list_families, parse_task
from selfgc_rl.commands.common import console


def run(args: argparse.Namespace) -> int:
    return _list() if args.action == "list" else _show(args.task, args.model)


def _list() -> int:
    from rich.table import Table

    table = Table("family", "use", "levels", "description", box=None, pad_edge=False)
    for family in list_families():
        use = "held out" if family.heldout else "train"
        table.add_row(family.name, use, ", ".join(family.levels), family.description)
    console().print(table)
    return 0


def _show(spec: str, model: str) -> int:
    parse_task(spec)  # a misspelt task needs no model to be refused
    from selfgc_rl.config import ModelConfig
    from selfgc_rl.models import resolve_model
    from selfgc_rl.tokens import load_encoder

    model_dir, _ = resolve_model(ModelConfig(path=model, adapter=None))
    encoder = load_encoder(model_dir)
    task = parse_task(spec, token_counter=encoder.count)
    _print_task(task, lambda text: len(encoder.tokenizer.encode(text, add_special_tokens=False)))
    return 0


def _print_task(task: Task, count: Callable[[str], int]) -> None:
    from rich.markup import escape
    from rich.table import Table

    out = console()
    out.print(f"[bold]{escape(task.id)}[/]   window {task.window} tokens, pressure {task.pressure:g}")
    out.print(f"\n{escape(task.instruction)}\n")
    table = Table("file", "tokens", "first line", box=None, pad_edge=False)
    for path, content in sorted(task.files.items()):
        first = content.strip().splitlines()[0][:60] if content.strip() else "(empty)"
        mark = " *" if path in task.executables else ""
        table.add_row(escape(path) + mark, str(count(content)), escape(first))
    out.print(table)
    if task.executables:
        out.print("* executable")
