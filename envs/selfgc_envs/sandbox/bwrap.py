"""The default back end: a bash inside bubblewrap.

Commands see a system that is read-only, a private /tmp, /dev/shm and /proc, no network, and the workspace at
``/workspace``. Everything runs in one PID namespace whose first process dies with this one, so nothing outlives it.

Who the commands are: without privileges, ourselves in a fresh user namespace. As root (common in containers of CI
and training machines) a user namespace would leave them root to the kernel, which exempts root from the limit on
processes; so each sandbox is then given a user id of its own, without capabilities. (Root that lacks the capability
to do so, in a container that allows user namespaces, gets the user namespace and no limit on processes.)
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from selfgc_envs.errors import SandboxError, UserError
from selfgc_envs.sandbox.base import ShellSandbox
from selfgc_envs.sandbox.controller import controller_program
from selfgc_envs.sandbox.protocol import Limits
from selfgc_envs.sandbox.shell import Launch, Shell, StartError
from selfgc_envs.sandbox.workspace import MOUNT

_SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "nsswitch.conf")
_CAP_SETGID, _CAP_SETUID, _CAP_SYS_ADMIN = 6, 7, 21
_FIRST_UID, _UIDS = 0x7000_0000, 0x0F00_0000  # far from any account
_uids = itertools.count(random.SystemRandom().randrange(_UIDS))

_has_worked = False  # a sandbox was started by this process before


class BwrapSandbox(ShellSandbox):
    """Raises UserError at once when bubblewrap is missing, at the first ``run`` when the kernel refuses it."""

    def __init__(self, files: Mapping[str, str], executables: frozenset[str], limits: Limits) -> None:
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise UserError(
                "bubblewrap (bwrap) is not installed: commands cannot be run in a sandbox",
                "sudo apt-get install bubblewrap, or --sandbox none to run commands unprotected",
            )
        self._bwrap = bwrap
        self._uid = _FIRST_UID + next(_uids) % _UIDS if _is_privileged() else None
        super().__init__(files, executables, limits, owner=self._uid)

    def _start(self) -> Shell:
        global _has_worked
        env = {"PATH": os.environ.get("PATH", os.defpath)}  # for bwrap itself; the shell's is --setenv's
        try:
            shell = Shell(Launch(self._command, self._program, _started, env=env, cwd="/"))
        except StartError as e:
            if _has_worked:
                raise SandboxError(f"bubblewrap could not start again: {e}") from e
            raise UserError(
                f"bubblewrap cannot make a sandbox on this machine: {e}",
                "allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1,"
                " kernel.apparmor_restrict_unprivileged_userns=0; in a container: --security-opt seccomp=unconfined),"
                " or --sandbox none to run commands unprotected",
            ) from e
        _has_worked = True
        return shell

    def _command(self, args: int, info: int) -> tuple[list[str], bytes]:
        disk = str(self._limits.disk_mb << 20)
        argv = ["--die-with-parent", "--new-session", "--info-fd", str(info)]
        argv += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        argv += ["--cap-drop", "ALL"]
        if self._uid is None:
            argv += ["--unshare-user", *_no_more_namespaces(self._bwrap)]
        else:
            argv += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        argv += _system_mounts()
        argv += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", disk, "--tmpfs", "/dev/shm"]
        argv += ["--perms", "1777", "--size", disk, "--tmpfs", "/tmp"]
        argv += ["--ro-bind", "/proc/sys", "/proc/sys"]  # root in a user namespace may write the kernel's settings
        argv += ["--bind", str(self.workspace), MOUNT, "--remount-ro", "/dev", "--remount-ro", "/"]
        argv += ["--chdir", MOUNT, "--hostname", "sandbox", "--clearenv"]
        for name, value in {"PATH": _path(), "HOME": MOUNT, "LANG": "C.UTF-8", "TERM": "dumb"}.items():
            argv += ["--setenv", name, value]
        become: list[str] = []
        if self._uid is not None:
            uid = str(self._uid)
            become = ["setpriv", "--reuid", uid, "--regid", uid, "--clear-groups"]
            become += ["--inh-caps=-all", "--bounding-set=-all"]
        return [self._bwrap, "--args", str(args), "--", *become], "\0".join([*argv, ""]).encode()

    def _program(self, status: int, state: int, reap: int) -> str:
        limits = self._limits
        return controller_program(
            status=status,
            state=state,
            reap=reap,
            limits=(
                f"ulimit -c 0; ulimit -v {limits.memory_mb << 10}; ulimit -f {limits.file_mb << 10};"
                f" ulimit -u {limits.processes}"
            ),
            child_limits=f"ulimit -t {limits.cpu_s}",
        )


def _started(process: subprocess.Popen[bytes], info: bytes) -> Callable[[], None]:
    """Killing the namespace's first process makes the kernel kill the others, and bwrap ends after them all."""
    first = os.pidfd_open(json.loads(info)["child-pid"])

    def kill() -> None:
        nonlocal first
        if first < 0:
            return
        try:
            signal.pidfd_send_signal(first, signal.SIGKILL)
        except ProcessLookupError:
            pass
        os.close(first)
        first = -1
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()

    return kill


@functools.cache
def _is_privileged() -> bool:
    """Whether we are root with the capabilities to make namespaces and to change user ids."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return False
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            effective = int(line.split()[1], 16)
            return all(effective >> bit & 1 for bit in (_CAP_SETGID, _CAP_SETUID, _CAP_SYS_ADMIN))
    return False


@functools.cache
def _no_more_namespaces(bwrap: str) -> tuple[str, ...]:
    """Forbid user namespaces inside the sandbox, where bubblewrap can (0.8 and later)."""
    shown = subprocess.run([bwrap, "--help"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return ("--disable-userns",) if "--disable-userns" in shown.stdout + shown.stderr else ()


@functools.cache
def _python_prefixes() -> tuple[str, ...]:
    """Folders of this Python's installation, as named and as resolved, unless they are part of /usr anyway."""
    named = os.path.abspath(sys.base_prefix)
    prefixes = dict.fromkeys((named, os.path.realpath(named)))
    return tuple(p for p in prefixes if p not in ("/", "/usr") and not p.startswith("/usr/"))


def _path() -> str:
    return ":".join([*(f"{p}/bin" for p in _python_prefixes()), "/usr/local/bin", "/usr/bin", "/bin"])


@functools.cache
def _system_mounts() -> tuple[str, ...]:
    """The part of the system that commands may read."""
    argv = ["--ro-bind", "/usr", "/usr"]
    for folder in _SYSTEM_FOLDERS:
        if os.path.islink(folder):
            argv += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            argv += ["--ro-bind", folder, folder]
    argv += _open_parents("/etc/passwd")
    for name in _ETC:
        argv += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for prefix in _python_prefixes():
        argv += [*_open_parents(prefix), "--ro-bind", prefix, prefix]
    return tuple(argv)


def _open_parents(path: str) -> list[str]:
    """Make the folders above a mount point ones that anybody may enter (bubblewrap would copy what is outside)."""
    parents = [str(p) for p in reversed(Path(path).parents) if str(p) != "/"]
    return [word for parent in parents for word in ("--perms", "0755", "--dir", parent)]
