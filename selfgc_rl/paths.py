"""Where files outside the repository live: one cache folder, moved with the environment variable ``SELFGC_CACHE``."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_dir() -> Path:
    """``SELFGC_CACHE``, else ``selfgc-rl`` under ``XDG_CACHE_HOME`` or ``~/.cache``; not created here."""
    if override := os.environ.get("SELFGC_CACHE"):
        return Path(override).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "selfgc-rl"


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` (created when missing); the kernel frees it if the holder dies."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
