"""Where an agent's commands run: a private workspace, limits, and nothing that outlives its owner."""

from __future__ import annotations

from collections.abc import Mapping

from selfgc_envs.errors import UserError
from selfgc_envs.sandbox.protocol import CommandResult, Limits, PathError, Sandbox

__all__ = ["CommandResult", "Limits", "PathError", "Sandbox", "create_sandbox"]


def create_sandbox(
    kind: str, files: Mapping[str, str], executables: frozenset[str] = frozenset(), limits: Limits | None = None
) -> Sandbox:
    """A sandbox whose workspace holds ``files`` (path → text); its shell starts at the first command.

    Args:
        kind: ``bwrap``, or ``none`` to run commands unprotected.
        executables: which of the files get the executable bit.
        limits: default ``Limits()``.

    Raises:
        UserError: unknown kind, or bubblewrap is not installed; PathError: a file's path leads out of the workspace.
    """
    limits = limits or Limits()
    if kind == "bwrap":
        from selfgc_envs.sandbox.bwrap import BwrapSandbox

        return BwrapSandbox(files, executables, limits)
    if kind == "none":
        from selfgc_envs.sandbox.none import NoSandbox

        return NoSandbox(files, executables, limits)
    raise UserError(f"unknown sandbox {kind!r}", "use bwrap, or none to run commands unprotected")
