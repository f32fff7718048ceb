"""Run a command and let nothing of it outlive the process that asked for it.

``python _guard.py PARENT_PID COMMAND...`` leads its own process group (the caller starts it in a new session). The
group ends when the command exits, when the guard gets SIGTERM, or when the parent is gone, however it died: the
kernel then hands the guard to another parent, which it notices within ``POLL_S``. A thread of the parent that exits
changes nothing (a parent-death signal would fire then). If the guard itself is killed, the command dies with it.

Order: SIGTERM to the group, up to ``GRACE_S`` for the command, SIGKILL to whatever is left, then exit with the
command's status. Only the standard library, because it starts with ``python -I``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

GRACE_S = 5.0
POLL_S = 0.2
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None)


def others_in_group(group: int) -> list[int]:
    """Process ids in the group, without this process and without the already dead."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/stat") as f:
                state, _parent, pgrp = f.read().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state not in "ZX":
            found.append(int(name))
    return found


def end_group(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM, grace for the command, SIGKILL until nobody is left."""
    if child.poll() is None:
        os.killpg(0, signal.SIGTERM)
        try:
            child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            pass
    deadline = time.monotonic() + GRACE_S
    while (left := others_in_group(os.getpgid(0))) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.02)


def main(parent: int, command: list[str]) -> int:
    """Returns the command's exit status (128 + signal if one killed it)."""
    told_to_stop = False

    def stop(*_: object) -> None:
        nonlocal told_to_stop
        told_to_stop = True

    signal.signal(signal.SIGTERM, stop)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of the command come to us, not to init
    if os.getppid() != parent:
        return 1
    child = subprocess.Popen(command, preexec_fn=lambda: _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL))
    while child.poll() is None and not told_to_stop and os.getppid() == parent:
        time.sleep(POLL_S)
    end_group(child)
    status = child.wait()
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
