"""A run around the trainer: tasks, records, the run folder, and a policy server that dies (S9, S11, DESIGN 6.8)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from selfgc_envs.errors import InfrastructureError, ServerError, UserError
from selfgc_rl import live_policy
from selfgc_rl.config import Config, parse_config
from selfgc_rl.live_policy import MAX_RESTARTS, LivePolicy
from selfgc_rl.metrics import MetricsLog, episode_metrics
from selfgc_rl.rollout import draw_tasks
from selfgc_rl.training import train
from test_advantages import make_group

# -- tasks ------------------------------------------------------------------------------------------------------------


def test_the_tasks_of_a_step_are_a_function_of_seed_and_step() -> None:
    config = parse_config({"train": {"seed": 3}})
    assert draw_tasks(config, 5) == draw_tasks(config, 5)
    assert draw_tasks(config, 5) != draw_tasks(config, 6)
    assert draw_tasks(config, 5) != draw_tasks(parse_config({"train": {"seed": 4}}), 5)
    # whatever else was asked before, and however many steps the run has
    longer = parse_config({"train": {"seed": 3, "steps": 500}})
    assert draw_tasks(longer, 5) == draw_tasks(config, 5)


def test_no_task_comes_twice_and_none_is_held_out() -> None:
    config = parse_config({"env": {"families": ["a", "b", "c"]}, "rollout": {"groups_per_step": 4}})
    specs = [spec for step in range(2000) for spec in draw_tasks(config, step)]
    assert len({seed for _, seed in specs}) == len(specs)
    assert all(0 <= seed < 1_000_000 for _, seed in specs)
    assert [family for family, _ in specs[:5]] == ["a", "b", "c", "a", "b"]


# -- records ----------------------------------------------------------------------------------------------------------


def test_a_resumed_log_loses_the_steps_after_the_checkpoint_and_the_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in (1, 2, 3):
        log.write({"step": step, "loss": float("nan"), "seconds": {"train": 1.0}})
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    MetricsLog(path, steps_done=2).write({"step": 3, "again": True})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[2]["again"] and lines[0]["loss"] is None


def test_a_new_run_starts_with_an_empty_log(tmp_path: Path) -> None:
    MetricsLog(tmp_path / "metrics.jsonl").write({"step": 1})
    MetricsLog(tmp_path / "metrics.jsonl")
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_episode_metrics_are_over_valid_episodes() -> None:
    group = make_group("g", [1.0, 0.0, 0.9], [True, True, False])
    group[0].success, group[0].penalty = 1.0, 0.25
    group[0].metrics = {"folds": 3.0, "work_calls": 6.0, "management_calls": 3.0, "invalid_calls": 1.0}
    figures = episode_metrics([group])
    assert (figures["reward"], figures["success"], figures["penalty"]) == (0.5, 0.5, 0.125)
    assert (figures["folds"], figures["drops"]) == (1.5, 0.0)
    assert figures["invalid_rate"] == pytest.approx(0.1)
    assert (figures["episodes"], figures["invalid_episodes"]) == (3, 1)
    assert figures["stop_reasons"] == {"infrastructure": 1, "submitted": 2}
    assert (figures["budget_p50"], figures["budget_max"], figures["turns"]) == (0.5, 0.5, 1.0)


def test_nothing_to_measure_is_none_not_zero() -> None:
    figures = episode_metrics([make_group("g", [1.0], [False])])
    assert figures["reward"] is None and figures["budget_p95"] is None and figures["folds"] is None


# -- the run folder ---------------------------------------------------------------------------------------------------


def test_a_run_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "something").write_text("")
    with pytest.raises(UserError, match=r"is not empty → add --resume"):
        train(Config(), tmp_path, resume=False)
    assert [p.name for p in tmp_path.iterdir()] == ["something"]


def test_resuming_a_run_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        train(Config(), tmp_path / "none", resume=True)
    assert not (tmp_path / "none").exists()


def test_an_unknown_family_is_refused_before_anything_starts(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = parse_config({"model": {"path": str(tiny_model_dir), "adapter": None}, "env": {"families": ["none"]}})
    with pytest.raises(UserError, match="unknown task family 'none'"):
        train(config, tmp_path / "run", resume=False)


# -- the live policy --------------------------------------------------------------------------------------------------


class FakeServer:
    """Stands for a server process; ``dead`` is what the test switches."""

    opened = 0

    def __init__(self) -> None:
        FakeServer.opened += 1
        self.url, self.base_model, self.dead = f"http://127.0.0.1:{FakeServer.opened}", "base", False

    def alive(self) -> bool:
        return not self.dead

    def failure(self) -> str:
        return "out of memory"

    def stop(self) -> None:
        self.dead = True


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Replaces server and HTTP by fakes; collects (url, version) of each publish."""
    seen: list[tuple[str, str]] = []

    def load(self: Any, url: str, adapter_dir: Path, version: str) -> None:
        seen.append((url, version))

    FakeServer.opened = 0
    monkeypatch.setattr(live_policy.VLLMServer, "open", lambda *_, **__: FakeServer())
    monkeypatch.setattr(live_policy.AdapterPublisher, "_load", load)
    monkeypatch.setattr(live_policy.AdapterPublisher, "_unload", lambda *_: None)
    monkeypatch.setattr("selfgc_rl.adapters.check_adapter", lambda _: 1)
    return seen


def make_live(tmp_path: Path, said: list[str], **server: Any) -> LivePolicy:
    return LivePolicy(
        tmp_path,
        parse_config({"server": server}),
        name="run",
        lora_rank=8,
        log_path=tmp_path / "server.log",
        say=said.append,
    )


def test_a_server_that_dies_is_restarted_and_the_step_is_played_again(tmp_path: Path, published: list) -> None:
    said: list[str] = []
    live = make_live(tmp_path, said)
    first = live.publish(tmp_path, 4)
    plays = 0

    def collect() -> list:
        nonlocal plays
        plays += 1
        if plays == 1:
            live.server.dead = True  # type: ignore[attr-defined]
            return [make_group("g", [0.0, 0.0], [False, False])]
        return [make_group("g", [1.0, 0.0])]

    groups = live.rollouts(collect)
    assert plays == 2 and [e.reward for e in groups[0]] == [1.0, 0.0]
    assert said == [f"the vLLM server died (out of memory); starting it again (1 of {MAX_RESTARTS})"]
    (url, _), (new_url, version) = published
    assert url != new_url == live.engine.url and live.engine.model == version
    assert version != first and "-v0004" in version  # the same weights, yet a name of its own


def test_a_server_that_dies_while_publishing_is_restarted(tmp_path: Path, published: list, monkeypatch) -> None:
    live = make_live(tmp_path, [])
    load = live_policy.AdapterPublisher._load

    def fail_once(self: Any, url: str, adapter_dir: Path, version: str) -> None:
        if live.restarts == 0:
            live.server.dead = True  # type: ignore[attr-defined]
            raise ServerError("connection refused")
        load(self, url, adapter_dir, version)

    monkeypatch.setattr(live_policy.AdapterPublisher, "_load", fail_once)
    assert live.engine.model == "base"
    assert live.publish(tmp_path, 1) == live.engine.model == published[0][1]


def test_a_server_that_dies_again_and_again_ends_the_run(tmp_path: Path, published: list) -> None:
    live = make_live(tmp_path, [])
    live.publish(tmp_path, 0)

    def collect() -> list:
        live.server.dead = True  # type: ignore[attr-defined]
        raise ServerError("connection refused")

    with pytest.raises(ServerError, match="died 4 times, at last: out of memory"):
        live.rollouts(collect)


def test_a_server_that_is_not_ours_is_not_restarted(tmp_path: Path, published: list) -> None:
    live = make_live(tmp_path, [], url="http://127.0.0.1:1")
    live.publish(tmp_path, 0)
    live.server.dead = True  # type: ignore[attr-defined]
    with pytest.raises(ServerError, match="start it again, then go on with --resume"):
        live.rollouts(lambda: [])


def test_a_step_in_which_every_episode_failed_ends_the_run_with_the_reason(tmp_path: Path, published: list) -> None:
    live = make_live(tmp_path, [])
    live.publish(tmp_path, 0)
    group = make_group("g", [0.0, 0.0], [False, False])
    group[0].error = "bwrap: no permission"
    with pytest.raises(InfrastructureError, match="every episode of the step failed: bwrap: no permission"):
        live.rollouts(lambda: [group])


def test_version_names_differ_between_attempts_of_one_run(tmp_path: Path, published: list) -> None:
    """A resumed run trains step N again, to other weights: the name must not find the first attempt's cache."""
    names = {make_live(tmp_path, []).publish(tmp_path, 1) for _ in range(3)}
    assert len(names) == 3
