"""Task families: DESIGN section 8's conditions at level nano, with the scripted policies."""

import random

import pytest

from selfgc_envs.actions import ToolCall, format_call
from selfgc_envs.coding_env import CodingEnv, StopReason
from selfgc_envs.scripted import make_demonstrator
from selfgc_envs.tasks import list_families, make_task

FAMILIES = [f.name for f in list_families()]


def count(messages):
    """About the density of a real subword tokenizer on this text, but additive and instant."""
    return sum(5 + round(len(m["content"]) / 2.6) for m in messages)


def play(family, seed, pressure, style, *, strategy="selfgc"):
    task = make_task(family, seed=seed, pressure=pressure, window=1024, token_counter=count)
    env = CodingEnv(task, token_counter=count, strategy=strategy)
    obs, _ = env.reset()
    demo = make_demonstrator(env, style, random.Random(seed))
    while env.stop_reason is None:
        obs, *_ = env.step(demo.act(obs))
    env.close()
    return env


def submit_after(env, *cmds):
    env.reset()
    for cmd in cmds:
        if env.stop_reason is None:
            env.step(format_call(ToolCall("run_bash", {"cmd": cmd})))
    if env.stop_reason is None:
        env.step(format_call(ToolCall("submit")))
    env.close()
    return env.success


@pytest.mark.parametrize("family", FAMILIES)
def test_oracle_with_good_folding_passes(family):
    assert all(play(family, seed, 1.0, "fold_drop").success == 1.0 for seed in range(4))


@pytest.mark.parametrize("family", FAMILIES)
def test_oracle_without_folding_passes_at_half_pressure_and_overflows_above_one(family):
    assert all(play(family, seed, 0.5, "never", strategy="none").success == 1.0 for seed in range(3))
    for pressure in (1.0, 2.0, 4.0):
        ended = [play(family, seed, pressure, "never", strategy="none") for seed in range(3)]
        assert all(e.success == 0.0 and e.stop_reason is StopReason.WINDOW_OVERFLOW for e in ended)


@pytest.mark.parametrize("family", FAMILIES)
def test_observations_sum_to_pressure_times_window(family):
    env = play(family, 3, 1.0, "fold_drop")
    needed = sum(o.tokens for o in env.ledger.objects() if o.tool in ("run_bash", "read_file"))
    assert 0.9 < needed / env.window < 1.25


@pytest.mark.parametrize("family", FAMILIES)
def test_cheaters_fail(family):
    task = make_task(family, seed=11, pressure=1.0, window=1024, token_counter=count)
    (answer,) = [c["equals"] for c in task.checks if c["type"] == "file"]
    first_fact = next(t.keep for t in task.oracle if t.keep).split()[-1]
    readable = " ".join(f"{name} {text}" for name, text in task.files.items())
    assert answer not in readable and first_fact not in readable  # nothing to grep
    env = CodingEnv(task, token_counter=count)
    assert submit_after(env) == 0.0
    assert submit_after(env, "grep -r . . > answer.txt") == 0.0
    never_read = "head -c 99 * > answer.txt"
    assert submit_after(env, never_read) == 0.0


def test_facts_printed_once_are_gone():
    task = make_task("chain", seed=4, token_counter=count)
    env = CodingEnv(task, token_counter=count)
    env.reset()
    cmd = format_call(ToolCall("run_bash", {"cmd": "./step start"}))
    env.step(cmd)
    env.step(cmd)
    first, second = env.ledger.objects()
    assert "code: " in first.body and "code: " not in second.body and "already used" in second.body
    env.close()


def test_some_tasks_correct_an_early_fact_late():
    tasks = [make_task("chain", seed=s, token_counter=count) for s in range(20)]
    assert 0 < sum(any(t.supersedes for t in task.oracle) for task in tasks) < 20


def test_same_id_same_bytes_and_other_seed_other_bytes():
    a, b, c = (make_task("bugchain", seed=s, token_counter=count) for s in (1, 1, 2))
    assert a == b and a.files != c.files


def test_exactly_the_held_out_family_is_marked():
    assert [f.name for f in list_families() if f.heldout] == ["dossier"]
