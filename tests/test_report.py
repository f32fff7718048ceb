"""Figures of a run: drawn from what the run wrote, legible with whatever part of it exists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from selfgc_envs.errors import UserError
from selfgc_rl.report import table_rows, write_report

POLICY = {"success": 0.4, "penalty": 0.2, "folds": 1.0, "drops": 0.5, "expands": 0.0, "turns": 9.0}
BUDGET = [
    {"q25": 0.3, "median": 0.4, "q75": 0.5, "episodes": 8},
    {"q25": 0.7, "median": 0.9, "q75": 1.1, "episodes": 5},
]
RESULTS = {
    "tasks": 8,
    "base": POLICY | {"budget_by_turn": BUDGET},
    "trained": POLICY | {"success": 0.75, "penalty": 0.1, "folds": 2.5, "budget_by_turn": BUDGET[:1]},
    "paired_difference": 0.35,
    "ci95": [0.1, 0.6],
}
PNG = b"\x89PNG\r\n\x1a\n"


def _write_steps(run: Path, steps: int) -> None:
    rows = [{"step": s, "success": 0.1 * s, "penalty": 0.3} for s in range(1, steps + 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9, "succ')


def test_report_is_a_plot_and_one_self_contained_page(tmp_path: Path) -> None:
    _write_steps(tmp_path, 3)
    (tmp_path / "results.json").write_text(json.dumps(RESULTS))
    png, page = write_report(tmp_path)
    assert png.read_bytes().startswith(PNG)
    text = page.read_text()
    assert "data:image/png;base64," in text and "http" not in text.replace("http-equiv", "")
    assert "+0.350" in text and "[+0.100, +0.600]" in text
    assert {p.name for p in tmp_path.iterdir()} == {"metrics.jsonl", "results.json", "report.png", "report.html"}


def test_a_run_without_evaluation_still_has_a_plot(tmp_path: Path) -> None:
    _write_steps(tmp_path, 1)
    png, page = write_report(tmp_path)
    assert png.read_bytes().startswith(PNG)
    assert "selfgc-rl eval" in page.read_text()


def test_names_from_outside_are_escaped_in_the_page(tmp_path: Path) -> None:
    run = tmp_path / "<b>run"
    run.mkdir()
    _write_steps(run, 1)
    _, page = write_report(run)
    assert "<b>run" not in page.read_text()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "neither metrics.jsonl nor results.json"),
        ("{}", "no evaluation's results"),
        ("[", "no evaluation's results"),
    ],
)
def test_nothing_to_report_is_a_user_error(tmp_path: Path, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(UserError, match=says):
        write_report(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        write_report(tmp_path / "nowhere")


def test_table_shows_both_policies_and_the_interval() -> None:
    rows = table_rows(RESULTS)
    assert rows[0] == ("success", "0.400", "0.750")
    assert rows[-1][0] == "paired difference of success" and "[+0.100, +0.600]" in rows[-1][2]
