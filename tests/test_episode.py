"""run_episode: one loop, one clock, one taxonomy. Real environment and sandbox; the policies are scripted or made here.

The faults are real where they can be (a command that never ends, a killed reset); a dying sandbox and a hanging grader
are subclasses of the real environment.
"""

import asyncio
import itertools
import re
import threading
import time
from pathlib import Path

import pytest

from selfgc_envs.actions import ToolCall, format_call
from selfgc_envs.coding_env import CodingEnv, StopReason
from selfgc_envs.errors import SandboxError, ServerError, UserError
from selfgc_envs.tasks import make_task
from selfgc_rl import budget, episode
from selfgc_rl.config import parse_config
from selfgc_rl.episode import EnginePolicy, ScriptedPolicy, derive_seed, run_episode
from selfgc_rl.tokens import PromptEncoder
from selfgc_rl.types import Sample


class WordTokenizer:
    """A tokenizer of word pieces that needs no torch. Encoding what was decoded need not give the same ids."""

    chat_template, name_or_path, special_tokens_map = "chatml", "words", {"eos_token": "<|im_end|>"}
    eos_token_id, pad_token_id = 0, 1

    def __init__(self):
        self._ids = {"<|im_end|>": 0, "<|pad|>": 1}
        self._pieces = ["<|im_end|>", "<|pad|>"]
        self._lock = threading.Lock()

    def encode(self, text, add_special_tokens=False):
        with self._lock:
            return [self._id(piece) for piece in re.findall(r"<\|im_\w+\|>|\w{1,6}|\n+| ?[^\w\n]", text)]

    def _id(self, piece):
        if piece not in self._ids:
            self._ids[piece] = len(self._pieces)
            self._pieces.append(piece)
        return self._ids[piece]

    def decode(self, ids, **_):
        return "".join(self._pieces[i] for i in ids)

    def get_vocab(self):
        return {"words": 0}

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")


ENCODER = PromptEncoder(WordTokenizer())


def make_config(**sections):
    tree = {"env": {"window": 1024, "pressure": 1.2, "max_turns": 14}, "rollout": {"episode_timeout_s": 300.0}}
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values
    return parse_config(tree)


def task(seed=1, family="chain", pressure=1.2):
    return make_task(family, seed=seed, pressure=pressure, window=1024, token_counter=ENCODER.count)


def play(policy, *, config=None, the_task=None, seed=0, **more):
    return asyncio.run(
        run_episode(
            policy,
            the_task or task(),
            config=config or make_config(),
            encoder=ENCODER,
            episode_id="e",
            group_id="g",
            seed=seed,
            **more,
        )
    )


class Says:
    """A policy that says these texts, the last one for ever. A text may be a function of the environment."""

    def __init__(self, *texts, finish_reason="stop"):
        self.texts, self.finish_reason = texts, finish_reason

    async def act(self, env, obs, encoder, seed):
        text = self.texts[min(env.turn, len(self.texts) - 1)]
        text = await text(env, obs, encoder, seed) if callable(text) else text
        ids = tuple(encoder.encode_reply(text))
        return Sample(tuple(encoder.encode(obs["messages"])), ids, (0.0,) * len(ids), text, self.finish_reason, "says")


class SolvesThen(ScriptedPolicy):
    """Does all the work of the task, and then says something else instead of submitting."""

    def __init__(self, then):
        super().__init__("fold_drop")
        self.then = then

    async def act(self, env, obs, encoder, seed):
        if env.turn >= len(env.task.oracle):
            return await Says(self.then).act(env, obs, encoder, seed)
        text = (await super().act(env, obs, encoder, seed)).text
        rest = "\n".join(line for line in text.splitlines() if "submit" not in line)
        return await Says(rest or self.then).act(env, obs, encoder, seed)


def run(cmd):
    return format_call(ToolCall("run_bash", {"cmd": cmd}))


SUBMIT = format_call(ToolCall("submit", {}))


async def forever(*_):
    await asyncio.sleep(3600)


def wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.fixture
def environments(monkeypatch):
    """A function that gives the loop a subclass of the environment; it returns the list of those that will be made."""

    def use(**methods):
        made = []

        class Env(CodingEnv):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                self.homes = []
                made.append(self)

            def reset(self, **kwargs):
                out = super().reset(**kwargs)
                self.homes.append(self._sandbox.workspace)
                return out

        for name, method in methods.items():
            setattr(Env, name, method)
        monkeypatch.setattr(episode, "CodingEnv", Env)
        return made

    return use


# -- an episode ----------------------------------------------------------------------------------------------------


def test_a_scripted_policy_solves_its_task_and_the_record_is_exact(environments):
    made, seen = environments(), []
    config = make_config(reward={"coefficient": 0.5})
    done = play(ScriptedPolicy("fold_drop"), config=config, keep_messages=True, on_turn=seen.append)
    assert (done.stop_reason, done.success, done.error) == (StopReason.SUBMITTED, 1.0, "")
    assert done.turns == seen and [t.index for t in done.turns] == list(range(len(done.turns)))
    for turn in done.turns:
        assert list(turn.sample.prompt_ids) == ENCODER.encode(turn.messages)
        assert turn.budget_used == len(turn.sample.prompt_ids) / done.window
        assert turn.sample.sampled_ids[-1] == ENCODER.eos_id and turn.sample.policy_version == "scripted:fold_drop"
    budgets = [turn.budget_used for turn in done.turns]
    assert done.penalty == budget.penalty(budgets, config.reward)
    assert done.reward == 1.0 - 0.5 * done.penalty == budget.reward(1.0, budgets, config.reward)
    assert done.metrics["folds"] + done.metrics["drops"] >= 1
    events = [e["event"] for turn in done.turns for e in turn.events]
    assert {"created", "outcome"} <= set(events) and done.turns[-1].ledger
    assert wait_until(lambda: not made[0].homes[0].exists())


def test_the_same_seed_gives_the_same_episode():
    first, again, other = (play(ScriptedPolicy("lazy"), seed=seed, the_task=task(3)) for seed in (5, 5, 8))
    assert [t.sample for t in first.turns] == [t.sample for t in again.turns]
    assert [t.sample for t in first.turns] != [t.sample for t in other.turns]


def test_messages_are_kept_only_when_wanted():
    done = play(Says(SUBMIT))
    assert not done.turns[0].messages and done.valid


class Engine:
    """Answers with given ids; remembers what it was asked."""

    def __init__(self, *replies):
        self.replies, self.asked = list(replies), []

    async def sample(self, prompt_ids, *, seed=None, temperature=None):
        self.asked.append((list(prompt_ids), seed, temperature))
        ids = self.replies[min(len(self.asked), len(self.replies)) - 1]
        return Sample(tuple(prompt_ids), tuple(ids), (-0.5,) * len(ids), "the server's own text", "stop", "model-v1")

    async def close(self):
        pass


def test_sampled_ids_reach_the_record_unchanged_and_text_is_decoded_from_them():
    """Case R1: the ids spell 'submit' letter by letter, which no encoding of the text would."""
    letters = [i for c in SUBMIT for i in ENCODER.tokenizer.encode(c)] + [ENCODER.eos_id]
    assert letters != ENCODER.encode_reply(SUBMIT)
    engine = Engine(letters)
    done = play(EnginePolicy(engine, temperature=0.7), seed=11)
    sample = done.turns[0].sample
    assert (sample.sampled_ids, sample.logprobs) == (tuple(letters), (-0.5,) * len(letters))
    assert sample.text.replace(" ", "") == SUBMIT.replace(" ", "") and done.stop_reason is StopReason.SUBMITTED
    assert engine.asked == [(list(sample.prompt_ids), derive_seed(11, 0), 0.7)]


def test_each_turn_has_its_own_sampling_seed_from_the_episode_seed_alone():
    seeds = []
    for _ in range(2):
        engine = Engine(ENCODER.encode_reply("hm"))
        play(EnginePolicy(engine), seed=3, config=make_config(env={"max_turns": 3}))
        seeds.append([seed for _, seed, _ in engine.asked])
    assert seeds[0] == seeds[1] == [derive_seed(3, turn) for turn in range(3)]
    everything = [derive_seed(*parts) for parts in itertools.product(range(30), range(30))]
    assert len(set(everything)) == 900 and all(0 <= seed < 2**63 for seed in everything)
    assert derive_seed(1, 23) != derive_seed(12, 3)


# -- case S2: every way to stop has its reason, and is graded ---------------------------------------------------------


def test_window_overflow_is_a_stop_reason_and_is_graded():
    done = play(ScriptedPolicy("never"), the_task=task(pressure=2.0))
    assert (done.stop_reason, done.success, done.valid) == (StopReason.WINDOW_OVERFLOW, 0.0, True)
    sent = [turn.budget_used for turn in done.turns]
    assert done.penalty == budget.penalty([*sent, 1.0], make_config().reward)  # what did not fit is charged in full
    assert all(turn.budget_used <= 1.0 for turn in done.turns)  # the prompt that did not fit was never sent


def test_a_reply_cut_by_its_length_is_an_observation_not_the_end():
    half = run("echo hello")[:25]
    done = play(Says(half, SUBMIT, finish_reason="length"), keep_messages=True)
    assert [t.sample.finish_reason for t in done.turns] == ["length", "length"]
    assert (done.stop_reason, done.metrics["invalid_calls"]) == (StopReason.SUBMITTED, 1.0)
    assert "error" in done.turns[1].messages[-1]["content"]


# -- case S3: what was earned stays earned ----------------------------------------------------------------------------


def test_work_done_before_the_turn_limit_counts():
    solved = play(SolvesThen("I am done."))
    assert (solved.stop_reason, solved.success) == (StopReason.MAX_TURNS, 1.0)
    assert solved.reward == pytest.approx(1.0 - 0.3 * solved.penalty)


def test_work_done_before_the_window_overflows_counts():
    solved = play(SolvesThen(run("seq 1 3000")))
    assert (solved.stop_reason, solved.success) == (StopReason.WINDOW_OVERFLOW, 1.0)


@pytest.mark.slow
def test_work_done_before_the_deadline_counts():
    """The server stops answering; the deadline takes the episode as it stands."""
    solved = play(SolvesThen(forever), config=make_config(rollout={"episode_timeout_s": 20.0}))
    assert (solved.stop_reason, solved.success, solved.valid) == (StopReason.DEADLINE, 1.0, True)
    assert solved.seconds <= 21


# -- case S4: what failed is not the policy's zero ---------------------------------------------------------------------


def step_fails(error, at):
    def step(self, action):
        if self.turn == at:
            raise error
        return CodingEnv.step(self, action)

    return step


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (SandboxError("the shell died"), "the shell died"),
        (OSError(24, "Too many open files"), "OSError: [Errno 24] Too many open files"),
        (TimeoutError("no answer from the disk"), "no answer from the disk"),
        (AssertionError("a bug"), "AssertionError: a bug"),
    ],
)
def test_a_failing_environment_is_infrastructure_and_not_an_exception(environments, error, says):
    made = environments(step=step_fails(error, at=1))
    done = play(Says(run("true")))
    assert (done.stop_reason, done.error, done.valid) == (StopReason.INFRASTRUCTURE, says, False)
    assert (done.success, done.reward, len(done.turns)) == (0.0, 0.0, 1)
    assert not made[0].homes[0].exists()


def test_a_failing_server_is_infrastructure():
    async def gone(*_):
        raise ServerError("vLLM is gone")

    done = play(Says(run("true"), gone))
    assert (done.stop_reason, done.error, done.reward) == (StopReason.INFRASTRUCTURE, "vLLM is gone", 0.0)


def test_a_user_error_is_raised():
    with pytest.raises(UserError, match="smaller than the fixed overhead"):
        play(Says(SUBMIT), the_task=make_task("chain", window=128, pressure=1.0))
    with pytest.raises(UserError, match="unknown strategy"):
        play(Says(SUBMIT), config=make_config(env={"strategy": "nope"}))
    with pytest.raises(UserError, match="unknown style"):
        ScriptedPolicy("nope")


# -- case S5: one clock round everything -------------------------------------------------------------------------------

SHORT = make_config(rollout={"episode_timeout_s": 8.0})


def test_a_command_that_never_ends_is_cut_off_graded_and_leaves_nothing(environments):
    made = environments()
    began = time.monotonic()
    done = play(Says(run("sleep 3600")), config=SHORT)
    assert time.monotonic() - began < 10
    assert (done.stop_reason, done.success, done.valid) == (StopReason.DEADLINE, 0.0, True)
    assert [t.sample.text for t in done.turns] == [run("sleep 3600")]  # the turn that did it is there to be trained
    assert wait_until(lambda: not made[0].homes[0].exists() and not processes_in(made[0].homes[0]))


def processes_in(workspace):
    found = []
    for cwd in Path("/proc").glob("[0-9]*/mountinfo"):
        try:
            found += [cwd.parent.name] if str(workspace) in cwd.read_text() else []
        except OSError:
            continue
    return found


def test_a_sandbox_that_dies_as_scoring_begins_is_infrastructure(monkeypatch):
    def dead(*_):
        raise SandboxError("gone before grading")

    monkeypatch.setattr("selfgc_envs.coding_env.grade", dead)
    done = play(Says(SUBMIT))
    assert (done.stop_reason, done.error) == (StopReason.INFRASTRUCTURE, "gone before grading")
    done = play(Says(run("true"), forever), config=SHORT)
    assert (done.stop_reason, done.error) == (StopReason.INFRASTRUCTURE, "gone before grading")


def test_a_grader_that_hangs_holds_nobody_and_is_no_zero(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr("selfgc_envs.coding_env.grade", lambda *_: release.wait(120))
    began = time.monotonic()
    done = play(Says(SUBMIT), config=SHORT)
    release.set()
    assert time.monotonic() - began < 10
    assert done.stop_reason is StopReason.INFRASTRUCTURE and "grading did not end within 8 s" in done.error


@pytest.mark.slow
def test_a_grader_that_ends_just_after_the_deadline_is_believed(monkeypatch):
    """The step that submitted is still grading at the deadline; its result arrives in the time kept for the end."""
    limit, kept = 16.0, 3 * 0.8
    late = limit - kept + 0.3
    began = time.monotonic()

    class Grade:
        fraction = 1.0

    def slow(*_):
        time.sleep(max(0.0, began + late - time.monotonic()))
        return Grade

    monkeypatch.setattr("selfgc_envs.coding_env.grade", slow)
    done = play(Says(SUBMIT), config=make_config(rollout={"episode_timeout_s": limit}))
    assert (done.stop_reason, done.success) == (StopReason.SUBMITTED, 1.0) and limit - kept < done.seconds <= limit + 1


def test_a_close_that_hangs_holds_nobody(environments):
    release = threading.Event()
    environments(close=lambda self: release.wait(120) and CodingEnv.close(self) if self._sandbox else None)
    began = time.monotonic()
    done = play(Says(SUBMIT), config=SHORT)
    release.set()
    assert time.monotonic() - began < 10 and done.stop_reason is StopReason.SUBMITTED


def test_a_reset_that_comes_too_late_is_infrastructure_and_closed_when_it_comes(environments):
    release = threading.Event()

    def reset(self, **kwargs):
        release.wait(120)
        out = CodingEnv.reset(self)
        self.homes.append(self._sandbox.workspace)
        return out

    made = environments(reset=reset)
    done = play(Says(SUBMIT), config=make_config(rollout={"episode_timeout_s": 1.0}))
    assert done.stop_reason is StopReason.INFRASTRUCTURE and "not one turn was over within 1 s" in done.error
    release.set()
    assert wait_until(lambda: made[0].homes and not made[0].homes[0].exists())


def test_a_cancelled_episode_closes_its_environment(environments):
    made = environments()

    async def cancelled():
        settings = {"config": make_config(), "encoder": ENCODER, "episode_id": "e", "group_id": "g", "seed": 0}
        playing = asyncio.create_task(run_episode(Says(run("sleep 3600")), task(), **settings))
        while not (made and made[0].homes and processes_in(made[0].homes[0])):
            await asyncio.sleep(0.05)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(cancelled())
    assert wait_until(lambda: not made[0].homes[0].exists() and not processes_in(made[0].homes[0]))
