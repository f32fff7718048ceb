"""``selfgc-rl demo``: the whole loop on the embedded model; resumes, and prints a finished demo's table again."""

from __future__ import annotations

import argparse
from pathlib import Path

from selfgc_rl.commands.common import console, results_table
from selfgc_rl.config import load_config
from selfgc_rl.demo import DemoState, demo_config, run_demo, set_aside


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    run_dir = Path(args.run)
    config = load_config(args.config, args.overrides) if args.config else demo_config(args.overrides)
    out = console()
    if args.fresh and (old := set_aside(run_dir)):
        print(f"the old run folder is now {old}")
    finished = DemoState.open(run_dir, config).finished
    args.log_path = run_dir / "server.log"
    args.resume_hint = "the same command again"
    results = run_demo(config, run_dir, say=tqdm.write)
    out.print(results_table(results))
    print(f"plot:    {run_dir / 'report.png'}\nreport:  {run_dir / 'report.html'}\nresults: {run_dir / 'results.json'}")
    print(f"export:  {run_dir / 'export'} (selfgc-rl serve {run_dir / 'export'})")
    again = f"this demo ran before, for {results['minutes']:.0f} min; --fresh starts over"
    print(again if finished else f"done in {results['minutes']:.0f} min")
    return 0
