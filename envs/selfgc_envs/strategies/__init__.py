"""Context strategies by name. To add one: a file with ``make(options) -> Strategy`` and a line in ``_MAKERS``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from selfgc_envs.errors import UserError
from selfgc_envs.strategies import none, selfgc
from selfgc_envs.strategies.base import Strategy

_MAKERS = {"selfgc": selfgc.make, "none": none.make}
STRATEGIES = tuple(_MAKERS)


def make_strategy(name: str, options: Mapping[str, Any] | None = None) -> Strategy:
    """Build a strategy. Raises :class:`UserError` for an unknown name or option."""
    if name not in _MAKERS:
        raise UserError(f"unknown strategy '{name}'", f"one of {', '.join(_MAKERS)}")
    return _MAKERS[name](options or {})


__all__ = ["STRATEGIES", "Strategy", "make_strategy"]
