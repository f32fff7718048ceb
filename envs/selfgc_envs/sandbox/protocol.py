"""What a sandbox is: a private workspace, a shell whose directory and variables survive, and limits.

Small on purpose: another back end (a container, a remote machine) is one file that offers these six members.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class PathError(ValueError):
    """A path or file the agent named cannot be used. The message is written for the agent to read."""


@dataclass(frozen=True)
class CommandResult:
    """What one command did. ``output`` is stdout and stderr in the order they were written.

    ``exit_code`` is None when the command did not end by itself (time-out, a limit, or the shell died under it).
    ``restarted`` says that the shell was lost: its directory, variables and background processes are gone, the
    workspace is not; the next command runs in a fresh shell.
    """

    exit_code: int | None
    output: str
    timed_out: bool = False
    bytes_elided: int = 0
    restarted: bool = False


@dataclass(frozen=True)
class Limits:
    """What the commands of one sandbox may use."""

    command_timeout_s: float = 20.0  # wall clock of one command, unless run() is given another
    output_bytes: int = 16_384  # output kept of one command, half from its head and half from its tail
    memory_mb: int = 512  # address space of one process
    cpu_s: int = 60  # processor time of one process
    processes: int = 64  # processes and threads at once (bwrap only)
    file_mb: int = 32  # size of one file, and of one text read or written by the file helpers
    disk_mb: int = 128  # the workspace together; also each of /tmp and /dev/shm (bwrap only)


class Sandbox(Protocol):
    """Runs an agent's commands on a private workspace. One per episode; may be used from any thread."""

    @property
    def workspace(self) -> Path:
        """The workspace as this process sees it (commands may see it elsewhere)."""

    def run(self, cmd: str, timeout_s: float | None = None) -> CommandResult:
        """Run a bash command. The first call starts the shell.

        Raises:
            UserError: no sandbox can be started on this machine.
            SandboxError: the shell cannot be started although it could before, or the sandbox is closed.
        """

    def read_text(self, path: str) -> str:
        """A file of the workspace as text. Raises PathError."""

    def write_text(self, path: str, text: str) -> None:
        """Create or replace a file of the workspace, with its folders, atomically. Raises PathError."""

    def list_files(self) -> list[str]:
        """Paths of the files of the workspace, relative to it and sorted; links are listed, not followed."""

    def close(self) -> None:
        """Kill every process of the sandbox and remove its files. May be called twice."""
