"""The workspace's files, handled from the trusted side.

The agent owns the workspace and may put anything there: links that lead out, pipes, devices' names, a tree a
thousand folders deep, a file of a gigabyte, and may change it while we look. So:

* a path is walked one component at a time from the workspace's own descriptor, and no link is ever followed;
* only regular files are read, opened without blocking, and at most ``max_bytes`` of them;
* a file is replaced by a rename, so that a reader sees the old text or the new one.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path

from selfgc_envs.errors import SandboxError
from selfgc_envs.sandbox.protocol import PathError

MOUNT = "/workspace"  # where commands see the workspace
MAX_DEPTH = 64  # components of a path
MAX_LISTED = 2_000  # files named by list_files
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_REASONS = {
    errno.ENOENT: "no such file or folder",
    errno.ENOTDIR: "one of its folders is a file or a symbolic link",
    errno.EISDIR: "it is a folder",
    errno.ELOOP: "it is a symbolic link (links are not followed here; use run_bash)",
    errno.ENAMETOOLONG: "the name is too long",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ENXIO: "it is not a regular file",
}
_OUR_FAULT = {errno.ENOSPC, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EROFS}


class Workspace:
    """The folder ``root``, which must exist.

    Args:
        owner: user id that new files are given; None keeps this process's own.
        max_bytes: largest file read or written.
        disk_bytes: what all files together may take up.
    """

    def __init__(self, root: Path, *, owner: int | None, max_bytes: int, disk_bytes: int) -> None:
        self.root = root
        self._owner = owner
        self._max_bytes = max_bytes
        self._disk_bytes = disk_bytes
        if owner is not None:
            os.chown(root, owner, owner)

    def read_text(self, path: str) -> str:
        parts = self._parts(path)
        with _explained(path):
            folder = self._open_folder(parts[:-1])
            try:
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                fd = os.open(parts[-1], flags, dir_fd=folder)
            finally:
                os.close(folder)
            with open(fd, "rb") as file:
                info = os.fstat(fd)
                if not stat.S_ISREG(info.st_mode):
                    raise OSError(errno.EISDIR if stat.S_ISDIR(info.st_mode) else errno.ENXIO, "")
                data = file.read(self._max_bytes + 1) if info.st_size <= self._max_bytes else b""
        if max(info.st_size, len(data)) > self._max_bytes:
            raise PathError(
                f"{path}: too large to read at once ({max(info.st_size, len(data)):,} bytes, limit"
                f" {self._max_bytes:,}); use head, tail, sed or grep in run_bash"
            )
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as e:
            raise PathError(f"{path}: not a UTF-8 text file (byte {e.start})") from None

    def write_text(self, path: str, text: str, *, executable: bool = False) -> None:
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as e:
            raise PathError(f"{path}: the text has a character that UTF-8 cannot hold (position {e.start})") from None
        if len(data) > self._max_bytes:
            raise PathError(f"{path}: {len(data):,} bytes are more than the limit of {self._max_bytes:,}")
        parts = self._parts(path)
        temporary = f".{secrets.token_hex(8)}.part"
        with _explained(path):
            folder = self._open_folder(parts[:-1], create=True)
            try:
                mode = self._mode_of_replaced(parts[-1], folder)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                fd = os.open(temporary, flags, 0o600, dir_fd=folder)
                try:
                    with open(fd, "wb") as file:
                        file.write(data)
                        if self._owner is not None:
                            os.fchown(fd, self._owner, self._owner)
                        os.fchmod(fd, mode | 0o111 if executable else mode)
                    os.rename(temporary, parts[-1], src_dir_fd=folder, dst_dir_fd=folder)
                except OSError:
                    os.unlink(temporary, dir_fd=folder)
                    raise
            finally:
                os.close(folder)

    def list_files(self) -> list[str]:
        found: list[str] = []
        folders: list[tuple[str, ...]] = [()]
        while folders and len(found) <= MAX_LISTED:
            parts = folders.pop()
            try:
                fd = self._open_folder(parts)
            except OSError:
                continue  # removed, replaced by a link or made unreadable since it was listed
            try:
                with os.scandir(fd) as entries:
                    for entry in entries:
                        here = (*parts, entry.name)
                        if not entry.is_dir(follow_symlinks=False):
                            found.append("/".join(here))
                        elif len(here) < MAX_DEPTH:
                            folders.append(here)
                        if len(found) > MAX_LISTED:
                            break
            finally:
                os.close(fd)
        names = sorted(os.fsencode(name).decode("utf-8", "replace") for name in found[:MAX_LISTED])
        return [*names, f"(more than {MAX_LISTED:,} files; use find in run_bash)"] if len(found) > MAX_LISTED else names

    def full(self) -> bool:
        """Whether the files take up more than they may. Stops counting as soon as that is known."""
        used, seen, folders = 0, 0, [os.fspath(self.root)]
        while folders:
            try:
                with os.scandir(folders.pop()) as entries:
                    for entry in entries:
                        used += entry.stat(follow_symlinks=False).st_blocks * 512
                        seen += 1
                        if used > self._disk_bytes or seen > 100_000:
                            return True
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
            except OSError:
                continue
        return False

    def _parts(self, path: str) -> list[str]:
        """Components of ``path`` below the workspace; ``..`` is resolved by name, never through the disk."""
        if not isinstance(path, str) or not path.strip():
            raise PathError("the path is empty")
        if "\0" in path:
            raise PathError("the path contains a NUL character")
        try:
            path.encode("utf-8")
        except UnicodeEncodeError:
            raise PathError("the path has a character that UTF-8 cannot hold") from None
        inside = path
        for prefix in (MOUNT, os.fspath(self.root)):
            if path == prefix or path.startswith(prefix + "/"):
                inside = path[len(prefix) :].lstrip("/")
                break
        else:
            if path.startswith("/"):
                raise PathError(f"{path}: outside the workspace; give a path relative to it")
        parts: list[str] = []
        for part in inside.split("/"):
            if part == "..":
                if not parts:
                    raise PathError(f"{path}: outside the workspace; give a path relative to it")
                parts.pop()
            elif part not in ("", "."):
                parts.append(part)
        if not parts or path.endswith("/"):
            raise PathError(f"{path}: it is a folder; name a file")
        if len(parts) > MAX_DEPTH:
            raise PathError(f"{path[:80]}…: more than {MAX_DEPTH} folders deep")
        return parts

    def _open_folder(self, parts: list[str] | tuple[str, ...], *, create: bool = False) -> int:
        fd = os.open(self.root, _FOLDER)
        try:
            for part in parts:
                try:
                    inner = os.open(part, _FOLDER, dir_fd=fd)
                except FileNotFoundError:
                    if not create:
                        raise
                    os.mkdir(part, 0o755, dir_fd=fd)
                    if self._owner is not None:
                        os.chown(part, self._owner, self._owner, dir_fd=fd, follow_symlinks=False)
                    inner = os.open(part, _FOLDER, dir_fd=fd)
                os.close(fd)
                fd = inner
        except BaseException:
            os.close(fd)
            raise
        return fd

    @staticmethod
    def _mode_of_replaced(name: str, folder: int) -> int:
        try:
            mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return 0o644
        if stat.S_ISLNK(mode):
            raise OSError(errno.ELOOP, "")
        if not stat.S_ISREG(mode):
            raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.ENXIO, "")
        return mode & 0o777  # never set-user-id


class _explained:  # noqa: N801 (reads as a statement)
    """Turns an OSError of the block into a PathError for the agent, or a SandboxError if the machine is at fault."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            if error.errno in _OUR_FAULT:
                raise SandboxError(f"the workspace cannot be used: {error.strerror}") from error
            reason = _REASONS.get(error.errno or 0, os.strerror(error.errno or 0))
            raise PathError(f"{self._path[:200]}: {reason}") from None
