"""Evaluation: policies on the same held-out tasks with the same seeds, compared task by task.

Each policy's episodes stream into ``<name>.traces.jsonl`` in the output folder, a line as each one ends. An evaluation
that was interrupted plays only what is missing; episodes that failed by infrastructure count as missing. Traces are
used again only under equal settings (environment, sampling, reward, tokenizer, the policy's identity, this package's
version) and for equal task contents; others are refused. The numbers of tasks and of episodes per task are not
settings: an evaluation can be extended.

``results.json`` compares over the tasks that both policies finished, so that the difference of the two policies'
figures is the paired difference. Intervals resample tasks, or are Wilson's where each task is one 0/1 outcome.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from selfgc_envs.coding_env import StopReason
from selfgc_envs.errors import InfrastructureError, UserError
from selfgc_envs.tasks import HELDOUT_SEED_BASE, Task
from selfgc_rl import __version__
from selfgc_rl.config import Config
from selfgc_rl.episode import EnginePolicy, Policy, derive_seed
from selfgc_rl.rollout import Job, heldout_tasks, run_jobs
from selfgc_rl.statistics import Interval, bootstrap_interval, mcnemar_exact, pass_at_k, wilson_interval
from selfgc_rl.tokens import PromptEncoder, tokenizer_fingerprint
from selfgc_rl.traces import TraceWriter, episode_record, read_traces
from selfgc_rl.types import Episode

Record = dict[str, Any]
_COUNTS = ("folds", "drops", "expands", "searches", "auto_folds", "tokens_saved")
_MAX_FAILED_SHARE = 0.1  # of a policy's episodes; above it there is no result


def evaluate_policies(
    config: Config,
    policies: Mapping[str, Policy],
    out_dir: Path,
    *,
    encoder: PromptEncoder,
    identities: Mapping[str, str],
    resume: bool = True,
) -> dict[str, Any]:
    """Play two policies, baseline first, on the held-out tasks and compare them; returns what ``results.json`` holds.

    Args:
        policies: name → policy, normally ``base`` and ``trained``.
        identities: name → what tells the policy from others of that name (a hash of its adapter).
        resume: use the episodes that ``out_dir`` holds; otherwise they are replaced.

    Raises:
        UserError, InfrastructureError: as :func:`play_heldout`.
    """
    baseline, candidate = policies
    for name, policy in policies.items():
        play_heldout(config, name, policy, out_dir, encoder=encoder, identity=identities[name], resume=resume)
    return compare(config, out_dir, baseline, candidate)


def traces_path(out_dir: Path, name: str) -> Path:
    return out_dir / f"{name}.traces.jsonl"


def play_heldout(
    config: Config,
    name: str,
    policy: Policy,
    out_dir: Path,
    *,
    encoder: PromptEncoder,
    identity: str,
    resume: bool = True,
) -> Path:
    """Play a policy on the held-out tasks with a live progress bar; returns the path of its traces.

    Raises:
        UserError: the folder holds traces of other settings, another evaluation writes there, or a task or the
            environment cannot be had as configured.
        InfrastructureError: more than a tenth of the episodes failed. Calling again plays only those.
    """
    if config.eval.tasks < 2:
        raise UserError("eval.tasks=1: one task gives no interval", "set eval.tasks to 2 or more")
    if isinstance(policy, EnginePolicy) and policy.temperature != config.eval.temperature:
        raise ValueError(f"the policy samples at {policy.temperature}, eval.temperature is {config.eval.temperature}")
    tasks = heldout_tasks(config.eval, config.env, encoder)
    hashes = {task.id: task_hash(task) for task in tasks}
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"output folder '{out_dir}' cannot be written: {e.strerror}", "choose another --out") from None
    jobs = heldout_jobs(tasks, config.eval.episodes_per_task)
    path = traces_path(out_dir, name)
    with TraceWriter(path, decisive_settings(config, encoder, identity), resume=resume) as traces:
        kept = _finished(traces.episodes)
        for record in kept.values():
            if hashes.get(record["task_id"], record["task_hash"]) != record["task_hash"]:
                raise UserError(
                    f"the traces in '{path}' were made with another version of task {record['task_id']}",
                    "evaluate into another folder, or delete that file",
                )
        missing = [job for job in jobs if job.episode_id not in kept]
        successes = [kept[job.episode_id]["success"] for job in jobs if job.episode_id in kept]
        failures = _play(config, name, policy, missing, successes, hashes, traces, encoder)
    if len(failures) > _MAX_FAILED_SHARE * len(jobs):
        reason, _ = Counter(failures).most_common(1)[0]
        raise InfrastructureError(
            f"{name}: {len(failures)} of {len(jobs)} episodes failed by infrastructure, most often: {reason}; "
            "evaluate again to play only those"
        )
    return path


def _play(
    config: Config,
    name: str,
    policy: Policy,
    jobs: Sequence[Job],
    successes: list[float],
    hashes: Mapping[str, str],
    traces: TraceWriter,
    encoder: PromptEncoder,
) -> list[str]:
    """Play the jobs into the traces; returns the reasons of those that failed."""
    from tqdm import tqdm

    failures: list[str] = []
    done = len(successes)
    with tqdm(total=done + len(jobs), initial=done, desc=name, unit="ep", file=sys.stderr, dynamic_ncols=True) as bar:

        def on_episode(number: int, episode: Episode) -> None:
            job = jobs[number]
            traces.write(episode_record(episode) | {"seed": job.seed, "task_hash": hashes[job.task.id]})
            if episode.valid:
                successes.append(episode.success)
            else:
                failures.append(episode.error)
            mean = f"{math.fsum(successes) / len(successes):.2f}" if successes else "-"
            bar.set_postfix_str(f"success {mean}" + (f", failed {len(failures)}" if failures else ""), refresh=False)
            bar.update()

        async def play() -> None:
            try:
                await run_jobs(policy, jobs, config=config, encoder=encoder, on_episode=on_episode)
            finally:
                await policy.close()

        if jobs:
            asyncio.run(play())
    return failures


def heldout_jobs(tasks: Sequence[Task], episodes_per_task: int) -> list[Job]:
    """The episodes of an evaluation: the same ids and seeds for every policy."""
    return [
        Job(task, f"{task.id}/{i}", task.id, derive_seed("heldout", task.id, i))
        for task in tasks
        for i in range(episodes_per_task)
    ]


def task_hash(task: Task) -> str:
    """Hash of what the agent gets and what it is graded by."""
    checks = [sorted(check.items()) for check in task.checks]
    parts = (task.instruction, sorted(task.files.items()), sorted(task.executables), checks)
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def decisive_settings(config: Config, encoder: PromptEncoder, identity: str) -> dict[str, Any]:
    """Everything an episode depends on, flat. Concurrency, retries and the number of tasks are not among it."""
    env = {f"env.{key}": value for key, value in config.env.model_dump(mode="json").items()}
    reward = {f"reward.{key}": value for key, value in config.reward.model_dump(mode="json").items()}
    temperature = config.rollout.temperature if config.eval.temperature is None else config.eval.temperature
    return {
        **env,
        **reward,
        "env.families": config.eval.families or config.env.families,
        "env.pressure": config.eval.pressure or config.env.pressure,
        "rollout.temperature": temperature,
        "rollout.max_new_tokens": config.rollout.max_new_tokens,
        "rollout.episode_timeout_s": config.rollout.episode_timeout_s,
        "tokenizer": tokenizer_fingerprint(encoder.tokenizer),
        "policy": identity,
        "selfgc_rl": __version__,
    }


def _finished(episodes: Sequence[Record]) -> dict[str, Record]:
    """The last finished record of each episode id."""
    return {e["episode_id"]: e for e in episodes if e["stop_reason"] != StopReason.INFRASTRUCTURE}


# -- figures ---------------------------------------------------------------------------------------------------------


def compare(config: Config, out_dir: Path, baseline: str, candidate: str) -> dict[str, Any]:
    """Compare two played policies; writes ``results.json`` (atomically) and returns it.

    Raises:
        UserError: the traces are missing or damaged, or the policies were not played under the same settings.
        InfrastructureError: fewer than two tasks were finished by both.
    """
    limit = config.eval.episodes_per_task
    played: dict[str, dict[str, list[Record]]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for name in (baseline, candidate):
        settings[name], episodes = read_traces(traces_path(out_dir, name))
        played[name] = _by_task(_finished(episodes).values(), limit)
    for key, value in settings[baseline].items():
        if key != "policy" and settings[candidate].get(key) != value:
            raise UserError(f"'{baseline}' and '{candidate}' in '{out_dir}' differ in {key}", "evaluate both again")
    seeds = {
        task: int(task.split(":")[2]) - HELDOUT_SEED_BASE for task in played[baseline] if task in played[candidate]
    }
    tasks = sorted((task for task, number in seeds.items() if number < config.eval.tasks), key=seeds.__getitem__)
    if len(tasks) < 2:
        raise InfrastructureError(f"only {len(tasks)} tasks were finished by both policies; evaluate again")
    figures = {name: policy_figures([played[name][task] for task in tasks]) for name in (baseline, candidate)}
    success, penalty = (
        [_mean(e[key] for e in played[candidate][t]) - _mean(e[key] for e in played[baseline][t]) for t in tasks]
        for key in ("success", "penalty")
    )
    gained, lost = sum(d > 0 for d in success), sum(d < 0 for d in success)
    results = {
        "tasks": len(tasks),
        "tasks_unfinished": config.eval.tasks - len(tasks),
        "episodes_per_task": limit,
        "policies": [baseline, candidate],
        baseline: figures[baseline],
        candidate: figures[candidate],
        "paired_difference": _mean(success),
        "ci95": list(bootstrap_interval(success)),
        "tasks_gained": gained,
        "tasks_lost": lost,
        "p_value": mcnemar_exact(gained, lost),
        "penalty_before": figures[baseline]["penalty"],
        "penalty_after": figures[candidate]["penalty"],
        "penalty_difference": _mean(penalty),
        "penalty_ci95": list(bootstrap_interval(penalty)),
        "settings": {name: settings[name] for name in (baseline, candidate)},
    }
    target = out_dir / "results.json"
    temporary = out_dir / ".results.json.tmp"
    temporary.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(target)
    return results


def policy_figures(by_task: Sequence[Sequence[Record]]) -> dict[str, Any]:
    """What one policy did, from each task's finished episodes.

    ``success``, ``penalty`` and ``reward`` are means over tasks of the mean over their episodes. Everything else is
    over episodes (counts per episode) or, in ``budget_by_turn``, over the episodes still running at a turn.
    """
    episodes = [episode for task in by_task for episode in task]
    turns = [turn for episode in episodes for turn in episode["turns"]]

    def total(name: str) -> float:
        return math.fsum(episode["metrics"].get(name, 0.0) for episode in episodes)

    def over_tasks(key: str, group: Sequence[Sequence[Record]] = by_task) -> float:
        return _mean(_mean(episode[key] for episode in task) for task in group)

    calls = total("work_calls") + total("management_calls") + total("invalid_calls")
    families = sorted({episode["family"] for episode in episodes})
    trials = min(len(task) for task in by_task)
    return {
        "success": over_tasks("success"),
        "success_ci95": list(_success_interval(by_task)),
        "success_by_family": {
            family: over_tasks("success", [task for task in by_task if task[0]["family"] == family])
            for family in families
        },
        "pass_at_k": {
            str(k): _mean(pass_at_k(trials, sum(e["success"] >= 1.0 for e in task[:trials]), k) for task in by_task)
            for k in range(1, trials + 1)
        },
        "penalty": over_tasks("penalty"),
        "reward": over_tasks("reward"),
        "episodes": len(episodes),
        **{name: total(name) / len(episodes) for name in _COUNTS},
        "invalid_rate": total("invalid_calls") / calls if calls else None,
        "turns": len(turns) / len(episodes),
        "stop_reasons": dict(sorted(Counter(episode["stop_reason"] for episode in episodes).items())),
        "truncated_replies": _mean(turn["finish_reason"] == "length" for turn in turns),
        "sampled_tokens": math.fsum(turn["sampled_tokens"] for turn in turns) / len(episodes),
        "peak_budget": _mean(max(turn["budget_used"] for turn in episode["turns"]) for episode in episodes),
        "budget_by_turn": _budget_by_turn(episodes),
    }


def _success_interval(by_task: Sequence[Sequence[Record]]) -> Interval:
    values = [_mean(episode["success"] for episode in task) for task in by_task]
    if all(len(task) == 1 for task in by_task) and set(values) <= {0.0, 1.0}:
        return wilson_interval(round(sum(values)), len(values))
    return bootstrap_interval(values)


def _budget_by_turn(episodes: Sequence[Record]) -> list[dict[str, float]]:
    import numpy as np

    columns: dict[int, list[float]] = defaultdict(list)
    for episode in episodes:
        for position, turn in enumerate(episode["turns"]):
            columns[position].append(turn["budget_used"])
    rows = []
    for position in sorted(columns):
        low, mid, high = np.quantile(columns[position], (0.25, 0.5, 0.75))
        rows.append(
            {
                "q25": float(low),
                "median": float(mid),
                "q75": float(high),
                "mean": _mean(columns[position]),
                "episodes": len(columns[position]),
            }
        )
    return rows


def _by_task(episodes: Any, limit: int) -> dict[str, list[Record]]:
    """Task id → its finished episodes, at most ``limit``, by index; tasks that lack one are left out."""
    grouped: dict[str, list[Record]] = defaultdict(list)
    for episode in sorted(episodes, key=lambda e: int(e["episode_id"].rpartition("/")[2])):
        grouped[episode["task_id"]].append(episode)
    return {task: found[:limit] for task, found in grouped.items() if len(found) >= limit}


def _mean(values: Any) -> float:
    items = list(values)
    return math.fsum(items) / len(items)
