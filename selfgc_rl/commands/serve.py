"""``selfgc-rl serve``: an export behind an OpenAI-compatible endpoint, until Ctrl-C."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

from selfgc_envs.errors import ServerError, UserError
from selfgc_rl.commands.common import console, waiting
from selfgc_rl.config import ServerConfig
from selfgc_rl.serve import curl_example, read_export, start

_HEALTH_EVERY_S = 5.0


def run(args: argparse.Namespace) -> int:
    if args.port is not None and not 1 <= args.port <= 65535:
        raise UserError(f"--port {args.port} is not a port", "give 1 to 65535, or leave it out")
    out = console()
    export = read_export(Path(args.folder), args.model)
    log_path = Path(tempfile.gettempdir()) / f"selfgc-serve-{os.getpid()}.log"  # an export may be read-only
    args.log_path = log_path
    args.resume_hint = f"selfgc-rl serve {args.folder}"
    spinner, progress = waiting(out, "starting vLLM")
    with spinner:
        server = start(export, server=ServerConfig(port=args.port), log_path=log_path, progress=progress)
    with server:
        print(f"serving {args.folder} at {server.url} (log: {log_path}); Ctrl-C stops it. Try:\n")
        print(curl_example(server.url, export), flush=True)
        try:
            while server.alive():
                time.sleep(_HEALTH_EVERY_S)
        except KeyboardInterrupt:
            out.print("\nstopping")
            return 0
        raise ServerError(f"the server died: {server.failure()}")
