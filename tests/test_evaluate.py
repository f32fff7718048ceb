"""Evaluation: paired, resumable, refusing what does not belong together. Real environment, scripted policies."""

import fcntl
import json

import pytest

from selfgc_envs.coding_env import CodingEnv
from selfgc_envs.errors import InfrastructureError, SandboxError, UserError
from selfgc_rl import episode, evaluate
from selfgc_rl.config import EvalConfig
from selfgc_rl.episode import EnginePolicy, ScriptedPolicy
from selfgc_rl.evaluate import compare, evaluate_policies, heldout_jobs, play_heldout, traces_path
from selfgc_rl.report import table_rows
from selfgc_rl.rollout import heldout_tasks
from selfgc_rl.traces import read_traces
from test_episode import ENCODER, SUBMIT, Says, make_config

NAMES = ("base", "trained")


def settings(**sections):
    sections["eval"] = {"tasks": 4} | sections.get("eval", {})
    return make_config(**sections)


class Counted:
    """A policy, and the ids of the tasks it was asked to begin."""

    def __init__(self, inner):
        self.inner, self.begun, self.seeds, self.closed = inner, [], [], 0

    async def act(self, env, obs, encoder, seed):
        if env.turn == 0:
            self.begun.append(env.task.id)
            self.seeds.append((env.task.id, seed))
        return await self.inner.act(env, obs, encoder, seed)

    async def close(self):
        self.closed += 1


def quick(text=SUBMIT):
    """A policy that ends its episode in one turn."""
    return Counted(Says(text))


def play(config, out, policy, name="base", identity="i", **more):
    return play_heldout(config, name, policy, out, encoder=ENCODER, identity=identity, **more)


def both(config, out, base, trained, **more):
    identities = {"base": "never", "trained": "fold_drop"}
    policies = {"base": base, "trained": trained}
    return evaluate_policies(config, policies, out, encoder=ENCODER, identities=identities, **more)


WINDOW = 1536  # in word pieces; leaves every family's oracle room to fold
ROOMY = settings(env={"window": WINDOW})


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """Never folding against folding well, at a pressure where never folding overflows."""
    out = tmp_path_factory.mktemp("eval")
    base, trained = Counted(ScriptedPolicy("never")), Counted(ScriptedPolicy("fold_drop"))
    results = both(ROOMY, out, base, trained)
    return out, base, trained, results


def test_both_policies_play_the_same_tasks_with_the_same_seeds(evaluated):
    _, base, trained, results = evaluated
    tasks = {t.id for t in heldout_tasks(EvalConfig(tasks=4), ROOMY.env, ENCODER)}
    assert set(base.begun) == set(trained.begun) == tasks and results["tasks"] == 4
    assert sorted(base.seeds) == sorted(trained.seeds) and len({seed for _, seed in base.seeds}) == 4
    assert base.closed == trained.closed == 1


def test_results_say_what_changed_and_how_surely(evaluated):
    out, _, _, results = evaluated
    assert json.loads((out / "results.json").read_text()) == results
    assert (results["base"]["success"], results["trained"]["success"]) == (0.0, 1.0)
    assert results["paired_difference"] == results["trained"]["success"] - results["base"]["success"]
    assert results["ci95"] == [1.0, 1.0] and results["p_value"] == 2 * 0.5**4
    assert (results["tasks_gained"], results["tasks_lost"]) == (4, 0)
    low, high = results["trained"]["success_ci95"]
    assert low == pytest.approx(0.51, abs=0.01) and high == pytest.approx(1.0)  # Wilson at 4 of 4
    assert results["penalty_before"] == results["base"]["penalty"] > 0.0
    assert results["penalty_difference"] == pytest.approx(results["penalty_after"] - results["penalty_before"])
    assert results["penalty_ci95"][0] <= results["penalty_difference"] <= results["penalty_ci95"][1]
    assert results["trained"]["success_by_family"] == {"bugchain": 1.0, "chain": 1.0}


def test_figures_are_per_episode_and_per_turn(evaluated):
    out, _, _, results = evaluated
    _, episodes = read_traces(traces_path(out, "trained"))
    figures = results["trained"]
    assert (
        figures["folds"] + figures["drops"] == sum(e["metrics"]["folds"] + e["metrics"]["drops"] for e in episodes) / 4
    )
    assert figures["folds"] + figures["drops"] > 0 == results["base"]["folds"]
    assert figures["turns"] == sum(len(e["turns"]) for e in episodes) / 4
    assert figures["peak_budget"] == sum(max(t["budget_used"] for t in e["turns"]) for e in episodes) / 4
    assert figures["stop_reasons"] == {"submitted": 4} and results["base"]["stop_reasons"] == {"window_overflow": 4}
    assert (figures["invalid_rate"], figures["truncated_replies"], figures["pass_at_k"]) == (0.0, 0.0, {"1": 1.0})
    rows = figures["budget_by_turn"]
    assert [r["episodes"] for r in rows] == [sum(len(e["turns"]) > t for e in episodes) for t in range(len(rows))]
    assert rows[0]["mean"] == pytest.approx(sum(e["turns"][0]["budget_used"] for e in episodes) / 4)
    assert all(r["q25"] <= r["median"] <= r["q75"] for r in rows)


def test_the_report_can_show_the_results(evaluated):
    assert ("success", "0.000", "1.000") in table_rows(evaluated[3])


def test_traces_hold_what_was_said_done_and_seen(evaluated):
    header, episodes = read_traces(traces_path(evaluated[0], "trained"))
    assert header["policy"] == "fold_drop" and header["env.window"] == WINDOW
    turn = episodes[0]["turns"][1]
    assert "<tool_call>" in turn["text"] and turn["ledger"] and turn["events"]
    assert turn["sampled_tokens"] > 0 and turn["budget_used"] == pytest.approx(turn["prompt_tokens"] / WINDOW, abs=1e-6)
    assert "messages" not in turn


def test_a_finished_evaluation_is_not_played_again(evaluated):
    out, _, _, results = evaluated
    base, trained = quick(), quick()
    assert both(ROOMY, out, base, trained) == results
    assert base.begun == trained.begun == []


# -- resume -----------------------------------------------------------------------------------------------------------


def test_an_interrupted_evaluation_plays_only_what_is_missing(tmp_path):
    class Stops(Counted):
        async def act(self, env, obs, encoder, seed):
            if len(self.begun) == 2:
                raise KeyboardInterrupt
            return await super().act(env, obs, encoder, seed)

    one_by_one = settings(rollout={"concurrency": 1})
    first = Stops(Says(SUBMIT))
    with pytest.raises(KeyboardInterrupt):
        play(one_by_one, tmp_path, first)
    path = traces_path(tmp_path, "base")
    with path.open("a") as file:
        file.write('{"episode_id": "chain:nano:10000')  # and the writer was killed in mid-line
    second = quick()
    play(one_by_one, tmp_path, second)
    assert len(first.begun) == 2 and set(first.begun).isdisjoint(second.begun) and len(second.begun) == 2
    assert len(read_traces(path)[1]) == 4


def test_an_evaluation_can_be_extended(tmp_path):
    play(settings(eval={"tasks": 2}), tmp_path, quick())
    more = quick()
    play(settings(eval={"tasks": 3, "episodes_per_task": 2}), tmp_path, more)
    assert len(more.begun) == 4
    play(settings(eval={"tasks": 3, "episodes_per_task": 2}), tmp_path, quick(), "trained")
    results = compare(settings(eval={"tasks": 2}), tmp_path, *NAMES)
    assert (results["tasks"], results["base"]["episodes"]) == (2, 2)  # the first tasks, whatever ended first
    results = compare(settings(eval={"tasks": 3, "episodes_per_task": 2}), tmp_path, *NAMES)
    assert (results["tasks"], results["base"]["episodes"], len(results["base"]["pass_at_k"])) == (3, 6, 2)


def test_start_over_replaces_the_traces(tmp_path):
    play(settings(), tmp_path, quick())
    again = quick()
    play(settings(), tmp_path, again, identity="other", resume=False)
    assert len(again.begun) == 4 and len(read_traces(traces_path(tmp_path, "base"))[1]) == 4


@pytest.mark.parametrize(
    ("change", "identity", "says"),
    [
        ({"env": {"max_turns": 5}}, "i", r"env.max_turns was 14, is 5"),
        ({"reward": {"coefficient": 0.5}}, "i", r"reward.coefficient was 0.3, is 0.5"),
        ({"eval": {"temperature": 0.5}}, "i", r"rollout.temperature was 1.0, is 0.5"),
        ({"eval": {"pressure": 2.0}}, "i", r"env.pressure was 1.2, is 2.0"),
        ({}, "a retrained adapter", r"policy was 'i', is 'a retrained adapter'"),
    ],
)
def test_traces_of_other_settings_are_refused(tmp_path, change, identity, says):
    play(settings(eval={"tasks": 2}), tmp_path, quick())
    with pytest.raises(UserError, match=says):
        play(settings(**change), tmp_path, quick(), identity=identity)


def test_settings_that_change_no_episode_are_accepted(tmp_path):
    play(settings(eval={"tasks": 2}), tmp_path, quick())
    policy = quick()
    play(settings(eval={"tasks": 2}, rollout={"concurrency": 3, "retries": 4}, train={"steps": 99}), tmp_path, policy)
    assert policy.begun == []


def test_traces_of_another_version_of_a_task_are_refused(tmp_path, monkeypatch):
    play(settings(), tmp_path, quick())
    monkeypatch.setattr(evaluate, "task_hash", lambda task: "other")
    with pytest.raises(UserError, match="another version of task .*chain:nano"):
        play(settings(), tmp_path, quick())


def test_two_evaluations_cannot_write_the_same_traces(tmp_path):
    path = traces_path(tmp_path, "base")
    with path.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another evaluation is writing"):
            play(settings(), tmp_path, quick())


def test_policies_played_under_different_settings_are_not_compared(tmp_path):
    play(settings(eval={"tasks": 2}), tmp_path, quick())
    play(settings(eval={"tasks": 2}, env={"max_turns": 5}), tmp_path, quick(), "trained")
    with pytest.raises(UserError, match="differ in env.max_turns"):
        compare(settings(), tmp_path, *NAMES)


# -- what fails -------------------------------------------------------------------------------------------------------


@pytest.fixture
def dying(monkeypatch):
    """Task seeds (less 1,000,000) whose sandbox dies."""
    seeds = set()

    class Env(CodingEnv):
        def step(self, action):
            if self.task.seed - 1_000_000 in seeds:
                raise SandboxError("the sandbox died")
            return super().step(action)

    monkeypatch.setattr(episode, "CodingEnv", Env)
    return seeds


def test_infrastructure_failures_are_said_and_played_again(tmp_path, dying):
    dying |= {1, 3}
    with pytest.raises(
        InfrastructureError, match=r"base: 2 of 4 episodes failed by infrastructure, .*the sandbox died"
    ):
        play(settings(), tmp_path, quick())
    dying.clear()
    second = quick()
    play(settings(), tmp_path, second)
    assert sorted(task.split(":")[2] for task in second.begun) == ["1000001", "1000003"]
    play(settings(), tmp_path, quick(), "trained")
    assert compare(settings(), tmp_path, *NAMES)["tasks"] == 4


def test_a_few_failures_leave_their_tasks_out_of_both_sides(tmp_path, dying):
    config = settings(eval={"tasks": 10})
    play(config, tmp_path, quick())
    dying |= {4}
    play(config, tmp_path, quick(), "trained")
    results = compare(config, tmp_path, *NAMES)
    assert (results["tasks"], results["tasks_unfinished"], results["base"]["episodes"]) == (9, 1, 9)


def test_bad_requests_are_refused(tmp_path):
    with pytest.raises(UserError, match="one task gives no interval"):
        play(settings(eval={"tasks": 1}), tmp_path, quick())
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        play(settings(), tmp_path / "file", quick())
    with pytest.raises(UserError, match="cannot be read"):
        compare(settings(), tmp_path, *NAMES)
    with pytest.raises(ValueError, match="eval.temperature is 0.5"):
        play(settings(eval={"temperature": 0.5}), tmp_path, EnginePolicy(None))


def test_heldout_seeds_do_not_depend_on_how_many_are_played():
    tasks = heldout_tasks(EvalConfig(tasks=3), settings().env, ENCODER)
    few, many = heldout_jobs(tasks[:2], 1), heldout_jobs(tasks, 2)
    assert [job.seed for job in few] == [job.seed for job in many if job.episode_id.endswith("/0")][:2]
    assert len({job.seed for job in many}) == 6


# -- the traces file --------------------------------------------------------------------------------------------------


def written(tmp_path):
    return play(settings(), tmp_path, quick())


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = written(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], lines[2][:40] + b"\n", *lines[3:]]))
    with pytest.raises(UserError, match="line 3 is damaged"):
        read_traces(path)
    with pytest.raises(UserError, match="line 3 is damaged"):
        play(settings(), tmp_path, quick())


@pytest.mark.parametrize("ending", [b'{"episode_id": "ch', b'{"episode_id": "ch\n', b"\xff\xfe\n", b"\0" * 20])
def test_a_half_written_last_line_is_dropped_and_played_again(tmp_path, ending):
    path = written(tmp_path)
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:-1]) + ending)
    assert len(read_traces(path)[1]) == 3
    again = quick()
    play(settings(), tmp_path, again)
    assert len(again.begun) == 1
    assert [json.loads(line) for line in path.read_text().splitlines()] and len(read_traces(path)[1]) == 4


def test_a_half_written_header_begins_anew(tmp_path):
    path = traces_path(tmp_path, "base")
    path.write_text('{"format": 1, "sett')
    play(settings(), tmp_path, quick())
    assert len(read_traces(path)[1]) == 4


def test_another_file_is_not_taken_for_traces(tmp_path):
    path = traces_path(tmp_path, "base")
    path.write_text('{"step": 1}\n')
    with pytest.raises(UserError, match="no traces file"):
        play(settings(), tmp_path, quick())
    assert path.read_text() == '{"step": 1}\n'


def test_strange_text_survives_in_the_traces(tmp_path):
    strange = "\ud800 \u2028 \x00 " + SUBMIT
    path = play(settings(eval={"tasks": 2}), tmp_path, quick(strange))
    assert read_traces(path)[1][0]["turns"][0]["text"] == strange
