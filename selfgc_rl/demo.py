"""The demo: train from the shipped cold start, evaluate before and after, export, report. Staged and resumable.

``state.json`` in the run folder says which stages are done, how long they took, and with which settings; a demo that
was interrupted goes on with the stage it was in (training from its newest checkpoint), and a finished one only
prints its table. The run folder is an ordinary run folder: ``selfgc-rl eval``, ``export`` and ``report`` take it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from selfgc_envs.errors import UserError
from selfgc_rl.config import Config, parse_config

# What differs from the defaults of selfgc_rl/config.py; configs/smollm2-cpu.yaml is the same, with comments.
SETTINGS: dict[str, dict[str, Any]] = {
    "model": {"path": "embedded", "adapter": "embedded", "dtype": "float32"},
    "env": {
        "families": ["chain", "bugchain"],
        "level": "nano",
        "pressure": 1.2,
        "window": 1024,
        "max_turns": 14,
        "strategy": "selfgc",
        "on_overflow": "terminate",
    },
    "reward": {"coefficient": 0.3, "threshold": 0.6},
    "rollout": {"groups_per_step": 4, "group_size": 8, "concurrency": 32, "temperature": 1.0, "max_new_tokens": 160},
    "train": {
        "steps": 8,
        "learning_rate": 3e-4,
        "attention": "tree",
        "token_budget": 8192,
        "checkpoint_every": 1,
        "keep_checkpoints": 2,
        "seed": 0,
    },
    "server": {"dtype": "float32", "kv_cache_gib": 2.0, "max_num_seqs": 64},
    "eval": {"tasks": 64, "episodes_per_task": 1},
}


def demo_config() -> Config:
    """The demo's settings as a config."""
    return parse_config(SETTINGS, "demo settings")


@dataclass(frozen=True)
class Stage:
    """One stage; ``minutes`` is what it takes on two cores, for the estimate of the time left."""

    name: str
    text: str
    minutes: float


STAGES = (
    Stage("train", "train with GRPO from the shipped cold start", 18.0),
    Stage("evaluate_base", "evaluate the base policy (the cold start) on held-out tasks", 4.5),
    Stage("evaluate_trained", "evaluate the trained policy on the same tasks and seeds", 4.5),
    Stage("export", "export the trained adapter", 0.3),
    Stage("report", "results and report", 0.1),
)


@dataclass
class DemoState:
    """Which stages are done. ``seconds`` counts the time spent in a stage, over all its attempts."""

    path: Path
    config: dict[str, Any]
    done: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def open(cls, run_dir: Path, config: Config) -> DemoState:
        """The state in ``run_dir``, or a new one.

        Raises:
            UserError: the folder is something else's, the state is damaged, or it was begun with other settings.
        """
        path, settings = run_dir / "state.json", config.model_dump(mode="json")
        if not path.is_file():
            if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
                raise UserError(f"'{run_dir}' is no demo's run folder", "choose another --run, or --fresh")
            return cls(path, settings)
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            state = cls(path, tree["config"], list(tree["done"]), dict(tree["seconds"]))
        except (ValueError, KeyError, TypeError) as e:
            raise UserError(f"'{path}' is damaged ({e!r})", "start over with --fresh") from None
        if state.config != settings:
            raise UserError(f"the demo in '{run_dir}' was begun with other settings", "start over with --fresh")
        return state

    @property
    def finished(self) -> bool:
        return all(stage.name in self.done for stage in STAGES)

    @property
    def minutes(self) -> float:
        return sum(self.seconds.values()) / 60

    def minutes_left(self) -> float:
        """Planned minutes of what is not done, less what an interrupted stage has already had (at most 80 % of it)."""
        left = 0.0
        for stage in STAGES:
            if stage.name not in self.done:
                left += max(0.2 * stage.minutes, stage.minutes - self.seconds.get(stage.name, 0.0) / 60)
        return left

    def save(self) -> None:
        tmp = self.path.with_suffix(".tmp")
        tree = {"config": self.config, "done": self.done, "seconds": self.seconds}
        tmp.write_text(json.dumps(tree, indent=1), encoding="utf-8")
        tmp.replace(self.path)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage and mark it done when it ends well; an interrupted one keeps its time."""
        began = time.monotonic()
        try:
            yield
            self.done.append(name)
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began
            self.save()


def set_aside(run_dir: Path) -> Path | None:
    """Move an old run folder out of the way; returns where to, or None if there was none."""
    if not run_dir.exists():
        return None
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return run_dir.rename(run_dir.with_name(f"{run_dir.name}-before-{stamp}"))


def run_demo(config: Config, run_dir: Path, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Run what is not done yet; returns the results (also in ``results.json``).

    Args:
        say: prints one line for the user.

    Raises:
        UserError, InfrastructureError: as the stages do; calling again goes on where it stopped.
    """
    state = DemoState.open(run_dir, config)
    run_dir.mkdir(parents=True, exist_ok=True)
    state.save()
    for number, stage in enumerate(STAGES, 1):
        if stage.name in state.done:
            continue
        again = " (going on)" if state.seconds.get(stage.name) else ""
        say(f"[{number}/{len(STAGES)}] {stage.text}{again} · about {max(1, round(state.minutes_left()))} min left in all")
        with state.stage(stage.name):
            _RUN[stage.name](config, run_dir, state)
        say(f"[{number}/{len(STAGES)}] done in {state.seconds[stage.name] / 60:.1f} min")
    return read_results(run_dir)
