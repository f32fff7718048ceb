"""Starts processes from one thread that lives as long as this process.

``bwrap --die-with-parent`` asks the kernel for a signal when its parent dies, and the kernel takes the parent to be
the *thread* that started it. Started from a worker thread, a sandbox would die with that thread.
"""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sandbox-starter")


def _renew() -> None:
    global _starter
    _starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sandbox-starter")


os.register_at_fork(after_in_child=_renew)  # threads do not survive a fork


def spawn(argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """``subprocess.Popen(argv, **options)`` in the starter thread. Raises what Popen raises."""

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(argv, **options)

    return _starter.submit(start).result()
