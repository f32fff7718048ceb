"""``selfgc-rl report``: plots and a small HTML page from a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from selfgc_rl.report import write_report


def run(args: argparse.Namespace) -> int:
    png, page = write_report(Path(args.run))
    print(f"plot:   {png}\nreport: {page}")
    return 0
