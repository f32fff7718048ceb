"""Many episodes at once: groups for training, jobs for evaluation, and which tasks either plays.

Invariants:

* at most ``rollout.concurrency`` episodes are in flight; the environments work in a thread pool of their own size,
  never in asyncio's default one (which has as many threads as the machine has cores, plus four);
* an episode that failed by infrastructure is played again from the same seed, up to ``rollout.retries`` times; what
  still fails is handed back as it is, marked, so that every job has its episode, in order;
* an episode's seed depends on (seed, task, index in its group), a task on (train seed, step, place in the step), a
  held-out task on its number: never on the order of events or on what was played before.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from selfgc_envs.coding_env import StopReason
from selfgc_envs.tasks import HELDOUT_SEED_BASE, Task, make_task
from selfgc_rl.config import Config, EnvConfig, EvalConfig
from selfgc_rl.episode import Policy, derive_seed, run_episode
from selfgc_rl.tokens import PromptEncoder
from selfgc_rl.types import Episode


@dataclass(frozen=True)
class Job:
    """One episode to play."""

    task: Task
    episode_id: str
    group_id: str
    seed: int


def draw_tasks(config: Config, step: int) -> list[tuple[str, int]]:
    """Family and seed of each task of a step (0-based): families in turn, no seed twice in a million tasks."""
    rng = random.Random(f"tasks {config.train.seed}")
    offset = rng.randrange(HELDOUT_SEED_BASE)
    strides = iter(lambda: rng.randrange(HELDOUT_SEED_BASE), None)
    stride = next(s for s in strides if math.gcd(s, HELDOUT_SEED_BASE) == 1)
    first = step * config.rollout.groups_per_step
    families = config.env.families
    return [
        (families[k % len(families)], (offset + k * stride) % HELDOUT_SEED_BASE)
        for k in range(first, first + config.rollout.groups_per_step)
    ]


def heldout_tasks(config: EvalConfig, env: EnvConfig, encoder: PromptEncoder) -> list[Task]:
    """The evaluation's tasks: families in turn, seeds from ``HELDOUT_SEED_BASE`` on, which training never draws.

    The first n tasks of a longer evaluation are the tasks of one with n.
    """
    families = config.families or env.families
    return [
        make_task(
            families[i % len(families)],
            level=env.level,
            seed=HELDOUT_SEED_BASE + i,
            pressure=config.pressure or env.pressure,
            window=env.window,
            token_counter=encoder.count,
        )
        for i in range(config.tasks)
    ]


async def run_jobs(
    policy: Policy,
    jobs: Sequence[Job],
    *,
    config: Config,
    encoder: PromptEncoder,
    on_episode: Callable[[int, Episode], None] | None = None,
) -> list[Episode]:
    """Play all jobs; returns their episodes in the same order.

    Args:
        on_episode: called with the job's number and its final episode (retries used) as soon as it is over.

    Raises:
        UserError: from any episode; the others are cancelled and their environments closed first.
    """
    slots = asyncio.Semaphore(config.rollout.concurrency)
    threads = ThreadPoolExecutor(2 * config.rollout.concurrency, thread_name_prefix="env")

    async def play(number: int, job: Job) -> Episode:
        async with slots:
            for _ in range(config.rollout.retries + 1):
                episode = await run_episode(
                    policy,
                    job.task,
                    config=config,
                    encoder=encoder,
                    episode_id=job.episode_id,
                    group_id=job.group_id,
                    seed=job.seed,
                    executor=threads,
                )
                if episode.stop_reason is not StopReason.INFRASTRUCTURE:
                    break
        if on_episode is not None:
            on_episode(number, episode)
        return episode

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(play(number, job)) for number, job in enumerate(jobs)]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        threads.shutdown(wait=False)
    return [task.result() for task in tasks]


async def run_groups(
    policy: Policy,
    tasks: Sequence[Task],
    *,
    config: Config,
    encoder: PromptEncoder,
    group_size: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[Episode]]:
    """Play each task ``group_size`` times; returns one group per task, in order.

    Args:
        seed: the episodes' seeds derive from it.
        progress: called with (episodes over, episodes in all) after each episode.

    Raises:
        UserError: as :func:`run_jobs`.
    """
    jobs = [
        Job(task, f"{number}:{task.id}/{i}", f"{number}:{task.id}", derive_seed(seed, task.id, i))
        for number, task in enumerate(tasks)
        for i in range(group_size)
    ]
    over = 0

    def count(_: int, __: Episode) -> None:
        nonlocal over
        over += 1
        if progress is not None:
            progress(over, len(jobs))

    episodes = await run_jobs(policy, jobs, config=config, encoder=encoder, on_episode=count)
    return [episodes[first : first + group_size] for first in range(0, len(episodes), group_size)]


__all__ = ["Job", "draw_tasks", "heldout_tasks", "run_groups", "run_jobs"]
