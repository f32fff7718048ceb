"""CodingEnv: one episode of a coding task inside a hard token window, on the Gymnasium API.

The only owner of episode state: ledger, transcript, sandbox, turn counter. An action is the assistant text (or a list
of calls); an observation carries the messages of the next prompt, the ledger rows and the budget. Invariants:

* any text gives an observation, never an exception: what the model got wrong is told to it (policy failure); only a
  sandbox that died raises (:class:`~selfgc_envs.errors.SandboxError`, infrastructure);
* ``budget_used = tokens(messages as sent) / window``, tail included, by the counter that was handed in;
* management calls leave no residue: their outcome stands in the next tail and nowhere else;
* the episode ends by submission, overflow, turn limit or deadline, and is graded as it stands, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import gymnasium as gym
from gymnasium import spaces

from selfgc_envs.actions import MANAGEMENT_TOOLS, CallError, ToolCall, parse_action
from selfgc_envs.errors import UserError
from selfgc_envs.grading import grade
from selfgc_envs.ledger import Kind, Ledger, State, one_line
from selfgc_envs.sandbox import PathError, Sandbox, create_sandbox
from selfgc_envs.strategies import Strategy, make_strategy
from selfgc_envs.tasks import Task, parse_task
from selfgc_envs.view import (
    Entry,
    Message,
    append_tail,
    ledger_rows,
    render_entry,
    system_prompt,
    tail_text,
)

LEDGER_SHARE = 0.15  # of the window, at least LEDGER_MIN_TOKENS
LEDGER_MIN_TOKENS = 200


class StopReason(StrEnum):
    """Why an episode ended. ``INFRASTRUCTURE`` is the only one that is not graded."""

    SUBMITTED = "submitted"
    WINDOW_OVERFLOW = "window_overflow"
    MAX_TURNS = "max_turns"
    DEADLINE = "deadline"
    INFRASTRUCTURE = "infrastructure"


_KIND_OF_TOOL = {
    "read_file": Kind.FILE,
    "run_bash": Kind.OBSERVATION,
    "list_files": Kind.OBSERVATION,
    "plan": Kind.PLAN,
    "write_file": Kind.RESULT,
    "str_replace": Kind.RESULT,
}


class AnyText(spaces.Space[str]):
    """All strings. Gymnasium's ``Text`` space fixes an alphabet; a model's reply has none."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return "".join(chr(int(c)) for c in self.np_random.integers(32, 127, size=int(self.np_random.integers(0, 80))))

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnyText)


class AnyRecord(spaces.Space[dict[str, Any]]):
    """Observation dicts with the keys ``messages``, ``ledger``, ``budget_used`` and ``prompt_tokens``."""

    keys = ("messages", "ledger", "budget_used", "prompt_tokens")

    def __init__(self) -> None:
        super().__init__(None, None)

    def sample(self, mask: Any = None, probability: Any = None) -> dict[str, Any]:
        return {"messages": [], "ledger": [], "budget_used": 0.0, "prompt_tokens": 0}

    def contains(self, x: Any) -> bool:
        return isinstance(x, dict) and set(x) == set(self.keys)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnyRecord)


class CodingEnv(gym.Env[dict[str, Any], Any]):
    """One coding task in a hard window.

    Args:
        task: a :class:`Task` or ``"family:level:seed:pressure[:window]"``.
        strategy: name of the context strategy; ``strategy_options`` its options.
        window: token window; default: the task's.
        token_counter: messages → number of prompt ids as sent, generation prompt included.
        max_turns: turn limit.
        on_overflow: ``terminate`` (stop reason ``window_overflow``) or ``auto_fold`` (fold oldest unprotected objects).
        sandbox: ``bwrap`` or ``none``.
        merge_tail: merge the tail into the message before it (templates that forbid two user messages in a row).

    Raises:
        UserError: unknown task, strategy or option; a window too small for system prompt, task and tail.
        SandboxError: the sandbox cannot be started.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 1}

    def __init__(
        self,
        task: Task | str,
        *,
        token_counter: Callable[[Sequence[Message]], int],
        strategy: str = "selfgc",
        strategy_options: Mapping[str, Any] | None = None,
        window: int | None = None,
        max_turns: int = 14,
        on_overflow: str = "terminate",
        sandbox: str = "bwrap",
        merge_tail: bool = False,
        render_mode: str | None = None,
    ) -> None:
        self.task = parse_task(task, token_counter=token_counter) if isinstance(task, str) else task
        self.strategy: Strategy = make_strategy(strategy, strategy_options)
        self.window = window or self.task.window
        self.render_mode = render_mode
        if on_overflow not in ("terminate", "auto_fold"):
            raise UserError(f"on_overflow '{on_overflow}' is not available", "terminate or auto_fold")
        self._count = token_counter
        self._empty_tool = token_counter([{"role": "system", "content": "."}, {"role": "tool", "content": ""}])
        self._max_turns = max_turns
        self._on_overflow = on_overflow
        self._sandbox_kind = sandbox
        self._merge_tail = merge_tail
        self._sandbox: Sandbox | None = None
        self.action_space = AnyText()
        self.observation_space = AnyRecord()
        self._clear()

    # -- Gymnasium ---------------------------------------------------------------------------------------------
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.close()
        self._clear()
        self._sandbox = create_sandbox(self._sandbox_kind, self.task.files, self.task.executables)
        obs = self._observe()
        if obs["prompt_tokens"] > self.window:
            self.close()
            raise UserError(
                f"window {self.window} is smaller than the fixed overhead of task '{self.task.id}'",
                f"use a window above {obs['prompt_tokens']} tokens",
            )
        return obs, self._info(())

    def step(self, action: str | Sequence[ToolCall]) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        if self._sandbox is None or self.stop_reason is not None:
            raise gym.error.ResetNeeded("call reset() before step()")
        first_event = len(self.ledger.events)
        self._outcomes.clear()
        submitted = self._act(action)
        self.turn += 1
        obs = self._observe()
        if submitted:
            self._finish(StopReason.SUBMITTED)
        elif obs["prompt_tokens"] > self.window and not self._make_room():
            self._finish(StopReason.WINDOW_OVERFLOW)
        elif self.turn >= self._max_turns:
            self._finish(StopReason.MAX_TURNS)
        if self.metrics["auto_folds"] and self.stop_reason is None:
            obs = self._observe()
        done = self.stop_reason is not None
        truncated = self.stop_reason is StopReason.MAX_TURNS
        reward = float(self.success or 0.0) if done else 0.0
        return obs, reward, done and not truncated, truncated, self._info(tuple(self.ledger.events[first_event:]))

    def finish(self, reason: StopReason) -> float:
        """End the episode from outside (a deadline) and grade it as it stands. Returns the success in [0, 1]."""
        if self.stop_reason is None:
            self._finish(reason)
        return float(self.success or 0.0)

    def render(self) -> str | None:
        """Ledger, budget and the last turn as text (``render_mode="ansi"``)."""
        if self.render_mode != "ansi":
            return None
        head = f"{self.task.id}  turn {self.turn}  {self.strategy.name}"
        last = [m for e in self.transcript[-1:] for m in render_entry(e, self.ledger)]
        return "\n".join([head, self._last_tail, *(f"{m['role']}: {m['content']}" for m in last)])

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None

    # -- state -------------------------------------------------------------------------------------------------
    def _clear(self) -> None:
        self.turn = 0
        self.stop_reason: StopReason | None = None
        self.success: float | None = None
        self.ledger = Ledger(
            count_text=self._count_text,
            protect_last=self.strategy.protect_last,
            recoverable=self.strategy.recoverable,
        )
        self.transcript: list[Entry] = []
        self._outcomes: list[str] = []
        self._used = 0
        self._last_tail = ""
        names = ("folds", "drops", "expands", "searches", "invalid_calls", "management_calls", "work_calls")
        self.metrics: dict[str, float] = dict.fromkeys((*names, "tokens_saved", "auto_folds"), 0.0)

    def _count_text(self, text: str) -> int:
        """Tokens a text adds to a tool message."""
        pair = [{"role": "system", "content": "."}, {"role": "tool", "content": text}]
        return max(0, self._count(pair) - self._empty_tool)

    def _info(self, events: tuple[dict[str, Any], ...]) -> dict[str, Any]:
        return {
            "turn": self.turn,
            "events": list(events),
            "outcomes": list(self._outcomes),
            "stop_reason": self.stop_reason,
            "success": self.success,
            "metrics": dict(self.metrics),
        }

    def _finish(self, reason: StopReason) -> None:
        assert self._sandbox is not None
        self.stop_reason = reason
        self.success = grade(self.task, self._sandbox).fraction

    # -- view --------------------------------------------------------------------------------------------------
    def _transcript_messages(self) -> list[Message]:
        return [m for entry in self.transcript for m in render_entry(entry, self.ledger)]

    def _messages(self) -> list[Message]:
        return [
            {"role": "system", "content": system_prompt(self.strategy)},
            {"role": "user", "content": self.task.instruction},
            *self._transcript_messages(),
        ]

    def _observe(self) -> dict[str, Any]:
        """Messages of the next prompt. The tail states the budget of the very prompt it stands in (fixed point)."""
        fixed = self._messages()
        rows = ledger_rows(self.ledger, self.turn)
        cap = max(LEDGER_MIN_TOKENS, int(LEDGER_SHARE * self.window))
        used, messages = self._used, fixed
        for _ in range(4):
            tail = tail_text(
                rows, used_tokens=used, window=self.window, outcomes=self._outcomes,
                show_ledger=self.strategy.show_ledger, row_cap_tokens=cap, count_text=self._count_text,
            )  # fmt: skip
            messages = append_tail(fixed, tail, merge=self._merge_tail)
            counted = self._count(messages)
            if counted == used:
                break
            used = counted
        self._used, self._last_tail = counted, tail
        return {
            "messages": messages,
            "ledger": rows,
            "budget_used": counted / self.window,
            "prompt_tokens": counted,
        }

    # -- acting ------------------------------------------------------------------------------------------------
    def _act(self, action: str | Sequence[ToolCall]) -> bool:
        """Carry out one assistant message; returns whether it submitted."""
        if isinstance(action, str):
            parsed = parse_action(action, self.strategy.tools)
            thought, calls = parsed.thought, parsed.calls
        else:
            thought, calls = "", tuple(action)
        made: list[str] = []
        thought_id = ""
        if thought and any(isinstance(c, ToolCall) and c.name not in MANAGEMENT_TOOLS for c in calls):
            thought_id = self.ledger.add(Kind.THOUGHT, "thought", {}, thought, self.turn).id
        submitted = False
        for call in calls:
            if isinstance(call, CallError):
                self.metrics["invalid_calls"] += 1
                self._outcomes.append(f"error: {one_line(call.message)}")
            elif call.name in MANAGEMENT_TOOLS:
                self._manage(call)
            elif call.name == "submit":
                self.metrics["work_calls"] += 1
                submitted = True
                break
            else:
                self.metrics["work_calls"] += 1
                body, exit_code = self._work(call)
                made.append(
                    self.ledger.add(_KIND_OF_TOOL[call.name], call.name, call.arguments, body, self.turn, exit_code).id
                )
                self.metrics["invalid_calls"] += exit_code is None
        if made or thought_id:
            # expansions made by this message stand before it already; the message's own calls come last
            self.transcript.append(Entry(self.turn, tuple(made), thought_id))
        return submitted

    def _manage(self, call: ToolCall) -> None:
        self.metrics["management_calls"] += 1
        before = self._count_transcript()
        args = call.arguments
        if call.name == "fold":
            outcome, key = self.ledger.fold(args["id"], args.get("summary"), self.turn), "folds"
        elif call.name == "drop":
            outcome, key = self.ledger.drop(args["id"], self.turn), "drops"
        elif call.name == "expand":
            outcome, key = self.ledger.expand(args["id"], self.turn, self.window - self._used), "expands"
            if outcome.ok:
                self.transcript.append(Entry(self.turn, (outcome.object_id,), expansion=True))
        else:
            outcome, key = self.ledger.search(args["query"]), "searches"
        if outcome.ok:
            self.metrics[key] += 1
            self.metrics["tokens_saved"] += max(0, before - self._count_transcript())
            self._outcomes.append(outcome.text)
        else:
            self.metrics["invalid_calls"] += 1
            self._outcomes.append(f"error: {outcome.text}")

    def _count_transcript(self) -> int:
        return self._count(self._messages())

    def _make_room(self) -> bool:
        """``auto_fold``: fold the oldest unprotected objects until the prompt fits; False if it cannot."""
        if self._on_overflow != "auto_fold":
            return False
        for obj in self.ledger.live():
            if obj.state is State.SHOWN and self.ledger.fold(obj.id, None, self.turn).ok:
                self.metrics["auto_folds"] += 1
                if self._observe()["prompt_tokens"] <= self.window:
                    return True
        return False

    def _work(self, call: ToolCall) -> tuple[str, int | None]:
        """Run one work call: (result text, exit code); exit code None marks a call that could not be carried out."""
        assert self._sandbox is not None
        args, box = call.arguments, self._sandbox
        try:
            match call.name:
                case "read_file":
                    return _slice(box.read_text(args["path"]), args.get("start"), args.get("end")), 0
                case "write_file":
                    box.write_text(args["path"], args["content"])
                    return "written", 0
                case "str_replace":
                    return self._replace(args["path"], args["old"], args["new"])
                case "list_files":
                    return "\n".join(box.list_files()) or "(no files)", 0
                case "plan":
                    return args["text"], 0
        except PathError as e:
            return f"error: {e}", None
        result = box.run(args["cmd"])
        notes = [result.output.rstrip("\n")]
        if result.timed_out:
            notes.append("(timed out and was killed)")
        elif result.exit_code:
            notes.append(f"(exit {result.exit_code})")
        if result.restarted:
            notes.append("(the shell died and was restarted: its directory and variables are reset)")
        return "\n".join(
            n for n in notes if n
        ) or "(no output)", result.exit_code if result.exit_code is not None else 124

    def _replace(self, path: str, old: str, new: str) -> tuple[str, int | None]:
        assert self._sandbox is not None
        text = self._sandbox.read_text(path)
        found = text.count(old) if old else 0
        if found != 1:
            return f"error: 'old' occurs {found} times in {path}; it must occur exactly once", None
        self._sandbox.write_text(path, text.replace(old, new))
        return "replaced", 0


def _slice(text: str, start: int | None, end: int | None) -> str:
    """Lines ``start`` to ``end``, 1-based and inclusive."""
    if start is None and end is None:
        return text or "(empty file)"
    lines = text.splitlines()
    return "\n".join(lines[max(0, (start or 1) - 1) : end]) or "(no such lines)"
