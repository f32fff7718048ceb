"""The demo: train from the shipped cold start, evaluate before and after, export, report. Staged and resumable.

``state.json`` in the run folder says which stages are done, how long they took, and with which settings; a demo that
was interrupted goes on with the stage it was in (training from its newest checkpoint), and a finished one only
prints its table. The run folder is an ordinary run folder: ``selfgc-rl eval``, ``export`` and ``report`` take it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from selfgc_envs.errors import UserError
from selfgc_rl.checkpoints import complete_checkpoints
from selfgc_rl.config import Config, load_config
from selfgc_rl.report import ACTIONS, read_steps

# What differs from the defaults of selfgc_rl/config.py; configs/smollm2-cpu.yaml is the same, with comments.
SETTINGS: dict[str, dict[str, Any]] = {
    "model": {"path": "embedded", "adapter": "embedded", "dtype": "float32"},
    "env": {
        "families": ["chain", "bugchain"],
        "level": "nano",
        "pressure": 1.0,
        "window": 1024,
        "max_turns": 10,
        "strategy": "selfgc",
        "on_overflow": "terminate",
    },
    "reward": {"coefficient": 0.3, "threshold": 0.6},
    "rollout": {"groups_per_step": 2, "group_size": 8, "concurrency": 32, "temperature": 1.0, "max_new_tokens": 160},
    "train": {
        "steps": 10,
        "learning_rate": 1.5e-4,
        "attention": "tree",
        "token_budget": 4096,
        "checkpoint_every": 1,
        "keep_checkpoints": 2,
        "seed": 0,
    },
    "server": {"dtype": "float32", "kv_cache_gib": 2.0, "max_num_seqs": 64},
    "eval": {"tasks": 96, "episodes_per_task": 1},
}


def demo_config(overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """The demo's settings as a config. Raises :class:`UserError` for a wrong override."""
    load_config(None, overrides)  # a wrong override is reported on its own
    settings = [
        f"{section}.{key}={json.dumps(value)}" for section, keys in SETTINGS.items() for key, value in keys.items()
    ]
    return load_config(None, [*settings, *overrides])


@dataclass(frozen=True)
class Stage:
    """One stage; ``minutes`` is what it takes on two cores, for the estimate of the time left."""

    name: str
    text: str
    minutes: float


STAGES = (
    Stage("train", "train with GRPO from the shipped cold start", 25.0),
    Stage("evaluate", "evaluate base (the cold start) and trained policy on the same held-out tasks", 14.0),
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
    demo = _Demo(config, run_dir, state, say)
    for number, stage in enumerate(STAGES, 1):
        if stage.name in state.done:
            continue
        head = f"[{number}/{len(STAGES)}] {stage.text}"
        again = " (going on)" if stage.name in state.seconds else ""
        say(f"{head}{again} · about {max(1.0, state.minutes_left()):.0f} min left in all")
        with state.stage(stage.name):
            getattr(demo, stage.name)()
        say(f"[{number}/{len(STAGES)}] done in {state.seconds[stage.name] / 60:.1f} min")
    results: dict[str, Any] = json.loads((run_dir / "results.json").read_text(encoding="utf-8"))
    return results


@dataclass
class _Demo:
    """The stages; each may be called again after an interruption."""

    config: Config
    run_dir: Path
    state: DemoState
    say: Callable[[str], None]

    def train(self) -> None:
        from selfgc_rl.training import train

        later = sum(stage.minutes for stage in STAGES[1:])
        with _step_lines(self.run_dir, self.config.train.steps, later, self.say):
            train(self.config, self.run_dir, resume=True)

    def evaluate(self) -> None:
        from selfgc_rl.before_after import evaluate_before_after

        evaluate_before_after(self.config, self.run_dir / "adapter", self.run_dir / "eval", say=self.say)

    def export(self) -> None:
        from selfgc_rl.export import export_adapter, find_source

        if not (self.run_dir / "export").exists():  # an export that exists is complete
            export_adapter(find_source(self.run_dir), self.run_dir / "export")

    def report(self) -> None:
        from selfgc_rl.report import write_report

        evaluation = json.loads((self.run_dir / "eval" / "results.json").read_text(encoding="utf-8"))
        results = assemble_results(evaluation, read_steps(self.run_dir / "metrics.jsonl"), self.state)
        tmp = self.run_dir / ".results.json.tmp"
        tmp.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        tmp.replace(self.run_dir / "results.json")
        write_report(self.run_dir)


_TRAINING_COLUMNS = (
    *("step", "success", "reward", "penalty", *ACTIONS, "logprob_gap_mean", "logprob_gap_max", "seconds"),
    *("rollout_tok_s", "train_tok_s", "trained_tokens", "sampled_tokens", "peak_rss_mb", "skipped_groups"),
)


def assemble_results(
    evaluation: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], state: DemoState
) -> dict[str, Any]:
    """The demo's ``results.json``: the evaluation's, and what training and the clock recorded.

    Args:
        evaluation: as :func:`selfgc_rl.evaluate.compare` returns it.
        steps: rows of ``metrics.jsonl``; lists in ``training`` have one entry per row.
    """

    def column(name: str) -> list[Any]:
        return [row.get(name) for row in steps]

    return {
        **evaluation,
        "minutes": round(state.minutes, 2),
        "minutes_by_stage": {name: round(seconds / 60, 2) for name, seconds in state.seconds.items()},
        "training": {name: column(name) for name in _TRAINING_COLUMNS},
    }


def step_line(row: Mapping[str, Any], steps: int, minutes_left: float) -> str:
    """One training step in a line: what the policy did, exactness, where the time went, what is left."""

    def number(name: str, form: str) -> str:
        return "-" if row.get(name) is None else format(row[name], form)

    seconds = row.get("seconds") or {}
    split = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
    return (
        f"  step {row['step']}/{steps}: success {number('success', '.2f')}, penalty {number('penalty', '.3f')}, "
        f"folds {number('folds', '.1f')}, drops {number('drops', '.1f')} · log-prob gap "
        f"{number('logprob_gap_mean', '.1e')} (max {number('logprob_gap_max', '.1e')}) · {split} · "
        f"about {max(1.0, minutes_left):.0f} min left in all"
    )


@contextmanager
def _step_lines(run_dir: Path, steps: int, later_minutes: float, say: Callable[[str], None]) -> Iterator[None]:
    """While training runs, print a line for each step that ``metrics.jsonl`` gains."""
    path = run_dir / "metrics.jsonl"
    over = threading.Event()
    # A resumed run first rewrites the file without the steps it will do again: lines before that are old.
    stale = path.stat().st_ino if path.is_file() else None
    done = max((int(p.name.rpartition("-")[2]) for p in complete_checkpoints(run_dir / "checkpoints")), default=0)

    def show(after: int) -> int:
        if not path.is_file() or path.stat().st_ino == stale:
            return after
        rows = read_steps(path)
        for row in rows:
            if row["step"] > after:
                spent = [sum(r["seconds"].values()) for r in rows if r["step"] > done and r.get("seconds")]
                per_step = sum(spent) / max(1, len(spent))
                say(step_line(row, steps, (steps - row["step"]) * per_step / 60 + later_minutes))
                after = row["step"]
        return after

    def watch() -> None:
        shown = done
        while not over.wait(1.0):
            shown = show(shown)
        show(shown)

    thread = threading.Thread(target=watch, name="step-lines", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
