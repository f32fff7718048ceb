"""What several commands share: the config from the options, run folders, a console."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from selfgc_envs.errors import UserError
from selfgc_rl.config import Config, load_config


def config_from(args: argparse.Namespace, *, run_dir: Path | None = None) -> Config:
    """The resolved config: ``--config``, else the run's own, else the defaults; then the overrides."""
    path = args.config
    if path is None and run_dir is not None and (run_dir / "config.yaml").is_file():
        path = run_dir / "config.yaml"
    overrides = list(args.overrides)
    if getattr(args, "server", None):
        overrides.append(f"server.url={args.server}")
    return load_config(path, overrides)


def run_folder(args: argparse.Namespace, kind: str) -> Path:
    """``--run``, or a new ``runs/KIND-DATE-TIME``; ``--resume`` needs ``--run``."""
    if args.run:
        return Path(args.run)
    if args.resume:
        raise UserError("--resume needs to know which run", "add --run DIR")
    return Path("runs") / time.strftime(f"{kind}-%Y%m%d-%H%M%S")


def console() -> Any:
    """A rich console on stdout."""
    from rich.console import Console

    return Console(highlight=False)


def plain(out: Any) -> Callable[[str], None]:
    """Print lines as they are (paths stay whole, brackets are no markup), beside a spinner if there is one."""
    return lambda line: out.print(line, markup=False, soft_wrap=True)


def waiting(out: Any, what: str) -> tuple[Any, Callable[[float], None]]:
    """A spinner with the seconds waited, and the callback that moves it on."""
    status = out.status(what)
    return status, lambda seconds: status.update(f"{what} ({seconds:.0f} s)")


def results_table(results: Mapping[str, Any]) -> Any:
    """The short table of an evaluation, for a rich console."""
    from rich.table import Table

    from selfgc_rl.report import table_rows

    table = Table("", "base", "trained", title=f"{results['tasks']} held-out tasks", title_justify="left")
    for row in table_rows(results):
        table.add_row(*row)
    return table
