"""The demo's bookkeeping: stages run once, an interruption loses nothing, the results hold what was promised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from selfgc_envs.errors import UserError
from selfgc_rl import demo
from selfgc_rl.demo import STAGES, DemoState, assemble_results, demo_config, run_demo, set_aside, step_line

EVALUATION = {"tasks": 64, "base": {"success": 0.4}, "trained": {"success": 0.7}, "paired_difference": 0.3}
EVALUATION |= {"ci95": [0.1, 0.5], "penalty_before": 0.2, "penalty_after": 0.1}
ROW = {"step": 2, "success": 0.5, "penalty": 0.12, "folds": 1.5, "drops": None, "logprob_gap_mean": 3e-6}
ROW |= {"logprob_gap_max": 2e-4, "seconds": {"rollout": 60.0, "train": 40.0, "publish": 0.1}}


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stages that only note that they ran; ``report`` writes the results."""
    ran: list[str] = []

    def make(name: str) -> Any:
        def stage(self: Any) -> None:
            ran.append(name)
            if name == "report":
                results = assemble_results(EVALUATION, [ROW], self.state)
                (self.run_dir / "results.json").write_text(json.dumps(results))

        return stage

    for stage in STAGES:
        monkeypatch.setattr(demo._Demo, stage.name, make(stage.name))
    return ran


def test_a_finished_demo_only_reads_its_results(tmp_path: Path, stages: list[str]) -> None:
    said: list[str] = []
    first = run_demo(demo_config(), tmp_path / "demo", say=said.append)
    assert stages == [stage.name for stage in STAGES]
    assert any("min left" in line for line in said) and said[0].startswith(f"[1/{len(STAGES)}]")
    assert run_demo(demo_config(), tmp_path / "demo", say=said.append) == first
    assert len(stages) == len(STAGES)


def test_an_interrupted_demo_goes_on_with_the_stage_it_was_in(
    tmp_path: Path, stages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo._Demo, "evaluate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_demo(demo_config(), tmp_path / "demo", say=lambda line: None)
    said: list[str] = []
    results = run_demo(demo_config(), tmp_path / "demo", say=said.append)
    assert stages == ["train", "evaluate", "export", "report"]
    assert "(going on)" in said[0]
    assert set(results["minutes_by_stage"]) >= {"train", "evaluate", "export"}


def test_other_settings_and_other_folders_are_refused(tmp_path: Path, stages: list[str]) -> None:
    run_demo(demo_config(), tmp_path / "demo", say=lambda line: None)
    with pytest.raises(UserError, match="other settings.*--fresh"):
        run_demo(demo_config(["train.steps=3"]), tmp_path / "demo", say=lambda line: None)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="no demo's run folder"):
        run_demo(demo_config(), tmp_path / "mine", say=lambda line: None)
    (tmp_path / "demo" / "state.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        DemoState.open(tmp_path / "demo", demo_config())


def test_fresh_sets_the_old_run_aside(tmp_path: Path, stages: list[str]) -> None:
    assert set_aside(tmp_path / "demo") is None
    run_demo(demo_config(), tmp_path / "demo", say=lambda line: None)
    old = set_aside(tmp_path / "demo")
    assert old and (old / "results.json").is_file() and not (tmp_path / "demo").exists()


def test_results_hold_what_was_promised(tmp_path: Path) -> None:
    state = DemoState(tmp_path / "state.json", {}, ["train"], {"train": 600.0, "evaluate": 120.0})
    results = assemble_results(EVALUATION, [ROW, ROW | {"step": 3}], state)
    assert results["base"]["success"] == 0.4 and results["trained"]["success"] == 0.7
    for key in ("paired_difference", "ci95", "penalty_before", "penalty_after"):
        assert results[key] == EVALUATION[key]
    assert results["minutes"] == 12.0
    assert results["training"]["logprob_gap_mean"] == [3e-6, 3e-6]
    assert results["training"]["seconds"][0]["rollout"] == 60.0 and results["training"]["step"] == [2, 3]


def test_a_step_line_tells_exactness_time_and_what_is_left() -> None:
    line = step_line(ROW, 8, 20.4)
    for part in (
        "step 2/8",
        "success 0.50",
        "gap 3.0e-06",
        "rollout 60.0 s",
        "train 40.0 s",
        "publish 0.1 s",
        "20 min",
    ):
        assert part in line
    assert "drops -" in line


def test_steps_are_reported_once_and_only_new_ones(tmp_path: Path) -> None:
    from selfgc_rl.metrics import MetricsLog

    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(ROW | {"step": 1})
    log.write(ROW | {"step": 2})  # its checkpoint was not finished: this step is done again
    checkpoint = tmp_path / "checkpoints" / "checkpoint-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "selfgc_state.json").write_text("{}")
    said: list[str] = []
    with demo._step_lines(tmp_path, 3, 5.0, said.append):
        log = MetricsLog(tmp_path / "metrics.jsonl", 1)
        log.write(ROW | {"step": 2})
        log.write(ROW | {"step": 3})
    assert [line.split(":")[0].strip() for line in said] == ["step 2/3", "step 3/3"]


def test_time_left_counts_down_with_the_stages(tmp_path: Path) -> None:
    state = DemoState(tmp_path / "state.json", {})
    whole = state.minutes_left()
    state.seconds["train"] = 60.0
    assert state.minutes_left() == pytest.approx(whole - 1)
    state.done.append("train")
    assert state.minutes_left() == pytest.approx(sum(stage.minutes for stage in STAGES[1:]))
