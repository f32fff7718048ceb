"""``selfgc-rl export``: a run, checkpoint or adapter as a folder that serves."""

from __future__ import annotations

import argparse
from pathlib import Path

from selfgc_rl.export import export_adapter, find_source


def run(args: argparse.Namespace) -> int:
    source = find_source(Path(args.source), args.model)
    folder = export_adapter(source, Path(args.to), merge=args.merge, dtype=args.dtype)
    size = sum(f.stat().st_size for f in folder.iterdir()) / 1e6
    print(f"exported {source.adapter_dir} → {folder} ({'merged' if args.merge else 'adapter'}, {size:.1f} MB)")
    print(f"serve it: selfgc-rl serve {folder}")
    return 0
