"""``selfgc-rl train``: GRPO on a LoRA adapter; ``--dry-run`` prints the plan instead."""

from __future__ import annotations

import argparse

from selfgc_rl.commands.common import config_from, run_folder


def run(args: argparse.Namespace) -> int:
    run_dir = run_folder(args, "train")
    config = config_from(args, run_dir=run_dir if args.resume else None)
    if args.dry_run:
        from selfgc_rl.commands.plan import plan_lines

        for what, text in plan_lines(config, run_dir):
            print(f"{what:<18} {text}")  # not wrapped: paths and the server's command line are there to be copied
        return 0
    args.resume_hint = f"selfgc-rl train --run {run_dir} --resume"
    args.log_path = run_dir / "server.log"
    from selfgc_rl.training import train

    train(config, run_dir, resume=args.resume)
    print(f"run folder: {run_dir}\nnext: selfgc-rl eval --run {run_dir}, selfgc-rl export {run_dir} --to DIR")
    return 0
