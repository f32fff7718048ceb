"""Keeps the head and the tail of a stream in bounded memory, and counts what it let go."""

from __future__ import annotations


class HeadTail:
    """Collects bytes; keeps at most ``limit`` of them, the first half and the last."""

    def __init__(self, limit: int) -> None:
        self._head_limit = limit - limit // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.elided = 0

    def add(self, data: bytes) -> None:
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        excess = len(self._tail) - self._tail_limit
        if excess > 0:
            del self._tail[:excess]
            self.elided += excess

    def text(self) -> str:
        """What was kept, with a line that says how many bytes are missing where they are missing."""
        if not self.elided:
            return (self._head + self._tail).decode("utf-8", "replace")
        head, tail = (part.decode("utf-8", "replace") for part in (self._head, self._tail))
        return f"{head}\n[… {self.elided:,} bytes elided …]\n{tail}"
