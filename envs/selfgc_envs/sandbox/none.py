"""No sandbox: the same shell as an ordinary process of this user, in the workspace's folder.

For machines without bubblewrap and for tasks that are trusted. Commands can read and write what the user can and use
the network. Kept all the same: a scrubbed environment, deadlines, limits per process, and that nothing is left behind:
every process of the sandbox carries its private HOME in its environment, and is found by it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from selfgc_envs.errors import SandboxError, UserError
from selfgc_envs.sandbox.base import ShellSandbox
from selfgc_envs.sandbox.controller import controller_program
from selfgc_envs.sandbox.shell import Launch, Shell, StartError

# When the owner dies: the reaper kills every process that carries the workspace's name, itself excepted.
_ON_CLOSE = """
  for file in $(grep -lsF "HOME=$HOME" /proc/[0-9]*/environ); do
    pid=${file#/proc/}; pid=${pid%/environ}
    [[ $pid == "$BASHPID" ]] || kill -KILL "$pid"
  done
"""


class NoSandbox(ShellSandbox):
    """Runs commands unprotected."""

    def _start(self) -> Shell:
        if shutil.which("bash") is None:
            raise UserError("bash is not installed: commands cannot be run", "install bash")
        path = f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin"
        env = {"PATH": path, "HOME": str(self.workspace), "LANG": "C.UTF-8", "TERM": "dumb"}
        try:
            return Shell(Launch(_command, self._program, self._started, env=env, cwd=str(self.workspace)))
        except StartError as e:
            raise SandboxError(f"the shell could not be started: {e}") from e

    def _program(self, status: int, state: int, reap: int) -> str:
        limits = self._limits
        return controller_program(
            status=status,
            state=state,
            reap=reap,
            limits=f"ulimit -c 0; ulimit -v {limits.memory_mb << 10}; ulimit -f {limits.file_mb << 10}",
            child_limits=f"ulimit -t {limits.cpu_s}",
            on_close=_ON_CLOSE,
        )

    def _started(self, process: subprocess.Popen[bytes], info: bytes) -> Callable[[], None]:
        mark = f"HOME={self.workspace}".encode()

        def kill() -> None:
            process.kill()
            process.wait()
            for _ in range(20):
                found = _marked(mark)
                if not found:
                    return
                for pid in found:
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except (ProcessLookupError, PermissionError):
                        pass
                time.sleep(0.01)

        return kill


def _command(args: int, info: int) -> tuple[list[str], bytes]:
    return ["env"], b""


def _marked(mark: bytes) -> list[int]:
    """Running processes with ``mark`` among their first environment variables."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if mark in file.read(1 << 16).split(b"\0"):
                        found.append(int(name))
            except OSError:
                continue
    return found
