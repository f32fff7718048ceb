"""The whole loop on real parts: vLLM, the sandbox, TRL; a tiny random policy at fp32 on both sides (R1, R4, S7-S9).

A random policy solves nothing and its replies change nothing that it sees, so its rewards would be equal: these runs
reward token ids that are small instead.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from selfgc_envs.errors import UserError
from selfgc_rl.checkpoints import complete_checkpoints
from selfgc_rl.config import save_config

if TYPE_CHECKING:
    from selfgc_rl.config import Config
    from selfgc_rl.engines.server import VLLMServer
    from selfgc_rl.types import Sample

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def small_ids(play: Any) -> Any:
    """Wraps a run's rollouts: an episode is rewarded for small token ids."""

    def wrapped(*args: Any) -> Any:
        groups = play(*args)
        for group in groups:
            for episode in group:
                ids = [token for turn in episode.turns for token in turn.sample.sampled_ids]
                episode.reward = -sum(ids) / max(1, len(ids)) / 100
        return groups

    return wrapped


def loop_config(model_dir: Path, url: str, **train: Any) -> Config:
    from selfgc_rl.config import parse_config

    return parse_config(
        {
            "model": {"path": str(model_dir), "adapter": None, "lora_rank": 8, "lora_alpha": 16},
            "env": {"families": ["chain"], "pressure": 0.5, "max_turns": 2},
            "rollout": {"groups_per_step": 2, "group_size": 2, "concurrency": 4, "max_new_tokens": 12},
            "train": {"steps": 2, "learning_rate": 0.05, "token_budget": 2048, "threads": 1, **train},
            "server": {"url": url},
        }
    )


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def sample_from(server: VLLMServer, version: str, prompt: list[int]) -> Sample:
    from selfgc_rl.engines.vllm import VLLMEngine

    async def go() -> Sample:
        async with VLLMEngine(server.url, version, temperature=1.0, max_new_tokens=24) as engine:
            return await engine.sample(prompt, seed=5)

    return asyncio.run(go())


def gaps(model_dir: Path, adapter: Path, sample: Sample) -> torch.Tensor:
    """|log-prob of the model with this adapter - the server's| for each sampled token."""
    from selfgc_rl.models import load_policy

    policy = load_policy(model_dir, adapter, rank=8, alpha=16, dtype="float32", trainable=False)
    with torch.no_grad():
        logits = policy(input_ids=torch.tensor([sample.prompt_ids + sample.sampled_ids])).logits[0]
    logprobs = logits[len(sample.prompt_ids) - 1 : -1].log_softmax(-1)
    ours = logprobs.gather(1, torch.tensor(sample.sampled_ids)[:, None])[:, 0]
    return (ours - torch.tensor(sample.logprobs)).abs()


def test_rollout_step_publish_rollout_is_token_exact(
    vllm_server: VLLMServer, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from selfgc_rl import training

    monkeypatch.setattr(training._Run, "_play", small_ids(training._Run._play))
    config = loop_config(tiny_model_dir, vllm_server.url, keep_checkpoints=2)
    final = training.train(config, tmp_path / "run", resume=False)

    first, second = read_metrics(tmp_path / "run")
    for record in (first, second):
        assert record["logprob_gap_mean"] < 1e-4 and record["logprob_gap_max"] < 1e-3
        assert record["invalid_episodes"] == 0 and record["skipped_groups"] < 2
        assert record["loss"] is not None and record["grad_norm"] > 0
        assert 0 < record["trained_tokens"] <= record["sampled_tokens"]
        assert set(record["seconds"]) == {"rollout", "train", "publish"}
    assert first["policy_version"] != second["policy_version"]

    prompt = list(range(3, 60))
    sample = sample_from(vllm_server, second["policy_version"], prompt)
    assert float(gaps(tiny_model_dir, final, sample).mean()) < 1e-4
    untrained = tmp_path / "run" / "adapters" / "v0000"
    assert float(gaps(tiny_model_dir, untrained, sample).mean()) > 1e-2  # a server with stale weights would show
    with pytest.raises(UserError, match="is not empty"):
        training.train(config, tmp_path / "run", resume=False)
    assert training.train(config, tmp_path / "run", resume=True) == final  # nothing left to do


_DRIVER = """
import sys
from pathlib import Path
from test_training_loop import small_ids
from selfgc_rl import training
from selfgc_rl.config import load_config

training._Run._play = small_ids(training._Run._play)
training.train(load_config(sys.argv[1]), Path(sys.argv[2]), resume=sys.argv[3] == "resume")
"""


def start(config_path: Path, run_dir: Path, how: str, log: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    with log.open("ab") as out:
        command = [sys.executable, "-c", _DRIVER, str(config_path), str(run_dir), how]
        return subprocess.Popen(command, stdout=out, stderr=out, env=environment)


def test_a_killed_run_that_is_resumed_trains_the_tasks_of_an_uninterrupted_one(
    vllm_server: VLLMServer, tiny_model_dir: Path, tmp_path: Path
) -> None:
    config_path, log = tmp_path / "config.yaml", tmp_path / "log"
    save_config(loop_config(tiny_model_dir, vllm_server.url, steps=4), config_path)
    whole = start(config_path, tmp_path / "whole", "new", log)
    assert whole.wait(600) == 0, log.read_text()

    run = tmp_path / "cut"
    victim = start(config_path, run, "new", log)
    deadline = time.monotonic() + 600
    while len(complete_checkpoints(run / "checkpoints")) < 2 and victim.poll() is None:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL, "it was to be killed in the middle"
    done = int(complete_checkpoints(run / "checkpoints")[-1].name.rpartition("-")[2])
    assert done < 4

    assert start(config_path, run, "resume", log).wait(600) == 0, log.read_text()
    expected, resumed = read_metrics(tmp_path / "whole"), read_metrics(run)
    assert [r["step"] for r in resumed] == [1, 2, 3, 4]
    assert [r["tasks"] for r in resumed] == [r["tasks"] for r in expected]
    assert len({task for r in resumed for task in r["tasks"]}) == 8  # no task twice
    assert {r["policy_version"].rpartition("-v")[0] for r in resumed[done:]}.isdisjoint(
        r["policy_version"].rpartition("-v")[0] for r in resumed[:done]
    )
    assert (run / "adapter" / "adapter_model.safetensors").is_file()


def test_a_server_killed_in_mid_run_is_restarted_and_the_step_is_redone(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from selfgc_rl import training

    plays: list[int] = []
    real_play = small_ids(training._Run._play)

    def play(run: Any, step: int, encoder: Any, live: Any) -> Any:
        plays.append(step)
        if plays == [0, 1]:
            os.killpg(live.server.pid, signal.SIGKILL)
        return real_play(run, step, encoder, live)

    monkeypatch.setattr(training._Run, "_play", play)
    config = loop_config(tiny_model_dir, "")
    server = config.server.model_copy(update={"url": None, "kv_cache_gib": 0.25, "max_num_seqs": 16})
    training.train(config.model_copy(update={"server": server}), tmp_path / "run", resume=False)
    assert plays == [0, 1, 1]
    first, second = read_metrics(tmp_path / "run")
    assert (first["server_restarts"], second["server_restarts"]) == (0, 1)
    assert second["invalid_episodes"] == 0 and second["logprob_gap_mean"] < 1e-4
    assert "the vLLM server died" in capfd.readouterr().err
    assert (tmp_path / "run" / "server.died1.log").is_file()
