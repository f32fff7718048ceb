"""The command line: what can be typed, and what a failure looks like.

Two invariants:

* ``selfgc-rl --help`` answers at once: this module imports the standard library only; each command's module, and
  everything heavy behind it, is imported when that command runs.
* One handler for every failure. A user error is one line on stderr and exit code 2, a part that died is one line with
  its log and exit code 3, Ctrl-C is 130 and says how to go on. ``--debug`` shows the traceback instead.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

PROG = "selfgc-rl"
USER_ERROR, INFRASTRUCTURE_ERROR, INTERRUPTED = 2, 3, 130
_TASK_HELP = "family[:level[:seed[:pressure[:window]]]]; 'selfgc-rl tasks list' shows the families"
# The disk or its permissions stopped us: the user's to fix, so no traceback.
_DISK_ERRORS = {errno.ENOSPC: "free some space or choose another folder", errno.EDQUOT: "raise the quota"}
_DISK_ERRORS |= dict.fromkeys((errno.EACCES, errno.EROFS, errno.EPERM), "choose a folder you may write to")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"{PROG}: error: {message} → {self.prog} --help\n")


def _add_config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="YAML config (default: the embedded model on CPU)")
    sets = "override a key (also: a trailing a.b=c)"
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="A.B=C", help=sets)
    parser.set_defaults(overrides=[])


def _add_server_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--server", metavar="URL", help="use this running vLLM server instead of starting one")


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command. Each command is the module ``selfgc_rl.commands.<name>`` with ``run(args)``."""
    parser = _Parser(
        prog=PROG,
        allow_abbrev=False,
        description="Teach a model to garbage-collect its own context: train, evaluate, export and serve adapters.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument("--debug", action="store_true", help="show the traceback of a failure")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)

    def add(name: str, text: str, module: str | None = None) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        command.set_defaults(module=module or name)
        return command

    train = add("train", "train a LoRA adapter with GRPO")
    _add_config_options(train)
    train.add_argument("--run", metavar="DIR", help="run folder (default: runs/train-DATE-TIME)")
    train.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of --run")
    train.add_argument("--dry-run", action="store_true", help="print the resolved plan and stop")
    _add_server_option(train)

    sft = add("sft", "make a cold-start adapter from scripted demonstrations")
    _add_config_options(sft)
    sft.add_argument("--run", metavar="DIR", help="run folder (default: runs/sft-DATE-TIME)")
    sft.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of --run")

    evaluate = add("eval", "evaluate base against adapter on held-out tasks", "evaluate")
    _add_config_options(evaluate)
    source = evaluate.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", metavar="DIR", help="a training run: its newest checkpoint and its config")
    source.add_argument("--adapter", metavar="DIR", help="a LoRA adapter folder")
    evaluate.add_argument("--out", metavar="DIR", help="where the results go (default: in the run)")
    _add_server_option(evaluate)

    export = add("export", "write a trained adapter as a folder that serves")
    source_help = "a run (its newest checkpoint), a checkpoint or an adapter"
    export.add_argument("source", metavar="RUN|CHECKPOINT", help=source_help)
    export.add_argument("--to", required=True, metavar="DIR", help="new folder to write")
    export.add_argument("--merge", action="store_true", help="merge the adapter into the base weights")
    export.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="dtype of the exported weights")
    export.add_argument("--model", metavar="DIR", help="base model (default: the run's, or the adapter's own)")

    serve = add("serve", "serve an export with vLLM until Ctrl-C")
    serve.add_argument("folder", metavar="DIR", help="a folder written by 'selfgc-rl export'")
    serve.add_argument("--port", type=int, help="port to listen on (default: a free one)")
    serve.add_argument("--model", metavar="DIR", help="base model of an adapter export (default: the one it names)")

    play = add("play", "watch one episode live in the terminal")
    play.add_argument("task", metavar="TASK", help=_TASK_HELP)
    who = play.add_mutually_exclusive_group()
    who.add_argument("--policy", metavar="scripted:STYLE", help="a scripted demonstrator (default: scripted:fold_drop)")
    who.add_argument("--adapter", metavar="DIR", help="play with this LoRA adapter or run folder")
    play.add_argument("--model", metavar="DIR", help="play with this model folder (with --adapter: its base)")
    play.add_argument("--seed", type=int, default=0, help="sampling seed (default: 0)")
    play.add_argument("--delay", type=float, default=0.0, metavar="SECONDS", help="pause after each turn")
    _add_config_options(play)
    _add_server_option(play)

    tasks = add("tasks", "list task families, show one task")
    actions = tasks.add_subparsers(dest="action", metavar="list|show", required=True, parser_class=_Parser)
    actions.add_parser("list", help="the task families")
    show = actions.add_parser("show", help="a task's instruction, files and sizes")
    show.add_argument("task", metavar="TASK", help=_TASK_HELP)
    show.add_argument("--model", metavar="DIR", default="embedded", help="whose tokenizer counts (default: embedded)")

    demo = add("demo", "the whole loop on the embedded model: train, evaluate, export, report")
    demo.add_argument("--run", metavar="DIR", default="runs/demo", help="run folder (default: runs/demo)")
    demo.add_argument("--fresh", action="store_true", help="start over; the old run folder is set aside")
    _add_config_options(demo)

    report = add("report", "plots and a small HTML page from a run")
    report.add_argument("run", metavar="RUN", help="a run folder with results.json or metrics.jsonl")
    return parser


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse; words without a dash after a command that takes a config are overrides, anywhere on the line."""
    parser = build_parser()
    args, extras = parser.parse_known_args(argv)
    if args.command is None and not args.version:
        parser.print_help()
        raise SystemExit(USER_ERROR)
    strange = [word for word in extras if word.startswith("-") or not hasattr(args, "overrides")]
    if strange:
        parser.error(f"unrecognized argument '{strange[0]}'")
    if hasattr(args, "overrides"):
        args.overrides = [*args.sets, *extras]
    return args


def _say(message: str) -> None:
    print(f"{PROG}: {' '.join(message.split())}", file=sys.stderr, flush=True)


def _report_failure(failure: BaseException, args: argparse.Namespace) -> int | None:
    """Print one line for a failure we know and return its exit code; None for one we do not."""
    if isinstance(failure, KeyboardInterrupt):
        hint = getattr(args, "resume_hint", "")
        print(file=sys.stderr)
        _say(f"interrupted{f'; to go on: {hint}' if hint else ''}")
        return INTERRUPTED
    if isinstance(failure, BrokenPipeError):  # our reader (head, less) has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0

    if isinstance(failure, ModuleNotFoundError) and not str(failure.name).startswith("selfgc"):
        _say(f"error: this command needs the package '{failure.name}' → pip install 'selfgc-rl[train]'")
        return USER_ERROR

    from selfgc_envs.errors import InfrastructureError, UserError

    if isinstance(failure, UserError):
        _say(f"error: {failure}")
        return USER_ERROR
    if isinstance(failure, InfrastructureError):
        log = getattr(args, "log_path", None)
        where = f" → log: {log}" if log and str(log) not in str(failure) else ""
        _say(f"error: {failure}{where}")
        return INFRASTRUCTURE_ERROR
    if isinstance(failure, OSError) and failure.errno in _DISK_ERRORS:
        _say(f"error: {failure.strerror}: '{failure.filename or '?'}' → {_DISK_ERRORS[failure.errno]}")
        return USER_ERROR
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (0, 2 user error, 3 infrastructure, 130 interrupted)."""
    args = _parse(argv)
    if args.version:
        from importlib.metadata import version

        print(version(PROG))
        return 0
    # Models are folders here: no library needs to ask a hub about them.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        code: int = importlib.import_module(f"selfgc_rl.commands.{args.module}").run(args)
        sys.stdout.flush()
        return code
    except (Exception, KeyboardInterrupt) as failure:
        if args.debug:
            raise
        known = _report_failure(failure, args)
        if known is None:
            raise
        return known


if __name__ == "__main__":
    sys.exit(main())
