"""Checkpoints on disk: which are complete, and whether a config may go on from one. No torch here.

``checkpoints/checkpoint-N`` holds what ``transformers.Trainer`` writes (adapter, optimizer, scheduler, RNG, its state)
and ``selfgc_state.json`` (step, task cursor, policy version, the config's values that decide the outcome). A folder by
that name was renamed into place when it was complete, so whatever a kill left behind is never mistaken for one.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfgc_envs.errors import UserError
from selfgc_rl.config import Config

if TYPE_CHECKING:
    from peft import PeftModel

STATE_FILE = "selfgc_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")
# Sections whose values do not change what is learned, and single keys of the other sections that do not either.
_FREE_SECTIONS = ("server", "eval", "sft", "tracking")
_FREE_KEYS = frozenset(
    "train.steps train.checkpoint_every train.keep_checkpoints train.threads train.token_budget train.attention "
    "train.gradient_checkpointing rollout.concurrency rollout.episode_timeout_s rollout.retries".split()
)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in ``folder``, oldest first."""
    found = [(int(name[1]), p) for p in folder.glob("checkpoint-*") if (name := _NAME.fullmatch(p.name))]
    return [path for _, path in sorted(found) if (path / STATE_FILE).is_file()]


def finish_checkpoint(staged: Path, home: Path, state: dict[str, Any], *, keep: int) -> None:
    """Mark a staged checkpoint complete, rename it into ``home``, and remove all but the newest ``keep``.

    Args:
        staged: the folder ``checkpoint-N`` that was written inside ``home / ".partial"``.
        state: what a resumed run needs to know; its file is what makes a checkpoint complete.
    """
    (staged / STATE_FILE).write_text(json.dumps(state, indent=1), encoding="utf-8")
    target = home / staged.name
    shutil.rmtree(target, ignore_errors=True)
    staged.rename(target)
    for old in complete_checkpoints(home)[:-keep]:
        doomed = home / ".partial" / "old"
        old.rename(doomed)  # first out of sight: a half-deleted folder must not look like a checkpoint
        shutil.rmtree(doomed)


def decisive_values(config: Config) -> dict[str, Any]:
    """Dotted key -> value of everything that a run must keep to be the same run."""
    values: dict[str, Any] = {}
    for section, keys in config.model_dump(mode="json").items():
        if section not in _FREE_SECTIONS:
            values |= {f"{section}.{k}": v for k, v in keys.items() if f"{section}.{k}" not in _FREE_KEYS}
    return values


def read_state(checkpoint: Path, config: Config) -> dict[str, Any]:
    """The state of a checkpoint, after checking that ``config`` may go on from it.

    Raises:
        UserError: the state cannot be read, or a value that decides the outcome differs.
    """
    try:
        state: dict[str, Any] = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        stored = state["config"]
        int(state["step"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(
            f"checkpoint '{checkpoint}' cannot be read ({e!r})", "remove it to go on from an earlier one"
        ) from None
    for key, value in decisive_values(config).items():
        if key in stored and stored[key] != value:
            raise UserError(
                f"'{checkpoint}' was made with {key}={stored[key]!r}, this config has {value!r}",
                f"set {key}={stored[key]!r}, or start another run with model.adapter={checkpoint}",
            )
    return state


def save_adapter(policy: PeftModel, folder: Path) -> Path:
    """Write the policy's LoRA adapter (float32) as ``folder``: all of it or nothing. Replaces an older one."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    policy.save_pretrained(str(temporary), selected_adapters=["default"], save_embedding_layers=False)
    (temporary / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    return folder
