"""CodingEnv: the hard window, the tail, policy failures as observations, the Gymnasium face. Always a real sandbox."""

import random

import gymnasium
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfgc_envs.actions import ToolCall, format_call
from selfgc_envs.coding_env import CodingEnv, StopReason
from selfgc_envs.errors import UserError
from selfgc_envs.scripted import make_demonstrator
from selfgc_envs.view import render_entry


def count(messages):
    """A word-and-sign counter: exact, additive, and no model needed."""
    return sum(5 + len(m["content"].replace("_", " ").split()) for m in messages)


def make(task="chain:nano:1:1:700", **options):
    return CodingEnv(task, token_counter=count, **options)


@pytest.fixture
def env():
    env = make()
    env.reset()
    yield env
    env.close()


def run(cmd):
    return format_call(ToolCall("run_bash", {"cmd": cmd}))


def fold(object_id, **more):
    return format_call(ToolCall("fold", {"id": object_id, **more}))


def test_budget_is_the_prompt_as_sent_and_the_tail_states_it(env):
    obs, *_ = env.step(run("./step start"))
    assert obs["budget_used"] == count(obs["messages"]) / env.window
    assert f"budget_used_pct: {round(100 * obs['budget_used'])}," in obs["messages"][-1]["content"]
    assert obs["messages"][-1]["role"] == "user"


def test_system_prompt_and_task_stand_verbatim_in_every_prompt(env):
    first = env.reset()[0]["messages"][:2]
    for _ in range(3):
        obs, *_ = env.step(run("seq 1 30") + fold("obs_001"))
        assert obs["messages"][:2] == first  # case C11


def test_management_leaves_no_residue_and_shrinks_the_prompt_by_what_it_says(env):
    env.step(run("seq 1 90"))
    before, *_ = env.step(run("echo x"))
    after, _, _, _, info = env.step(fold("obs_001"))
    assert info["outcomes"] == ["obs_001 folded"]
    assert not any('"fold"' in m["content"] for m in after["messages"][2:])
    fixed = [count(o["messages"][:-1]) for o in (before, after)]
    assert fixed[0] - fixed[1] == info["metrics"]["tokens_saved"] > 0  # case C6
    again, *_ = env.step(run("true"))
    assert "obs_001 folded\n" not in again["messages"][-1]["content"].split("ledger")[0]


def test_expand_rematerialises_at_the_tail(env):
    env.step(run("seq 1 90"))
    env.step(run("echo x") + fold("obs_001"))  # in one message, work first: the newest is then obs_002
    obs, *_ = env.step(format_call(ToolCall("expand", {"id": "obs_001"})))
    tool_messages = [m["content"] for m in obs["messages"] if m["role"] == "tool"]
    assert "obs_001 folded" in tool_messages[0] and tool_messages[-1].startswith("1\n2\n")  # case C14
    obs, *_ = env.step(fold("obs_001"))
    assert not any(m["content"].startswith("1\n2\n") for m in obs["messages"])


def test_overflow_ends_the_episode_and_is_graded_as_it_stands(env):
    _, reward, terminated, truncated, info = env.step(run("seq 1 2000"))
    assert (terminated, truncated, info["stop_reason"]) == (True, False, StopReason.WINDOW_OVERFLOW)
    assert info["success"] == reward == 0.0
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(run("true"))


def test_auto_fold_is_a_counted_safety_net():
    env = make(on_overflow="auto_fold", strategy="none")
    env.reset()
    for _ in range(4):
        obs, _, done, _, info = env.step(run("seq 1 200"))
    assert not done and info["metrics"]["auto_folds"] >= 1 and obs["budget_used"] <= 1
    env.close()


def test_turn_limit_truncates():
    env = make(max_turns=2)
    env.reset()
    env.step(run("true"))
    _, _, terminated, truncated, info = env.step(run("true"))
    assert (terminated, truncated, info["stop_reason"]) == (False, True, StopReason.MAX_TURNS)
    env.close()


def test_what_the_model_gets_wrong_is_an_observation(env):
    for text, says in [
        ("no call at all", "no tool call"),
        ('<tool_call>{"name": "read_file", "arguments": {"path": "nope"}}</tool_call>', "nope"),
        ('<tool_call>{"name": "read_file", "arguments": {"path": "/etc/passwd"}}</tool_call>', "error"),
        (
            '<tool_call>{"name": "str_replace", "arguments": {"path": "step", "old": "zzz", "new": ""}}</tool_call>',
            "0 times",
        ),
        (fold("obs_777"), "no object obs_777"),
    ]:
        obs, _, terminated, _, info = env.step(text)
        assert not terminated and any(says in m["content"] for m in obs["messages"][2:]), text
    assert info["metrics"]["invalid_calls"] == 5


def test_none_strategy_has_no_management_tools_and_no_ledger():
    env = make(strategy="none")
    obs, _ = env.reset()
    assert "fold" not in obs["messages"][0]["content"]
    obs, *_ = env.step(run("seq 1 30") + fold("obs_001"))
    assert "unknown tool 'fold'" in obs["messages"][-1]["content"] and "ledger" not in obs["messages"][-1]["content"]
    env.close()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text(max_size=60) | st.sampled_from(["<tool_call>", fold("obs_001"), run("echo a")]), max_size=4))
def test_any_text_is_survived(texts):
    env = make()
    env.reset()
    for text in texts:
        if env.stop_reason is None:
            env.step(text)
    env.close()


def test_same_seed_and_actions_give_the_same_bytes():
    def episode():
        env = make("bugchain:nano:5:1:700")
        obs, _ = env.reset(seed=3)
        out, demo = [obs["messages"]], make_demonstrator(env, "fold_drop", random.Random(0))
        while env.stop_reason is None:
            obs, *_ = env.step(demo.act(obs))
            out.append(obs["messages"])
        env.close()
        return out

    assert episode() == episode()


def test_window_below_the_fixed_overhead_is_refused():
    with pytest.raises(UserError, match="smaller than the fixed overhead"):
        make("chain:nano:1:1:128", window=80).reset()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"strategy": "nope"}, "unknown strategy"),
        ({"strategy_options": {"colour": 1}}, "unknown option 'colour'"),
        ({"strategy_options": {"actions": "burn"}}, "unknown actions"),
        ({"on_overflow": "pray"}, "not available"),
        ({"task": "nope:nano"}, "unknown task family"),
        ({"task": "chain:nano:x"}, "is not family:level"),
    ],
)
def test_bad_options_are_named(options, says):
    with pytest.raises(UserError, match=says):
        make(**options)


def test_gymnasium_make_and_checker():
    from gymnasium.utils.env_checker import check_env

    env = gymnasium.make("SelfGC/Coding-v0", task="chain:nano:2:1:700", token_counter=count, render_mode="ansi")
    check_env(env.unwrapped, skip_render_check=False)
    env.unwrapped.reset()
    env.unwrapped.step(run("./step start"))
    assert "budget_used_pct" in env.unwrapped.render() and "./step start" in env.unwrapped.render()
    env.close()


def test_transcript_entries_render_in_order(env):
    env.step(run("echo a") + run("echo b"))
    (entry,) = env.transcript
    assert [m["content"] for m in render_entry(entry, env.ledger)[1:]] == ["a", "b"]
