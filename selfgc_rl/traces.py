"""traces.jsonl: what the episodes of one policy did, one line each, readable by people and by programs.

Line 1 is the header: a format number and the settings under which the episodes were played. Each further line is an
episode. Lines are appended whole and flushed to disk, so a writer that was killed leaves at most a half-written last
line, which is dropped when the file is opened again; damage anywhere else is refused, naming the line. An episode
played again (after an infrastructure failure) stands in a later line, which counts. One writer at a time.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from selfgc_envs.errors import UserError
from selfgc_rl.types import Episode, Turn

FORMAT = 1


def episode_record(episode: Episode) -> dict[str, Any]:
    """An episode as one JSON object. Token ids stay out: traces are for reading, training never comes back to them."""
    return {
        "episode_id": episode.episode_id,
        "group_id": episode.group_id,
        "task_id": episode.task_id,
        "family": episode.family,
        "pressure": episode.pressure,
        "window": episode.window,
        "success": episode.success,
        "stop_reason": str(episode.stop_reason),
        "error": episode.error,
        "penalty": episode.penalty,
        "reward": episode.reward,
        "metrics": episode.metrics,
        "seconds": round(episode.seconds, 3),
        "policy_versions": sorted({turn.sample.policy_version for turn in episode.turns}),
        "turns": [_turn_record(turn) for turn in episode.turns],
    }


def _turn_record(turn: Turn) -> dict[str, Any]:
    record = {
        "turn": turn.index,
        "budget_used": round(turn.budget_used, 6),
        "prompt_tokens": len(turn.sample.prompt_ids),
        "sampled_tokens": len(turn.sample.sampled_ids),
        "finish_reason": turn.sample.finish_reason,
        "text": turn.sample.text,
        "events": list(turn.events),
        "ledger": list(turn.ledger),
    }
    return record | ({"messages": list(turn.messages)} if turn.messages else {})


def read_traces(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The settings and the episodes of a traces file, a half-written last line left out.

    Raises:
        UserError: no such file, not a traces file, or a damaged line.
    """
    try:
        data = path.read_bytes()
    except OSError as e:
        raise UserError(f"traces '{path}' cannot be read: {e.strerror}", "evaluate first") from None
    settings, episodes, _ = _parse(path, data)
    return settings, episodes


def _parse(path: Path, data: bytes) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    """Settings, episodes, and the number of bytes in whole lines."""
    lines = data.split(b"\n")
    lines.pop()  # after the last line break: nothing, or what a killed writer left
    parsed: list[dict[str, Any]] = []
    size = 0
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
            if not isinstance(value, dict) or (number > 1 and not {"episode_id", "turns"} <= value.keys()):
                raise ValueError("no episode")
        except ValueError as e:  # bad UTF-8 included
            if number == len(lines) and number > 1:
                break
            remove = f", or remove that line: sed -i {number}d '{path}'" if number > 1 else ""
            raise UserError(
                f"traces '{path}': line {number} is damaged ({e})", f"evaluate into another folder{remove}"
            ) from None
        parsed.append(value)
        size += len(line) + 1
    if not parsed or parsed[0].get("format") != FORMAT or not isinstance(parsed[0].get("settings"), dict):
        raise UserError(f"'{path}' is no traces file of format {FORMAT}", "evaluate into another folder")
    return parsed[0]["settings"], parsed[1:], size


class TraceWriter:
    """Appends episodes to a traces file, new or begun before. A context manager; :attr:`episodes` holds what was there.

    Args:
        path: the file; its folder exists.
        settings: flat name → value of everything that the episodes depend on.
        resume: go on with the episodes that are there; otherwise they are replaced.

    Raises:
        UserError: another process writes this file, it was begun under other settings, or it is damaged.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, resume: bool = True) -> None:
        self.path = path
        self.episodes: list[dict[str, Any]] = []
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._begin(json.loads(json.dumps(settings)), resume)
        except BaseException:
            os.close(self._fd)
            raise

    def _begin(self, settings: dict[str, Any], resume: bool) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another evaluation is writing '{self.path}'", "wait for it, or use another folder"
            ) from None
        data = self.path.read_bytes()
        if not resume or b"\n" not in data:  # at most a half-written header
            os.ftruncate(self._fd, 0)
            self._append({"format": FORMAT, "settings": settings})
            return
        found, self.episodes, size = _parse(self.path, data)
        if found != settings:
            name = min(k for k in found.keys() | settings.keys() if found.get(k) != settings.get(k))
            raise UserError(
                f"the traces in '{self.path}' were made under other settings: {name} was {found.get(name)!r}, "
                f"is {settings.get(name)!r}",
                "evaluate into another folder, or delete that file",
            )
        os.ftruncate(self._fd, size)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one episode; on disk when this returns. Raises OSError (disk full) with nothing half-written kept."""
        self._append(record)

    def _append(self, value: Mapping[str, Any]) -> None:
        # ASCII escapes keep lone surrogates (a sandbox may print any bytes) and line separators out of the file.
        left = memoryview((json.dumps(value, allow_nan=False, default=str) + "\n").encode("ascii"))
        end = os.lseek(self._fd, 0, os.SEEK_END)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:
            os.ftruncate(self._fd, end)
            raise
        os.fsync(self._fd)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)
