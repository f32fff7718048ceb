"""``none``: the flat transcript. Nothing is ever folded or dropped; the budget is still shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from selfgc_envs.strategies.base import Strategy, take_options


def make(options: Mapping[str, Any]) -> Strategy:
    take_options("none", options, {})
    return Strategy(name="none")
