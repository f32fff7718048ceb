"""run_episode: the one agent loop, used by training, evaluation and ``play``.

Observation → prompt ids → sample → environment, until the environment ends the episode. Invariants:

* one clock round everything, grading and teardown included: after ``rollout.episode_timeout_s`` the call has returned,
  whatever the server, the sandbox or the grader does; an episode cut off by it is graded as it stands, and one that
  the grader did not finish within it is an infrastructure failure, because its zero would not be a measurement;
* the environment works in threads, never in the event loop, and is closed in every case: also when the call is
  cancelled, and also when it is only just starting or in the middle of a command (closing ends the command);
* a part that failed gives an episode with stop reason ``INFRASTRUCTURE`` and the reason in ``error``, not an exception,
  and no reward. Only a user error, cancellation and a keyboard interrupt leave this function as exceptions;
* every model call whose reply reached the environment is a turn of the episode, the one that a deadline cut off too;
* a turn's sampling seed is a function of (episode seed, turn index) and of nothing else.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from selfgc_envs.coding_env import CodingEnv, StopReason
from selfgc_envs.errors import InfrastructureError, UserError
from selfgc_envs.scripted import STYLES, Demonstrator, make_demonstrator
from selfgc_envs.tasks import Task
from selfgc_rl.budget import penalty, reward
from selfgc_rl.config import Config
from selfgc_rl.tokens import PromptEncoder
from selfgc_rl.types import Episode, Sample, Turn

_T = TypeVar("_T")
_Result = tuple[dict[str, Any], float, bool, bool, dict[str, Any]]
_log = logging.getLogger(__name__)

# Of the episode's time-out, kept back for its end: as much again for waiting for the running step, for grading, and
# for closing. The rest is the agent's.
_END_SHARE, _END_MAX_S = 0.05, 5.0


def derive_seed(*parts: object) -> int:
    """A seed below 2**63 that depends on the parts only: not on the process, the platform or the order of events."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Sampler(Protocol):
    """What :class:`EnginePolicy` needs of an engine (:class:`selfgc_rl.engines.vllm.VLLMEngine` is one)."""

    async def sample(
        self, prompt_ids: Sequence[int], *, seed: int | None = None, temperature: float | None = None
    ) -> Sample: ...

    async def close(self) -> None: ...


class Policy(Protocol):
    """Who acts. One policy plays many episodes at once."""

    async def act(self, env: CodingEnv, obs: dict[str, Any], encoder: PromptEncoder, seed: int) -> Sample:
        """The reply to an observation. Raises :class:`InfrastructureError` when there can be none."""

    async def close(self) -> None:
        """Let go of connections of this event loop. The policy can be used again afterwards."""


class EnginePolicy:
    """A model behind an inference engine.

    Args:
        engine: draws token ids for token ids.
        temperature: instead of the engine's own.
    """

    def __init__(self, engine: Sampler, *, temperature: float | None = None) -> None:
        self.engine = engine
        self.temperature = temperature

    async def act(self, env: CodingEnv, obs: dict[str, Any], encoder: PromptEncoder, seed: int) -> Sample:
        ids = encoder.encode(obs["messages"])
        sample = await self.engine.sample(ids, seed=seed, temperature=self.temperature)
        return replace(sample, text=encoder.decode(sample.sampled_ids))

    async def close(self) -> None:
        await self.engine.close()


class ScriptedPolicy:
    """A demonstrator that plays each task's oracle in one garbage-collection style. Its log-probs are zeros.

    Raises:
        UserError: unknown style.
    """

    def __init__(self, style: str) -> None:
        if style not in STYLES:
            raise UserError(f"unknown style '{style}'", f"one of {', '.join(STYLES)}")
        self.style = style
        self._playing: dict[CodingEnv, Demonstrator] = {}

    async def act(self, env: CodingEnv, obs: dict[str, Any], encoder: PromptEncoder, seed: int) -> Sample:
        if env not in self._playing:
            self._playing = {e: d for e, d in self._playing.items() if e.stop_reason is None}
            self._playing[env] = make_demonstrator(env, self.style, random.Random(seed))
        text = self._playing[env].act(obs)
        sampled = tuple(encoder.encode_reply(text))
        return Sample(
            prompt_ids=tuple(encoder.encode(obs["messages"])),
            sampled_ids=sampled,
            logprobs=(0.0,) * len(sampled),
            text=text,
            finish_reason="stop",
            policy_version=f"scripted:{self.style}",
        )

    async def close(self) -> None:
        pass


async def run_episode(
    policy: Policy,
    task: Task | str,
    *,
    config: Config,
    encoder: PromptEncoder,
    episode_id: str,
    group_id: str,
    seed: int,
    keep_messages: bool = False,
    on_turn: Callable[[Turn], None] | None = None,
    executor: Executor | None = None,
) -> Episode:
    """Play one episode from reset to grading; see the module docstring for what it promises.

    Args:
        seed: the turns' sampling seeds derive from it.
        keep_messages: keep in each turn what the model saw.
        on_turn: called in the event loop after each turn.
        executor: threads for the environment, at least two per episode in flight (the second one ends a stuck step);
            default: two of the episode's own.

    Raises:
        UserError: the task, the strategy or the sandbox cannot be had as configured.
    """
    env = CodingEnv(
        task,
        token_counter=encoder.count,
        strategy=config.env.strategy,
        strategy_options=config.env.strategy_options,
        max_turns=config.env.max_turns,
        on_overflow=config.env.on_overflow,
        sandbox=config.env.sandbox,
        merge_tail=encoder.merges_tail,
    )
    task = env.task
    play = _Play(
        policy=policy,
        env=env,
        encoder=encoder,
        config=config,
        seed=seed,
        keep_messages=keep_messages,
        on_turn=on_turn,
        episode=Episode(
            episode_id=episode_id,
            group_id=group_id,
            task_id=task.id,
            family=task.family,
            pressure=task.pressure,
            window=env.window,
        ),
    )
    if executor is not None:
        return await play.run(executor)
    own = ThreadPoolExecutor(2, thread_name_prefix="episode")
    try:
        return await play.run(own)
    finally:
        own.shutdown(wait=False)


@dataclass
class _Play:
    """One episode under way. ``unanswered`` is the turn whose reply the environment is working on."""

    policy: Policy
    env: CodingEnv
    encoder: PromptEncoder
    config: Config
    seed: int
    keep_messages: bool
    on_turn: Callable[[Turn], None] | None
    episode: Episode
    unanswered: Turn | None = None
    thread: _EnvThread = field(init=False)

    async def run(self, threads: Executor) -> Episode:
        began = time.monotonic()
        self.thread = _EnvThread(self.env, threads)
        limit = self.config.rollout.episode_timeout_s
        share = min(_END_MAX_S, limit * _END_SHARE)
        try:
            async with asyncio.timeout(limit - 3 * share):
                try:
                    await self._loop()
                except TimeoutError as e:  # a part's own; the deadline itself comes here as a cancellation
                    raise InfrastructureError(str(e) or "a part timed out") from e
        except TimeoutError:
            await self._end_late(share, limit)
        except UserError:
            raise
        except Exception as e:
            self._failed(e)
        finally:
            await self.thread.close(share)
        episode = self.episode
        budgets = [turn.budget_used for turn in episode.turns]
        if episode.stop_reason is StopReason.WINDOW_OVERFLOW:
            budgets.append(1.0)  # the prompt that did not fit was never sent, but it filled the window
        if budgets:
            episode.penalty = penalty(budgets, self.config.reward)
        if episode.valid:
            episode.reward = reward(episode.success, budgets, self.config.reward)
        episode.seconds = time.monotonic() - began
        return episode

    async def _loop(self) -> None:
        obs, _ = await self.thread.call(self.env.reset)
        done = False
        while not done:
            index = len(self.episode.turns)
            sample = await self.policy.act(self.env, obs, self.encoder, derive_seed(self.seed, index))
            self.unanswered = Turn(
                index=index,
                sample=sample,
                budget_used=len(sample.prompt_ids) / self.env.window,
                messages=tuple(obs["messages"]) if self.keep_messages else (),
                ledger=tuple(obs["ledger"]),
            )
            result = await self.thread.call(self.env.step, sample.text)
            obs, done = result[0], self._answered(result)

    def _answered(self, result: _Result) -> bool:
        """Record the turn that the environment has answered; returns whether the episode is over."""
        *_, terminated, truncated, info = result
        events = (*info["events"], *({"event": "outcome", "text": text} for text in info["outcomes"]))
        self.episode.metrics = info["metrics"]
        done = terminated or truncated
        if done:
            self.episode.stop_reason, self.episode.success = info["stop_reason"], float(info["success"])
        self._record(events)
        return done

    def _record(self, events: tuple[dict[str, Any], ...] = ()) -> None:
        assert self.unanswered is not None
        turn = replace(self.unanswered, events=events)
        self.unanswered = None
        self.episode.turns.append(turn)
        if self.on_turn is not None:
            self.on_turn(turn)

    async def _end_late(self, share: float, limit: float) -> None:
        """The deadline has passed: take what the running step still gives, else grade what there is."""
        result = await self.thread.late_result(share)
        try:
            if self.unanswered is not None and result is not None and self._answered(result()):
                return
            if self.unanswered is not None:
                self._record()
            if not self.episode.turns:
                raise InfrastructureError(f"not one turn was over within {limit:g} s")
            self.episode.stop_reason = StopReason.DEADLINE
            async with asyncio.timeout(share):
                self.episode.success = await self.thread.call(self.env.finish, StopReason.DEADLINE)
            if self.env.success is None:  # the step that was left to itself is grading still
                raise TimeoutError
        except TimeoutError:  # a zero that nobody measured would be a lie
            self._failed(InfrastructureError(f"grading did not end within {limit:g} s after the start of the episode"))
        except UserError:
            raise
        except Exception as e:
            self._failed(e)

    def _failed(self, reason: Exception) -> None:
        episode = self.episode
        episode.stop_reason, episode.success = StopReason.INFRASTRUCTURE, 0.0
        if isinstance(reason, InfrastructureError):
            episode.error = str(reason)
        else:
            episode.error = f"{type(reason).__name__}: {reason}"
            _log.error("episode %s failed unexpectedly", episode.episode_id, exc_info=reason)


class _EnvThread:
    """Calls of one environment, made in threads; it ends them and the environment when time is up."""

    def __init__(self, env: CodingEnv, threads: Executor) -> None:
        self._env = env
        self._threads = threads
        self._last: Future[Any] | None = None

    async def call(self, function: Callable[..., _T], *args: Any) -> _T:
        """Run ``function`` in a thread. Cancelling this leaves a call that has begun to itself."""
        future = self._threads.submit(function, *args)
        self._last = future
        return await asyncio.wrap_future(future)

    async def late_result(self, seconds: float) -> Callable[[], Any] | None:
        """Wait that long for the call that was left to itself; its result (or what it raised) when called."""
        last = self._last
        if last is None or last.cancelled():
            return None
        if not last.done():
            waiting = asyncio.wrap_future(last)
            waiting.add_done_callback(lambda f: f.cancelled() or f.exception())  # looked at, or asyncio complains
            await asyncio.wait([waiting], timeout=seconds)
        return last.result if last.done() and not last.cancelled() else None

    async def close(self, seconds: float) -> None:
        """Close the environment; wait for it that long at most. It is closed also when this is cancelled."""
        await asyncio.wait([asyncio.wrap_future(self._threads.submit(self._close))], timeout=seconds)

    def _close(self) -> None:
        last = self._last
        try:
            self._env.close()  # ends a command that is still running
            if last is not None and not last.done():  # it may be starting a sandbox just now
                last.add_done_callback(lambda _: self._env.close())
        except Exception:
            _log.exception("closing task %s failed", self._env.task.id)
