"""ShellSandbox: what the back ends share. A temporary folder, a workspace in it, a shell that starts when needed."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping

from selfgc_envs.errors import SandboxError
from selfgc_envs.sandbox.home import Home
from selfgc_envs.sandbox.protocol import CommandResult, Limits
from selfgc_envs.sandbox.shell import Shell
from selfgc_envs.sandbox.workspace import Workspace


class ShellSandbox(ABC):
    """A workspace on this machine and a bash that works in it; a back end says how that bash is started.

    Args:
        files: path → text of the files at the start; those in ``executables`` get the executable bit.
        limits: what commands may use.
        owner: user id the workspace belongs to; None: this process's own.
    """

    def __init__(
        self, files: Mapping[str, str], executables: frozenset[str], limits: Limits, owner: int | None = None
    ) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._closed = False
        self._shell: Shell | None = None
        self._home = Home()
        try:
            self.workspace = self._home.path / "workspace"
            self.workspace.mkdir()
            self._files = Workspace(
                self.workspace,
                owner=owner,
                max_bytes=limits.file_mb << 20,
                disk_bytes=limits.disk_mb << 20,
            )
            for path, text in files.items():
                self._files.write_text(path, text, executable=path in executables)
        except BaseException:
            self._home.remove()
            raise

    @abstractmethod
    def _start(self) -> Shell:
        """Start the shell. Raises UserError if this machine cannot, SandboxError if it just did not."""

    def run(self, cmd: str, timeout_s: float | None = None) -> CommandResult:
        if "\0" in cmd:
            return CommandResult(2, "bash: the command contains a NUL character\n")
        with self._lock:
            if self._closed:
                raise SandboxError("the sandbox is closed")
            restarted = False
            if self._shell is not None and not self._shell.alive():
                self._lose_shell()
                restarted = True
            if self._shell is None:
                self._shell = self._start()
            limits = self._limits
            out = self._shell.run(
                cmd.encode("utf-8", "replace"),
                limits.command_timeout_s if timeout_s is None else timeout_s,
                limits.output_bytes,
                self._files.full,
            )
            if out.lost:
                self._lose_shell()
        text = out.output.text()
        if out.note:
            text += f"{'' if not text or text.endswith(chr(10)) else chr(10)}[{out.note}]\n"
        return CommandResult(out.exit_code, text, out.timed_out, out.output.elided, restarted or out.lost)

    def read_text(self, path: str) -> str:
        return self._files.read_text(path)

    def write_text(self, path: str, text: str) -> None:
        self._files.write_text(path, text)

    def list_files(self) -> list[str]:
        return self._files.list_files()

    def close(self) -> None:
        self._closed = True
        shell = self._shell
        if shell is not None:
            shell.kill()  # ends a command that runs in another thread
        with self._lock:
            if self._shell is not None:
                self._lose_shell()
            self._home.remove()

    def _lose_shell(self) -> None:
        assert self._shell is not None
        self._shell.kill()
        self._shell.release()
        self._shell = None
