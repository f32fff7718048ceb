"""Random names and realistic filler. All drawn from a ``random.Random``: the same seed gives the same bytes."""

from __future__ import annotations

import random
from collections.abc import Callable

_ONSETS = ("b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z")
_VOWELS = ("a", "e", "i", "o", "u")


class Names:
    """Distinct pronounceable names of two or three syllables."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._seen: set[str] = set()

    def __call__(self, syllables: int = 2) -> str:
        while True:
            name = "".join(self._rng.choice(_ONSETS) + self._rng.choice(_VOWELS) for _ in range(syllables))
            if name not in self._seen:
                self._seen.add(name)
                return name


_LOG_LINES = (
    "worker {n} is idle",
    "cache {n} is warm, {d} entries",
    "queue {n} holds {d} jobs",
    "link to {n} is up",
    "retry of {n} was not needed",
    "disk {n} is {d} percent full",
    "shard {n} is in sync",
    "policy {n} is unchanged",
    "socket {n} was closed by the peer",
    "timer {n} fired after {d} ms",
    "module {n} was loaded",
    "index {n} was rebuilt in {d} ms",
    "lease {n} was renewed",
    "peer {n} sent a heartbeat",
    "snapshot {n} was skipped",
    "metric {n} is within its limits",
)


def log_line(rng: random.Random, names: Names) -> str:
    """One line of plausible, useless output; it names things that look like the words that matter."""
    return rng.choice(_LOG_LINES).format(n=names(), d=rng.randrange(2, 99))


def fill(
    lines: list[str], tokens: float, rng: random.Random, names: Names, count: Callable[[str], int], *, first: int = 1
) -> str:
    """Insert log lines at random places after line ``first`` until the text has about ``tokens`` tokens."""
    lines = list(lines)
    have = count("\n".join(lines))
    while have < tokens:
        line = log_line(rng, names)
        lines.insert(rng.randint(first, len(lines)), line)
        have += count(line) + 1
    return "\n".join(lines)
