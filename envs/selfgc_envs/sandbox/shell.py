"""One running shell: its process, its pipes, and the host's half of the protocol in ``controller.py``.

Invariants:

* :meth:`Shell.run` returns by its deadline plus ``_KILL_GRACE_S``, whatever the command does;
* it holds at most ``output_bytes`` of output and ``_STATE_LIMIT`` bytes of state;
* a background process delays nothing: output that is in the pipe when the command ends is taken, no end of file is
  waited for.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import select
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from selfgc_envs.errors import SandboxError
from selfgc_envs.sandbox.controller import BOOT, END_OF_STATE, RESET
from selfgc_envs.sandbox.output import HeadTail
from selfgc_envs.sandbox.spawn import spawn

_CHUNK = 1 << 16
_STATE_LIMIT = 1 << 18
_STARTUP_S = 20.0
_FORK_GRACE_S = 5.0  # a shell that cannot even fork by then (a fork bomb fills its processes) is given up
_KILL_GRACE_S = 1.0
_WATCH_S = 0.5  # how often the workspace's size is looked at while a command runs


@dataclass(frozen=True)
class Launch:
    """How a back end starts its shell.

    ``command`` gets the descriptors of pipes the back end may use at start-up, ``args`` to read from and ``info`` to
    write to, and returns the command line in front of bash with what to put into ``args``. ``program`` gets the
    shell-side descriptors (status, state, reap) and returns the controller's program. ``started`` gets what came
    through ``info`` once the shell is ready, and returns the function that kills everything the shell started and
    waits for its end.
    """

    command: Callable[[int, int], tuple[list[str], bytes]]
    program: Callable[[int, int, int], str]
    started: Callable[[subprocess.Popen[bytes], bytes], Callable[[], None]]
    env: dict[str, str]
    cwd: str


class StartError(Exception):
    """The shell did not come up; the text is what it said."""


@dataclass(frozen=True)
class Outcome:
    """What became of one command. ``lost``: the shell did not survive. ``note``: told to the agent, may be empty."""

    exit_code: int | None
    output: HeadTail
    timed_out: bool
    lost: bool
    note: str = ""


class Shell:
    """A started shell. Not thread-safe: its sandbox serialises calls (``kill`` may come from any thread).

    Raises:
        StartError: the shell said no; SandboxError: the machine could not start a process.
    """

    def __init__(self, launch: Launch) -> None:
        self._state = b""
        self._last_exit = 0
        theirs: list[int] = []
        self._ours: list[int] = []
        try:
            for name in ("control", "output", "status", "state", "reap", "args", "info"):
                read, write = os.pipe()
                to_them = name in ("control", "reap", "args")
                self._ours.append(write if to_them else read)
                theirs.append(read if to_them else write)
            control, output, status, state, reap, args, info = theirs
            program = launch.program(status, state, reap).encode()
            argv, arguments = launch.command(args, info)
            os.write(self._ours[0], program)  # both fit into a pipe's buffer
            os.write(self._ours[5], arguments)
            os.close(self._ours.pop(5))
            process = spawn(
                [*argv, "bash", "--norc", "--noprofile", "-c", BOOT % len(program), "bash"],
                stdin=control,
                stdout=output,
                stderr=output,
                pass_fds=(status, state, reap, args, info),
                env=launch.env,
                cwd=launch.cwd,
            )
        except OSError as e:
            self._close_pipes()
            raise SandboxError(f"the sandbox cannot be started: {e}") from e
        finally:
            for fd in theirs:
                os.close(fd)
        for fd in self._ours:
            os.set_blocking(fd, False)
        self._control, self._output, self._status, self._state_pipe, self._reap, info = self._ours
        self._process = process
        self._status_text = b""
        self._kill_lock = threading.Lock()
        self._kill: Callable[[], None] = process.kill
        try:
            self._await_ready()
            self._kill = launch.started(process, _read(info))
            os.close(self._ours.pop())
        except BaseException:
            self.kill()
            self.release()
            raise

    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill everything the shell started; returns when it is gone."""
        with self._kill_lock:
            self._kill()
            self._process.wait()

    def release(self) -> None:
        """Close the pipes, after :meth:`kill`."""
        self._close_pipes()

    def run(self, command: bytes, timeout_s: float, output_bytes: int, full: Callable[[], bool]) -> Outcome:
        """Run one command.

        Args:
            command: bash text without NUL.
            timeout_s: deadline; then the command is killed, and the shell too if it does not answer.
            output_bytes: how much output is kept.
            full: whether the workspace has outgrown its limit; asked while the command runs.
        """
        return _Run(self, command, timeout_s, HeadTail(output_bytes), full).outcome()

    def _await_ready(self) -> None:
        poll = select.poll()
        poll.register(self._status, select.POLLIN)
        if not poll.poll(_STARTUP_S * 1000):
            raise StartError(f"no answer within {_STARTUP_S:.0f} seconds")
        self._status_text = _read(self._status)
        if not self._status_text.startswith(b"ready\n"):
            raise StartError(_read(self._output).decode("utf-8", "replace").strip() or "it ended at once")
        self._status_text = self._status_text[len(b"ready\n") :]

    def _close_pipes(self) -> None:
        while self._ours:
            os.close(self._ours.pop())


class _Run:
    """The conversation about one command."""

    def __init__(
        self, shell: Shell, command: bytes, timeout_s: float, output: HeadTail, full: Callable[[], bool]
    ) -> None:
        self._shell = shell
        self._output = output
        self._full = full
        self._timeout_s = timeout_s
        self._nonce = secrets.token_hex(16).encode()
        state = RESET + shell._state if shell._state else b""
        head = b"%s %d %d %d\n" % (self._nonce, shell._last_exit, len(state), len(command))
        self._unsent = memoryview(head + state + command)
        self._saved = bytearray()
        self._save_overflow = False
        self._pid: bytes | None = None
        self._exit: int | None = None
        self._lost = False

    def outcome(self) -> Outcome:
        shell = self._shell
        _read(shell._state_pipe)  # what a killed command left half-written
        poll = select.poll()
        for fd in (shell._output, shell._status, shell._state_pipe):
            poll.register(fd, select.POLLIN)
        poll.register(shell._control, select.POLLOUT)
        begun = time.monotonic()
        deadline = begun + self._timeout_s
        forked_by = begun + min(_FORK_GRACE_S, self._timeout_s)
        watch_at = begun + _WATCH_S
        stopped = ""  # why the command was killed
        kill_by = 0.0  # when a killed command must have ended, or the shell goes too
        timed_out = False
        while self._exit is None and not self._lost:
            now = time.monotonic()
            if not stopped:
                if now >= watch_at:
                    watch_at = now + _WATCH_S
                    if self._full():
                        stopped = "killed: the workspace takes up more space than it may"
                if now >= deadline or (self._pid is None and now >= forked_by):
                    timed_out = True
                    stopped = "timed out" if self._pid else "the shell cannot start a process"
                if stopped:
                    kill_by = now + _KILL_GRACE_S
                    self._stop()
            elif now >= kill_by:
                self._lost = True
                break
            wake = kill_by if stopped else min(deadline, watch_at, forked_by if self._pid is None else deadline)
            for fd, _event in poll.poll(max(0.0, wake - now) * 1000 + 1):
                if fd == shell._control:
                    self._send(poll)
                elif fd == shell._output:
                    self._output.add(_read(fd, once=True))
                elif fd == shell._state_pipe:
                    self._save(_read(fd, once=True))
                else:
                    self._hear(_read(fd, once=True))
        self._drain()
        note = "" if timed_out and self._pid else stopped
        if not stopped and not self._lost:
            note = self._keep_state()
        return Outcome(None if stopped or self._lost else self._exit, self._output, timed_out, self._lost, note)

    def _send(self, poll: select.poll) -> None:
        try:
            self._unsent = self._unsent[os.write(self._shell._control, self._unsent[:_CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._lost = True
        if self._lost or not self._unsent:
            poll.unregister(self._shell._control)

    def _hear(self, data: bytes) -> None:
        if not data:
            self._lost = True  # the controller is gone
            return
        *lines, rest = (self._shell._status_text + data).split(b"\n")
        self._shell._status_text = rest[-_CHUNK:]
        for line in lines:
            match line.split(b" "):
                case [b"start", self._nonce, pid] if pid.isdigit():
                    self._pid = pid
                case [b"end", self._nonce, code] if code.isdigit():
                    self._exit = int(code)

    def _save(self, data: bytes) -> None:
        self._saved += data
        if len(self._saved) > _STATE_LIMIT:
            self._save_overflow = True
            self._saved.clear()

    def _stop(self) -> None:
        if self._pid is None:
            return
        try:
            os.write(self._shell._reap, self._pid + b"\n")
        except (BlockingIOError, BrokenPipeError):
            pass  # the reaper is gone: the grace runs out and the whole shell goes

    def _drain(self) -> None:
        """Take what is in the pipes now; a background process that goes on writing is not waited for."""
        for fd, take in ((self._shell._output, self._output.add), (self._shell._state_pipe, self._save)):
            waiting: int = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0" * 4))[0]
            while waiting > 0 and (data := _read(fd, once=True)):
                take(data)
                waiting -= len(data)

    def _keep_state(self) -> str:
        self._shell._last_exit = self._exit or 0
        if self._save_overflow:
            return f"the shell's variables exceed {_STATE_LIMIT:,} bytes and were not kept"
        if self._saved.endswith(END_OF_STATE):
            self._shell._state = bytes(self._saved)
        return ""  # without an end the command replaced the shell (exec) or was killed: the old state stands


def _read(fd: int, *, once: bool = False) -> bytes:
    """What can be read from ``fd`` without waiting (at most 1 MiB; ``once``: at most one chunk)."""
    data = b""
    while len(data) < 1 << 20:
        try:
            chunk = os.read(fd, _CHUNK)
        except BlockingIOError:
            break
        data += chunk
        if once or not chunk:
            break
    return data
