"""Groups of episodes: order, concurrency, retries; and which tasks are played. Real environment and sandbox."""

import asyncio
import threading
import time

import pytest

from selfgc_envs.coding_env import CodingEnv, StopReason
from selfgc_envs.errors import SandboxError, UserError
from selfgc_envs.tasks import HELDOUT_SEED_BASE, make_task
from selfgc_rl import episode
from selfgc_rl.advantages import group_advantages
from selfgc_rl.episode import derive_seed
from selfgc_rl.rollout import draw_tasks, heldout_tasks, run_groups
from test_episode import ENCODER, SUBMIT, Says, forever, make_config, run, task


def play(policy, tasks, group_size=2, **more):
    config = more.pop("config", None) or make_config()
    return asyncio.run(
        run_groups(
            policy, tasks, config=config, encoder=ENCODER, group_size=group_size, seed=more.pop("seed", 0), **more
        )
    )


class Counts(Says):
    """Submits at once, after a pause; counts how many episodes act at the same time, and keeps the seeds."""

    def __init__(self, pause=0.3):
        super().__init__(SUBMIT)
        self.pause, self.now, self.most, self.seeds = pause, 0, 0, []

    async def act(self, env, obs, encoder, seed):
        self.now, self.seeds = self.now + 1, [*self.seeds, (env.task.id, seed)]
        self.most = max(self.most, self.now)
        await asyncio.sleep(self.pause)
        self.now -= 1
        return await super().act(env, obs, encoder, seed)


def test_groups_come_back_in_order_and_share_their_task():
    tasks, told = [task(1), task(2), task(1, "bugchain")], []
    groups = play(Counts(), tasks, 3, progress=lambda done, total: told.append((done, total)))
    assert [[e.task_id for e in group] for group in groups] == [[t.id] * 3 for t in tasks]
    assert all(len({e.group_id for e in group}) == 1 for group in groups)
    assert len({e.episode_id for group in groups for e in group}) == 9
    assert told == [(n, 9) for n in range(1, 10)]


def test_seeds_differ_within_a_group_and_depend_on_nothing_else():
    first, second, other = Counts(0), Counts(0), Counts(0)
    play(first, [task(1), task(2)])
    play(second, [task(2)], config=make_config(rollout={"concurrency": 1}))
    play(other, [task(2)], seed=1)
    of_task_2 = {seed for task_id, seed in first.seeds if task_id == task(2).id}
    assert of_task_2 == {seed for _, seed in second.seeds} and len(of_task_2) == 2
    assert of_task_2 == {derive_seed(derive_seed(0, task(2).id, i), 0) for i in range(2)}
    assert of_task_2.isdisjoint(seed for _, seed in other.seeds)


def test_concurrency_is_bounded():
    policy = Counts()
    play(policy, [task(1)], 6, config=make_config(rollout={"concurrency": 2}))
    assert policy.most == 2


def test_as_many_environments_work_at_once_as_configured(monkeypatch):
    """Case S12: 32 steps that each wait for the other 31. Asyncio's default pool has six threads on two cores."""
    together = threading.Barrier(32)

    class Env(CodingEnv):
        def step(self, action):
            together.wait(200)
            return super().step(action)

    monkeypatch.setattr(episode, "CodingEnv", Env)
    (group,) = play(Says(SUBMIT), [task(1)], 32, config=make_config(rollout={"concurrency": 32}))
    assert {e.stop_reason for e in group} == {StopReason.SUBMITTED}


def test_a_stuck_episode_does_not_hold_the_others():
    """Case S5: two of four run a command that never ends; with two places, the others still get theirs."""
    stuck = iter((True, False, True, False))
    mine = {}

    async def act(env, obs, encoder, seed):
        if env not in mine:
            mine[env] = next(stuck)
        return await Says(run("sleep 3600") if mine[env] else SUBMIT).act(env, obs, encoder, seed)

    policy = Says("")
    policy.act = act
    began = time.monotonic()
    (group,) = play(policy, [task(1)], 4, config=make_config(rollout={"concurrency": 2, "episode_timeout_s": 8.0}))
    assert time.monotonic() - began < 25
    assert sorted(e.stop_reason for e in group) == ["deadline", "deadline", "submitted", "submitted"]


@pytest.fixture
def failures(monkeypatch):
    """Episodes whose environment dies at its first step: as many as ``failures.append`` was called."""
    pending = []

    class Env(CodingEnv):
        def step(self, action):
            if pending:
                raise SandboxError(pending.pop())
            return super().step(action)

    monkeypatch.setattr(episode, "CodingEnv", Env)
    return pending


def test_infrastructure_failures_are_played_again_from_the_same_seed(failures):
    failures += ["the sandbox died"]
    policy = Counts(0)
    (group,) = play(policy, [task(1)], 2, config=make_config(rollout={"concurrency": 1, "retries": 1}))
    assert [e.stop_reason for e in group] == [StopReason.SUBMITTED] * 2
    assert len(policy.seeds) == 3 and policy.seeds[0] == policy.seeds[1]


def test_what_still_fails_is_marked_and_stays_out_of_the_baseline(failures):
    """Case S4: a zero of the sandbox is no zero of the policy."""
    failures += ["the sandbox died"] * 2
    config = make_config(rollout={"concurrency": 1, "retries": 1})
    (group,) = play(Counts(0), [task(1)], 3, config=config)
    assert [e.valid for e in group] == [False, True, True]
    assert (group[0].stop_reason, group[0].error) == (StopReason.INFRASTRUCTURE, "the sandbox died")
    group[1].reward = 1.0
    assert group_advantages([group]).advantages == {group[1].episode_id: 0.5, group[2].episode_id: -0.5}


def test_no_retries_means_none(failures):
    failures += ["the sandbox died"]
    (group,) = play(Counts(0), [task(1)], 2, config=make_config(rollout={"concurrency": 1, "retries": 0}))
    assert [e.valid for e in group] == [False, True]


def test_a_user_error_stops_all_at_once_and_comes_out_as_itself():
    async def act(env, obs, encoder, seed):
        if env.task.seed == 2:
            raise UserError("no such style", "another one")
        await forever()

    policy = Says("")
    policy.act = act
    with pytest.raises(UserError, match="no such style"):
        play(policy, [task(1), task(2)])


# -- tasks ------------------------------------------------------------------------------------------------------------


def test_training_tasks_are_a_function_of_seed_and_step():
    config = make_config(env={"families": ["chain", "bugchain"]}, rollout={"groups_per_step": 3})
    steps = [draw_tasks(config, step) for step in range(40)]
    assert steps[17] == draw_tasks(config, 17)
    drawn = [spec for step in steps for spec in step]
    assert [family for family, _ in drawn] == ["chain", "bugchain"] * 60
    seeds = [seed for _, seed in drawn]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < HELDOUT_SEED_BASE for seed in seeds)
    assert draw_tasks(make_config(train={"seed": 1}), 0) != draw_tasks(make_config(), 0)


def test_heldout_tasks_have_seeds_that_training_never_draws():
    config = make_config(eval={"tasks": 5, "pressure": 2.0}, env={"families": ["chain", "bugchain"]})
    tasks = heldout_tasks(config.eval, config.env, ENCODER)
    assert [t.id for t in tasks][:2] == ["chain:nano:1000000:2:1024", "bugchain:nano:1000001:2:1024"]
    assert all(t.seed >= HELDOUT_SEED_BASE for t in tasks)
    longer = make_config(eval={"tasks": 6, "pressure": 2.0}, env={"families": ["chain", "bugchain"]})
    assert heldout_tasks(longer.eval, longer.env, ENCODER)[:5] == tasks


def test_heldout_families_and_pressure_come_from_eval_where_given():
    config = make_config(eval={"tasks": 2, "families": ["dossier"]})
    tasks = heldout_tasks(config.eval, config.env, ENCODER)
    expected = make_task("dossier", seed=HELDOUT_SEED_BASE, pressure=1.2, window=1024, token_counter=ENCODER.count)
    assert tasks[0] == expected and tasks[1].family == "dossier"
