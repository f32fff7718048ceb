"""The command line: every failure is one line that names the remedy, with its exit code; --help is instant."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from selfgc_envs.errors import ServerError
from selfgc_rl import cli
from selfgc_rl.config import Config, load_config

ROOT = Path(__file__).parents[1]
ENV = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'envs'}", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def run_cli(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command, in this process."""
    try:
        code = cli.main(words)
    except SystemExit as e:
        code = int(e.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def assert_one_line(err: str, *parts: str) -> None:
    assert err.startswith("selfgc-rl: error: ") and err.count("\n") == 1, err
    for part in parts:
        assert part in err


def test_help_is_instant() -> None:
    """Under half a second; measured in CPU seconds, which a busy machine does not stretch as it does the clock."""
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-m", "selfgc_rl.cli", "--help"], env=ENV, capture_output=True, text=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0 and "train" in done.stdout
    assert statistics.median(seconds) < 0.5  # 0.06 s when this was written


def test_help_imports_nothing_heavy() -> None:
    script = "import sys; from selfgc_rl import cli; cli.build_parser().format_help(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], env=ENV, capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {
        "torch",
        "transformers",
        "trl",
        "vllm",
        "peft",
        "numpy",
        "gymnasium",
        "pydantic",
        "rich",
        "wandb",
    }


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["train", "--config", "nowhere.yaml"], ["'nowhere.yaml' does not exist", "configs/"]),
        (["train", "--dry-run", "train.stepz=3"], ["unknown key 'train.stepz'", "known keys", "steps"]),
        (["train", "--dry-run", "--set", "train.steps=many"], ["train.steps", "many"]),
        (["train", "--dry-run", "nonsense"], ["override 'nonsense'", "section.key=value"]),
        (
            ["train", "--dry-run", "model.path=/nowhere", "model.adapter=null"],
            ["'/nowhere' does not exist", "model.path"],
        ),
        (["train", "--resume"], ["--resume", "--run DIR"]),
        (["train", "--frobnicate"], ["--frobnicate", "--help"]),
        (["tasks", "show", "unheard-of"], ["unknown task family 'unheard-of'", "one of"]),
        (["tasks", "show", "chain:nano:x"], ["chain:nano:x", "e.g."]),
        (["report", "/nowhere"], ["'/nowhere' does not exist"]),
        (["export", "/nowhere", "--to", "x"], ["'/nowhere' is not a folder"]),
        (["serve", "/nowhere"], ["'/nowhere' is no export", "selfgc-rl export"]),
        (["serve", "/nowhere", "--port", "70000"], ["70000"]),
        (["eval"], ["--run", "--help"]),
        (["eval", "--adapter", "/nowhere"], ["'/nowhere' is not a folder"]),
        (["play", "unheard-of"], ["unknown task family 'unheard-of'", "one of"]),
        (["play", "chain", "--policy", "scripted:napping"], ["unknown style 'napping'", "fold_drop"]),
        (["play", "chain", "--policy", "me"], ["unknown policy 'me'", "scripted:STYLE"]),
        (["demo", "train.stepz=1"], ["unknown key 'train.stepz'"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], words: list[str], parts: list[str]
) -> None:
    code, _, err = run_cli(capsys, *words)
    assert code == 2
    assert_one_line(err, *parts)


def test_unknown_key_in_a_config_file_names_file_and_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "my.yaml"
    config.write_text("train: {learning_rat: 1}")
    code, _, err = run_cli(capsys, "train", "--dry-run", "--config", str(config))
    assert code == 2
    assert_one_line(err, str(config), "train.learning_rat", "learning_rate")


def test_a_used_run_folder_is_not_trained_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}")
    code, _, err = run_cli(capsys, "train", "--run", str(tmp_path))
    assert code == 2
    assert_one_line(err, "not empty", "--resume")


def _command_that(monkeypatch: pytest.MonkeyPatch, run: object) -> None:
    monkeypatch.setattr(cli.importlib, "import_module", lambda _: SimpleNamespace(run=run))


def test_a_part_that_died_is_exit_code_3_with_its_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: SimpleNamespace) -> int:
        args.log_path = "runs/x/server.log"
        raise ServerError("the server\nis gone")

    _command_that(monkeypatch, run)
    code, _, err = run_cli(capsys, "report", "x")
    assert code == 3
    assert_one_line(err, "the server is gone", "runs/x/server.log")


def test_interrupt_is_exit_code_130_and_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: SimpleNamespace) -> int:
        args.resume_hint = "selfgc-rl train --run r --resume"
        raise KeyboardInterrupt

    _command_that(monkeypatch, run)
    code, _, err = run_cli(capsys, "report", "x")
    assert code == 130
    assert "selfgc-rl train --run r --resume" in err


def test_a_bug_and_debug_show_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: SimpleNamespace) -> int:
        raise ServerError("gone") if args.debug else ZeroDivisionError

    _command_that(monkeypatch, run)
    with pytest.raises(ZeroDivisionError):
        cli.main(["report", "x"])
    with pytest.raises(ServerError):
        cli.main(["report", "x", "--debug"])
    with pytest.raises(ServerError):
        cli.main(["--debug", "report", "x"])


def test_a_missing_extra_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: SimpleNamespace) -> int:
        raise ModuleNotFoundError("No module named 'trl'", name="trl")

    _command_that(monkeypatch, run)
    code, _, err = run_cli(capsys, "report", "x")
    assert code == 2
    assert_one_line(err, "'trl'", "pip install")


def test_overrides_may_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    args = cli._parse(["train", "a.b=1", "--run", "r", "--set", "e.f=3", "c.d=2"])
    assert sorted(args.overrides) == ["a.b=1", "c.d=2", "e.f=3"]
    with pytest.raises(SystemExit):
        cli._parse(["report", "r", "a.b=1"])


def test_dry_run_prints_the_plan_and_starts_nothing(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model_dir
    run_dir = tmp_path / "run"
    words = [f"model.path={model}", "model.adapter=null", "env.window=512", "rollout.group_size=3"]
    words += ["server.port=8765", "env.pressure=1.5", "rollout.groups_per_step=4"]
    code, out, err = run_cli(capsys, "train", "--dry-run", "--run", str(run_dir), *words)
    assert code == 0, err
    assert not run_dir.exists()
    text = " ".join(out.split())
    for part in ("chain, bugchain", "pressure 1.5", "window 512", "4 tasks × 3 episodes = 12 episodes", str(model)):
        assert part in text
    for part in ("fresh LoRA of rank 32", "--enable-lora", "--port 8765", "memory (estimate)", "GiB", "checkpoints"):
        assert part in text


def test_shipped_config_is_what_the_demo_uses() -> None:
    from selfgc_rl.demo import demo_config

    assert load_config(ROOT / "configs" / "smollm2-cpu.yaml") == demo_config()


def test_shipped_config_names_only_real_keys_and_comments_each_group() -> None:
    text = (ROOT / "configs" / "smollm2-cpu.yaml").read_text()
    lines = text.splitlines()
    for section in yaml.safe_load(text):
        assert section in Config.model_fields
        assert lines[lines.index(f"{section}:") - 1].startswith("#"), f"group '{section}' has no comment"


def test_tasks_list_names_every_family(capsys: pytest.CaptureFixture[str]) -> None:
    from selfgc_envs.tasks import list_families

    code, out, _ = run_cli(capsys, "tasks", "list")
    assert code == 0
    for family in list_families():
        assert family.name in out
    assert "held out" in out


def test_tasks_show_prints_instruction_and_files(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_cli(capsys, "tasks", "show", "chain:nano:7", "--model", str(tiny_model_dir))
    assert code == 0, err
    assert "chain:nano:7:1.2:1024" in out and "tokens" in out


def test_play_shows_calls_ledger_and_budget_of_each_turn(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["chain:nano:1:1.2:4096", "--policy", "scripted:fold_drop", "--model", str(tiny_model_dir)]
    code, out, err = run_cli(capsys, "play", *words)
    assert code == 0, err
    for part in (
        "turn 1",
        "budget ",
        "of 4096 tokens",
        '"run_bash"',
        '"fold"',
        "obs_001",
        "folded",
        "submitted: success 1",
    ):
        assert part in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_cli(capsys, "--version")
    assert code == 0 and out.strip()
    assert json.dumps(out.strip())[1].isdigit()
