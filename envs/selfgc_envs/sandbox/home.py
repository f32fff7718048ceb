"""The private temporary folder of one sandbox, removed when it closes, or by a later process if its owner was killed.

A folder is in use as long as its lock is held, and the kernel drops a dead process's locks. The lock file gets its
name only once it is locked, so no living folder ever looks abandoned.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_PREFIX = "selfgc-"
_LOCK = "lock"


class Home:
    """Makes the folder ``path``; the first of a process also removes what killed processes left."""

    def __init__(self) -> None:
        _remove_abandoned(tempfile.gettempdir())
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        unnamed = self.path / f"{_LOCK}.part"
        self._lock = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / _LOCK)

    def remove(self) -> None:
        """Remove the folder with all that is in it. May be called twice."""
        if self._lock >= 0:
            remove_tree(self.path)
            os.close(self._lock)
            self._lock = -1


@functools.cache  # once per process and place
def _remove_abandoned(parent: str) -> None:
    for entry in os.scandir(parent):
        if not entry.name.startswith(_PREFIX):
            continue
        try:
            if entry.stat(follow_symlinks=False).st_uid != os.geteuid() or not entry.is_dir(follow_symlinks=False):
                continue
            lock = os.open(os.path.join(entry.path, _LOCK), os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(Path(entry.path))
        except BlockingIOError:
            pass  # in use
        finally:
            os.close(lock)


def remove_tree(root: Path) -> None:
    """Remove ``root`` whatever the agent left in it (locked folders, very deep trees)."""
    try:
        shutil.rmtree(root)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):
        for command in (["chmod", "-R", "u+rwX", "--", str(root)], ["rm", "-rf", "--", str(root)]):
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
