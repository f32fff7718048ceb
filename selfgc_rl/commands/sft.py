"""``selfgc-rl sft``: a cold-start adapter from scripted demonstrations."""

from __future__ import annotations

import argparse

from selfgc_rl.commands.common import config_from, run_folder


def run(args: argparse.Namespace) -> int:
    run_dir = run_folder(args, "sft")
    config = config_from(args, run_dir=run_dir if args.resume else None)
    args.resume_hint = f"selfgc-rl sft --run {run_dir} --resume"
    from selfgc_rl.sft import train_sft

    adapter = train_sft(config, run_dir, resume=args.resume)
    print(f"adapter: {adapter}\nnext: selfgc-rl train model.adapter={adapter}")
    return 0
