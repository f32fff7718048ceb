"""``selfgc-rl eval``: base against adapter on held-out tasks."""

from __future__ import annotations

import argparse
from pathlib import Path

from selfgc_rl.before_after import evaluate_before_after
from selfgc_rl.commands.common import config_from, console, plain, results_table
from selfgc_rl.export import find_adapter, run_of


def run(args: argparse.Namespace) -> int:
    given = Path(args.run or args.adapter)
    adapter = find_adapter(given)
    run_dir = run_of(adapter)
    config = config_from(args, run_dir=run_dir)
    out_dir = Path(args.out) if args.out else (run_dir or given) / "eval"
    args.log_path = out_dir / "server.log"
    args.resume_hint = "the same command again plays only what is missing"
    out = console()
    with out.status("preparing") as status:

        def waiting(seconds: float) -> None:
            status.update(f"starting vLLM ({seconds:.0f} s)")

        results = evaluate_before_after(config, adapter, out_dir, say=plain(out), waiting=waiting)
    out.print(results_table(results))
    print(f"results and traces: {out_dir}")
    return 0
