"""The cold start: demonstrations, batches, loss, checkpoints, the adapter as shipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import selfgc_rl.demonstrations as demonstrations_module
from selfgc_envs.errors import UserError
from selfgc_envs.tasks import HELDOUT_SEED_BASE
from selfgc_rl.checkpoints import complete_checkpoints
from selfgc_rl.config import Config, parse_config
from selfgc_rl.demonstrations import Demonstration, demonstrate, load_demonstrations, plan_demonstrations
from selfgc_rl.embedded import file_sha256
from selfgc_rl.sft import episode_order, train_sft
from selfgc_rl.tokens import PromptEncoder, load_encoder


def config_for(model_dir: Path, **sft: Any) -> Config:
    settings = {"episodes": 6, "episodes_per_batch": 2, "checkpoint_every": 1, "evaluate_every": 2, "warmup_steps": 1}
    return parse_config(
        {
            "model": {"path": str(model_dir), "adapter": None, "lora_rank": 4, "lora_alpha": 8},
            "env": {"window": 4096, "pressure": 0.5},
            "train": {"token_budget": 256, "threads": 1},
            "sft": settings | {"heldout_episodes": 2} | sft,
        }
    )


def made_up(count: int, *, first_seed: int = 0) -> list[Demonstration]:
    """Episodes with a shared system prompt, whose replies can be learned by heart."""
    episodes = []
    for seed in range(first_seed, first_seed + count):
        generator = torch.Generator().manual_seed(seed)
        history = [11] * 30 + torch.randint(3, 300, (10,), generator=generator).tolist()
        sequences, trained_from = [], []
        for turn in range(3):
            prompt = history + [20 + turn] * 5
            sequences.append((*prompt, 40 + turn, 41 + turn, 2))
            trained_from.append(len(prompt))
            history += torch.randint(3, 300, (8,), generator=generator).tolist()
        episodes.append(Demonstration("chain", seed, "never", 1.0, tuple(sequences), tuple(trained_from)))
    return episodes


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# -- demonstrations ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoder(tiny_model_dir: Path) -> PromptEncoder:
    return load_encoder(tiny_model_dir)


def test_plan_has_families_in_turn_disjoint_seeds_and_the_mixture(tiny_model_dir: Path) -> None:
    config = config_for(tiny_model_dir, episodes=400, styles={"never": 3.0, "fold": 1.0})
    training, heldout = plan_demonstrations(config)
    assert [family for family, _, _ in training[:4]] == ["chain", "bugchain", "chain", "bugchain"]
    assert len({(family, seed) for family, seed, _ in training}) == 400
    assert all(seed < HELDOUT_SEED_BASE for _, seed, _ in training)
    assert all(seed >= HELDOUT_SEED_BASE for _, seed, _ in heldout)
    assert 240 < sum(style == "never" for _, _, style in training) < 360
    assert plan_demonstrations(config) == (training, heldout)


@pytest.mark.parametrize("styles", [{"nonsense": 1.0}, {"never": 0.0}, {"never": -1.0, "fold": 2.0}])
def test_a_mixture_that_is_none_is_refused(tiny_model_dir: Path, styles: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"sft\.styles"):
        plan_demonstrations(config_for(tiny_model_dir, styles=styles))


def test_a_demonstration_holds_what_the_policy_would_see_and_say(tiny_model_dir: Path, encoder: PromptEncoder) -> None:
    episode = demonstrate(("chain", 3, "fold_drop"), config_for(tiny_model_dir), encoder)
    assert episode.success == 1.0
    assert len(episode.sequences) == len(episode.trained_from) > 2
    for ids, first in zip(episode.sequences, episode.trained_from, strict=True):
        assert first <= 4096
        assert ids[-1] == encoder.eos_id
        assert "<tool_call>" in encoder.decode(ids[first:])
        assert encoder.decode(ids[:first]).endswith("<|im_start|>assistant\n")
    folded = "".join(
        encoder.decode(ids[first:]) for ids, first in zip(episode.sequences, episode.trained_from, strict=True)
    )
    assert '"fold"' in folded or '"drop"' in folded


def test_demonstrations_are_played_once_per_setting(
    tmp_path: Path, tiny_model_dir: Path, encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = []

    def play(plan: tuple[str, int, str], *_: Any) -> Demonstration:
        played.append(plan)
        return Demonstration(plan[0], plan[1], plan[2], 0.5, ((1, 2, 3),), (2,))

    monkeypatch.setattr(demonstrations_module, "demonstrate", play)
    cache = tmp_path / "demonstrations.jsonl"
    config = config_for(tiny_model_dir)
    first = load_demonstrations(cache, config, encoder)
    assert [len(part) for part in first] == [6, 2] and len(played) == 8
    assert load_demonstrations(cache, config, encoder) == first and len(played) == 8
    load_demonstrations(cache, config_for(tiny_model_dir, seed=1), encoder)
    assert len(played) == 16


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epochs", [1.0, 1.5, 3.0])
def test_each_epoch_trains_each_episode_once_in_an_order_of_its_own(epochs: float) -> None:
    order = episode_order(6, epochs, per_batch=3, seed=0)
    assert len(order) == 6 * epochs
    assert all(sorted(order[i : i + 6]) == list(range(6)) for i in range(0, len(order) - 5, 6))
    assert epochs < 2 or order[:6] != order[6:12]
    assert len(episode_order(7, 1.0, per_batch=3, seed=0)) == 9


def test_training_learns_records_and_ships(tmp_path: Path, tiny_model_dir: Path) -> None:
    run = tmp_path / "run"
    config = config_for(tiny_model_dir, epochs=12, learning_rate=2e-2)
    episodes = made_up(6)
    adapter = train_sft(config, run, demonstrations=(episodes, made_up(2, first_seed=100)))

    log = records(run)
    assert [r["step"] for r in log] == list(range(1, 37))
    assert log[-1]["loss"] < 0.1 * log[0]["loss"]
    assert log[-1]["accuracy"] > log[0]["accuracy"]
    assert {r["trained_tokens"] for r in log} == {2 * 3 * 3}
    rows = 2 * sum(len(ids) for ids in episodes[0].sequences)
    assert all(r["forwarded_tokens"] < 0.7 * rows for r in log)
    assert [r["step"] for r in log if "heldout" in r] == list(range(2, 37, 2))
    assert log[-1]["heldout"]["chain"]["exact_turns"] == 1.0
    assert log[-1]["lr"] < 0.3e-2

    weights = load_file(adapter / "adapter_model.safetensors")
    assert {t.dtype for t in weights.values()} == {torch.bfloat16}
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == tiny_model_dir.name
    sums = dict(reversed(line.split()) for line in (adapter / "SHA256SUMS").read_text().splitlines())
    assert sums == {name: file_sha256(adapter / name) for name in ("adapter_config.json", "adapter_model.safetensors")}
    summary = json.loads((run / "training_log.json").read_text())
    assert summary["success_by_style"] == {"never": {"episodes": 6, "success": 1.0}}
    assert summary["steps"] == 36


def test_the_step_is_the_token_mean_however_it_is_packed(tmp_path: Path, tiny_model_dir: Path) -> None:
    episodes = made_up(4)
    episodes[0] = Demonstration("chain", 0, "never", 1.0, episodes[0].sequences[:1], episodes[0].trained_from[:1])
    losses = []
    for budget in (32, 4096):
        config = config_for(tiny_model_dir, episodes=4, episodes_per_batch=4, epochs=3)
        config.train.token_budget = max(budget, 32)
        train_sft(config, tmp_path / str(budget), demonstrations=(episodes, []))
        log = records(tmp_path / str(budget))
        assert (log[0]["trees"] > 1) == (budget == 32)
        losses.append([r["loss"] for r in log])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_steps_train_the_episodes_in_the_order_written_down(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = config_for(tiny_model_dir, episodes=5, episodes_per_batch=1, epochs=2)
    episodes = [
        Demonstration("chain", n, "never", 1.0, ((*range(3, 23 + n), 2),), (20 + n,)) for n in range(5)
    ]  # each of a length of its own
    train_sft(config, tmp_path / "run", demonstrations=(episodes, []))
    trained = [r["forwarded_tokens"] - 20 for r in records(tmp_path / "run")]
    assert trained == episode_order(5, 2, per_batch=1, seed=0)


def test_a_turn_is_right_only_if_all_its_tokens_are_first_choices(tiny_model_dir: Path) -> None:
    from selfgc_rl.models import load_policy
    from selfgc_rl.sft_trainer import teacher_forced_scores

    policy = load_policy(tiny_model_dir, None, rank=4, alpha=8, dtype="float32")
    ids, first = [7, 8, 9], 3
    with torch.no_grad():
        for _ in range(4):
            ids.append(int(policy(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    wrong = [*ids[:-1], (ids[-1] + 1) % 300]
    episode = Demonstration("chain", 0, "never", 1.0, (tuple(ids), tuple(wrong)), (first, first))
    scores = teacher_forced_scores(policy, [episode, episode], token_budget=100)
    assert scores["chain"]["exact_turns"] == 0.5
    assert policy.training


class Killed(Exception):
    pass


def test_an_interrupted_run_resumes_to_the_same_adapter(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import selfgc_rl.sft as sft

    config = config_for(tiny_model_dir, epochs=2, adapter_dtype="float32")
    data = (made_up(6), [])
    whole = load_file(train_sft(config, tmp_path / "whole", demonstrations=data) / "adapter_model.safetensors")

    run = tmp_path / "cut"
    record = sft._record

    def dies_at_4(entry: dict[str, Any], *rest: Any) -> None:
        if entry["step"] == 4:
            raise Killed
        record(entry, *rest)

    monkeypatch.setattr(sft, "_record", dies_at_4)
    with pytest.raises(Killed):
        train_sft(config, run, demonstrations=data)
    assert not (run / "adapter").exists()
    assert complete_checkpoints(run / "checkpoints")[-1].name == "checkpoint-3"
    monkeypatch.setattr(sft, "_record", record)
    resumed = load_file(train_sft(config, run, resume=True, demonstrations=data) / "adapter_model.safetensors")

    assert [r["step"] for r in records(run)] == [1, 2, 3, 4, 5, 6]
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert train_sft(config, run, resume=True, demonstrations=data) == run / "adapter"  # done: nothing more happens
    assert len(records(run)) == 6


def test_a_folder_of_another_run_is_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    config, data = config_for(tiny_model_dir, episodes=2), (made_up(2), [])
    train_sft(config, tmp_path / "run", demonstrations=data)
    with pytest.raises(UserError, match="not empty"):
        train_sft(config, tmp_path / "run", demonstrations=data)
    with pytest.raises(UserError, match="other settings"):
        train_sft(
            config_for(tiny_model_dir, episodes=2, learning_rate=0.5),
            tmp_path / "run",
            resume=True,
            demonstrations=data,
        )
    with pytest.raises(UserError, match="does not exist"):
        train_sft(config, tmp_path / "nowhere", resume=True, demonstrations=data)
