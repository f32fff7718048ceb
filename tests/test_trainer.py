"""The trainer: exact gradients, TRL's traps, steps with nothing to train, checkpoints (cases R4, R6, R8-R11, S9)."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from selfgc_envs.errors import UserError
from selfgc_rl.checkpoints import complete_checkpoints, decisive_values, read_state
from selfgc_rl.config import Config, parse_config
from selfgc_rl.models import load_policy
from selfgc_rl.tokens import load_encoder
from selfgc_rl.trainer import SelfGCTrainer, StepBatch, micro_batches, padded_inputs, tree_inputs
from selfgc_rl.types import Episode, Row
from test_advantages import make_group
from test_rows import make_episode

VOCABULARY = 300
MakeTrainer = Callable[..., SelfGCTrainer]


def make_config(**train: Any) -> Config:
    temperature = train.pop("temperature", 1.0)
    tree = {"train": {"steps": 4, "learning_rate": 1e-2, **train}, "rollout": {"group_size": 3, "groups_per_step": 2}}
    tree["rollout"]["temperature"] = temperature
    return parse_config(tree)


def make_groups(step: int) -> list[list[Episode]]:
    """Two groups of three episodes that share a head and then grow apart, a function of the step alone."""
    rng = random.Random(step)
    groups = []
    for g in range(2):
        head = tuple(rng.randrange(3, VOCABULARY) for _ in range(12))
        group = []
        for e in range(3):
            prompt, turns = head, []
            for _ in range(3):
                sampled = tuple(rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(1, 6)))
                turns.append((prompt, sampled))
                prompt = prompt[:12] + prompt[15:] + sampled + tuple(rng.randrange(3, VOCABULARY) for _ in range(4))
            episode = make_episode(f"s{step}g{g}/e{e}", turns)
            episode.reward = rng.random()
            group.append(episode)
        groups.append(group)
    return groups


def make_rows(seed: int = 0) -> list[Row]:
    """Rows of different lengths with shared prefixes, two of them identical but for the advantage."""
    rng = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, VOCABULARY) for _ in range(count))

    head, rows = tokens(15), []
    for i in range(7):
        sampled = tokens(rng.randrange(1, 7))
        logprobs = tuple(rng.uniform(-7, -4) for _ in sampled)
        rows.append(Row(head + tokens(3 * i), sampled, logprobs, rng.uniform(-1, 1), f"e{i}", "g", 0))
    rows.append(Row(rows[0].prompt_ids, rows[0].sampled_ids, rows[0].logprobs, -0.7, "twin", "g", 0))
    return rows


@pytest.fixture
def make_trainer(tiny_model_dir: Path, tmp_path: Path) -> MakeTrainer:
    def make(config: Config | None = None, **kwargs: Any) -> SelfGCTrainer:
        torch.manual_seed(0)
        policy = load_policy(tiny_model_dir, kwargs.pop("adapter", None), rank=4, alpha=32, dtype="float32")
        with torch.no_grad():  # an adapter that changes something, so that the KL to the base is not 0
            for name, parameter in policy.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.05)
        trainer = SelfGCTrainer(
            policy,
            load_encoder(tiny_model_dir).tokenizer,
            config or make_config(),
            kwargs.pop("checkpoints_dir", tmp_path / "checkpoints"),
            collect=kwargs.pop("collect", make_groups),
            publish=kwargs.pop("publish", lambda step: f"v{step}"),
            on_record=kwargs.pop("on_record", lambda batch, record: None),
            **kwargs,
        )
        trainer.current_gradient_accumulation_steps = 1  # Trainer's loop sets it
        return trainer

    return make


def gradients(trainer: SelfGCTrainer, inputs: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and flat gradient of a step made of these micro-batches, through TRL's own step."""
    model = trainer.model
    model.zero_grad()
    loss = sum((super(SelfGCTrainer, trainer).training_step(model, micro, None) for micro in inputs), torch.zeros(()))
    flat = [
        p.grad.flatten() if p.grad is not None else torch.zeros(p.numel())
        for p in model.parameters()
        if p.requires_grad
    ]
    return loss, torch.cat(flat)


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def total_tokens(rows: list[Row]) -> int:
    return sum(len(row.sampled_ids) for row in rows)


def near_policy(trainer: SelfGCTrainer, rows: list[Row]) -> list[Row]:
    """The rows with log-probs near those of the policy, as a server's would be."""
    micro = tree_inputs(rows, 1)
    with torch.no_grad():
        trainer._micro = trainer._prepare_inputs(micro)
        logprobs = trainer._get_per_token_logps_and_entropies(trainer.model, None, None, 0)[0][0].tolist()
    rng, moved = random.Random(1), []
    for row in rows:
        own, logprobs = logprobs[: len(row.sampled_ids)], logprobs[len(row.sampled_ids) :]
        noisy = tuple(x + rng.gauss(0, 0.3) for x in own)
        moved.append(Row(row.prompt_ids, row.sampled_ids, noisy, row.advantage, row.episode_id, row.group_id, row.turn))
    return moved


# -- exactness --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "train",
    [{}, {"beta": 0.1}, {"temperature": 0.7}, {"importance_cap": 1.05}, {"gradient_checkpointing": True}],
    ids=["plain", "kl", "temperature", "cap", "checkpointing"],
)
@pytest.mark.parametrize("clipping", [False, True])
def test_tree_and_rows_give_the_same_loss_and_gradient(make_trainer: MakeTrainer, train: dict, clipping: bool) -> None:
    """Through TRL's own padded forward on one side, the prefix tree on the other; both with TRL's own loss."""
    trainer = make_trainer(make_config(**train))
    if train.get("gradient_checkpointing"):
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    rows = near_policy(trainer, make_rows())
    results = []
    for inputs in ([tree_inputs(rows, total_tokens(rows))], [padded_inputs(rows, total_tokens(rows), 0)]):
        if clipping:  # old log-probs away from the current ones, so that ratios leave the trust region
            for micro in inputs:
                sampled = micro["sampling_per_token_logps"]
                micro["old_per_token_logps"] = sampled + 0.4 * torch.sin(1000 * sampled)
        trainer._metrics["train"].clear()
        results.append(gradients(trainer, inputs))
        assert (trainer._metrics["train"]["clip_ratio/region_mean"][0] > 0.1) == clipping
    (loss_tree, tree), (loss_rows, padded) = results
    assert padded.abs().max() > 1e-4
    assert float(loss_tree) == pytest.approx(float(loss_rows), rel=1e-5, abs=1e-6)
    assert relative_error(tree, padded) <= 1e-5


@pytest.mark.parametrize("attention", ["tree", "rows"])
def test_micro_batches_do_not_change_the_gradient(make_trainer: MakeTrainer, attention: str) -> None:
    trainer = make_trainer()
    rows = make_rows()
    losses, flat = zip(
        *(
            gradients(trainer, micro_batches(rows, attention=attention, token_budget=budget, pad_id=0))
            for budget in (100_000, 30)
        ),
        strict=True,
    )
    assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-5, abs=1e-6)
    assert relative_error(flat[0], flat[1]) <= 1e-5


@pytest.mark.parametrize("attention", ["tree", "rows"])
def test_splitting_an_episode_into_more_rows_leaves_the_gradient_unchanged(
    make_trainer: MakeTrainer, attention: str
) -> None:
    trainer = make_trainer()
    whole = make_rows()
    split = []
    for row in whole:
        for i in range(len(row.sampled_ids)):
            prompt = row.prompt_ids + row.sampled_ids[:i]
            one = slice(i, i + 1)
            split.append(Row(prompt, row.sampled_ids[one], row.logprobs[one], row.advantage, row.episode_id, "g", i))
    assert len(split) > 2 * len(whole)
    (loss, flat), (loss_split, flat_split) = (
        gradients(trainer, micro_batches(rows, attention=attention, token_budget=1000, pad_id=0))
        for rows in (whole, split)
    )
    assert float(loss) == pytest.approx(float(loss_split), rel=1e-5, abs=1e-6)
    assert relative_error(flat, flat_split) <= 1e-5


def test_the_loss_is_the_token_mean_of_the_weighted_surrogate(make_trainer: MakeTrainer) -> None:
    """By hand: at ratio 1 the loss is -sum(w_t A_t) / tokens, w_t = min(exp(logp - sampled), cap)."""
    trainer = make_trainer(make_config(importance_cap=1.1))
    rows = near_policy(trainer, make_rows())
    micro = tree_inputs(rows, total_tokens(rows))
    loss, _ = gradients(trainer, [micro])
    weights = trainer._micro["importance_sampling_ratio"]
    assert float(weights.max()) == pytest.approx(1.1)
    expected = -(weights * micro["advantages"]).sum() / total_tokens(rows)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


def test_long_rows_keep_their_weight(make_trainer: MakeTrainer) -> None:
    """R10: the same drift per token gives the same weight per token, whatever the row's length."""
    trainer = make_trainer()
    rng = random.Random(0)
    rows = [
        Row(
            (5, 6), tuple(rng.randrange(3, VOCABULARY) for _ in range(count)), (-5.0,) * count, 1.0, f"e{count}", "g", 0
        )
        for count in (3, 2000)
    ]
    micro = tree_inputs(rows, total_tokens(rows))
    trainer._micro = micro
    with torch.no_grad():
        logprobs = trainer._get_per_token_logps_and_entropies(trainer.model, None, None, 0)[0]
    micro["sampling_per_token_logps"] = logprobs - 0.1
    gradients(trainer, [micro])
    assert torch.allclose(trainer._micro["importance_sampling_ratio"], torch.tensor(0.1).exp(), atol=1e-4)


def test_logprobs_are_at_the_sampling_temperature(make_trainer: MakeTrainer) -> None:
    """R11, on both routes, against the model's logits divided by the temperature."""
    trainer = make_trainer(make_config(temperature=0.5))
    row = make_rows()[3]
    ids = torch.tensor([row.prompt_ids + row.sampled_ids])
    with torch.no_grad():
        logits = trainer.model.eval()(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1] / 0.5
        expected = logits.log_softmax(-1).gather(1, torch.tensor(row.sampled_ids)[:, None])[:, 0]
        for micro in (tree_inputs([row], 1), padded_inputs([row], 1, 0)):
            trainer._micro = micro
            both = torch.cat([micro["prompt_ids"], micro["completion_ids"]], 1)
            mask = torch.cat([micro["prompt_mask"], micro["completion_mask"]], 1)
            kept = micro["completion_ids"].shape[1]
            ours = trainer._get_per_token_logps_and_entropies(trainer.model, both, mask, kept)[0][0]
            assert torch.allclose(ours, expected, atol=1e-5)


def test_the_kl_is_k3_to_the_model_without_the_adapter(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(make_config(beta=0.1))
    assert list(trainer.model.peft_config) == ["default"]  # no copy of the adapter as a reference
    row = make_rows()[3]
    gradients(trainer, [tree_inputs([row], len(row.sampled_ids))])
    ids = torch.tensor([row.prompt_ids + row.sampled_ids])

    def logprobs() -> torch.Tensor:
        logits = trainer.model(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(row.sampled_ids)[:, None])[:, 0]

    with torch.no_grad():
        own = logprobs()
        with trainer.model.disable_adapter():
            reference = logprobs()
    k3 = (torch.exp(reference - own) - (reference - own) - 1).mean()
    assert float(k3) > 1e-4
    assert trainer._metrics["train"]["kl"][0] == pytest.approx(float(k3), rel=1e-4)


def test_a_fully_masked_micro_batch_gives_loss_0_and_finite_gradients(make_trainer: MakeTrainer) -> None:
    """R8, on both routes."""
    trainer = make_trainer(make_config(beta=0.1))
    rows = make_rows()
    for micro in (tree_inputs(rows, 10), padded_inputs(rows, 10, 0)):
        micro["completion_mask"] = torch.zeros_like(micro["completion_mask"])
        loss, flat = gradients(trainer, [micro])
        assert float(loss) == 0.0
        assert torch.equal(flat, torch.zeros_like(flat))


# -- TRL's traps ------------------------------------------------------------------------------------------------------


def test_one_rollout_batch_is_one_optimizer_step(make_trainer: MakeTrainer) -> None:
    args = make_trainer().args
    assert (args.steps_per_generation, args.gradient_accumulation_steps, args.num_iterations) == (1, 1, 1)
    assert (args.loss_type, args.scale_rewards, args.mask_truncated_completions) == ("dapo", "none", False)
    assert (args.vllm_importance_sampling_mode, args.importance_sampling_level) == ("token_truncate", "token")
    assert not args.bf16 and not args.fp16


@pytest.mark.parametrize("attention", ["tree", "rows"])
@pytest.mark.parametrize("budget", [1, 40, 100_000])
def test_no_row_is_lost_or_doubled_by_the_split(attention: str, budget: int) -> None:
    rows = make_rows()
    batches = micro_batches(rows, attention=attention, token_budget=budget, pad_id=0)
    trained = sorted(x for b in batches for x in b["sampling_per_token_logps"][b["completion_mask"].bool()].tolist())
    assert trained == pytest.approx(sorted(x for row in rows for x in row.logprobs))
    if budget == 100_000:
        assert len(batches) == 1
    if budget == 40:
        assert len(batches) > 1


def test_every_micro_batch_is_normalised_by_the_tokens_of_the_whole_step() -> None:
    rows = make_rows()
    for attention in ("tree", "rows"):
        batches = micro_batches(rows, attention=attention, token_budget=40, pad_id=0)
        assert {float(b["num_items_in_batch"]) for b in batches} == {float(total_tokens(rows))}


def test_a_step_trains_all_sampled_tokens_of_groups_that_teach(make_trainer: MakeTrainer) -> None:
    def collect(step: int) -> list[list[Episode]]:
        return [*make_groups(step), make_group("equal", [1.0, 1.0])]  # one group more than TRL was told of

    records: list[dict[str, Any]] = []
    batches: list[StepBatch] = []
    trainer = make_trainer(
        make_config(steps=2, token_budget=256),
        collect=collect,
        on_record=lambda batch, record: (batches.append(batch), records.append(record)),
    )
    trainer.train()
    for batch, record in zip(batches, records, strict=True):
        assert record["trained_tokens"] == sum(e.sampled_tokens for group in batch.groups[:2] for e in group)
        assert batch.advantages.skipped_groups == 1
        assert record["loss"] is not None and record["grad_norm"] > 0
        assert record["logprob_gap_mean"] is not None
    assert [r["step"] for r in records] == [1, 2]
    assert [r["policy_version"] for r in records] == ["v1", "v2"]


@pytest.mark.parametrize("attention", ["tree", "rows"])
def test_training_raises_the_probability_of_what_was_rewarded(make_trainer: MakeTrainer, attention: str) -> None:
    """The same episodes each step; the sign of the whole chain from reward to weights."""
    good, bad = make_episode("g/good", [((5, 6, 7), (8, 9))]), make_episode("g/bad", [((5, 6, 7), (10, 11))])
    good.reward = 1.0
    trainer = make_trainer(make_config(steps=3, attention=attention), collect=lambda step: [[good, bad]])

    def logprob(sampled: tuple[int, ...]) -> float:
        logits = trainer.model(input_ids=torch.tensor([(5, 6, 7, *sampled)])).logits[0, 2:-1]
        return float(logits.log_softmax(-1).gather(1, torch.tensor(sampled)[:, None]).sum())

    with torch.no_grad():
        before = logprob((8, 9)), logprob((10, 11))
    trainer.train()
    with torch.no_grad():
        assert logprob((8, 9)) > before[0] + 0.1 and logprob((10, 11)) < before[1] - 0.1


def test_a_step_with_nothing_to_train_changes_no_weight_and_logs_no_loss(make_trainer: MakeTrainer) -> None:
    """R9. The step before leaves momentum behind: a zero gradient would still move the weights."""
    weights: list[torch.Tensor] = []
    records: list[dict[str, Any]] = []

    def collect(step: int) -> list[list[Episode]]:
        return make_groups(step) if step != 1 else [make_group("g", [0.5, 0.5]), make_group("h", [1.0])]

    def publish(step: int) -> str:
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters() if p.requires_grad]))
        return f"v{step}"

    config = make_config(steps=3, warmup_steps=10)
    trainer = make_trainer(config, collect=collect, publish=publish, on_record=lambda _, record: records.append(record))
    trainer.train()
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])
    assert (records[1]["loss"], records[1]["grad_norm"], records[1]["trained_tokens"]) == (None, None, 0)
    assert records[0]["lr"] < records[1]["lr"] < records[2]["lr"]
    assert all("loss" not in entry for entry in trainer.state.log_history if entry["step"] == 2)


def test_nothing_is_sent_anywhere(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("telemetry")

    monkeypatch.setattr("trl.trainer.base_trainer.send_telemetry", refuse)
    make_trainer()


# -- checkpoints ------------------------------------------------------------------------------------------------------


def run_steps(make: MakeTrainer, folder: Path, resume: Path | None = None, **kwargs: Any) -> tuple[list[int], dict]:
    seen: list[int] = []

    def collect(step: int) -> list[list[Episode]]:
        seen.append(step)
        return make_groups(step)

    extra = {"config": decisive_values(make_config())}
    trainer = make(checkpoints_dir=folder, collect=collect, checkpoint_extra=extra, **kwargs)
    try:
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    except KeyboardInterrupt:
        pass
    return seen, {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}


def test_a_resumed_run_trains_the_same_steps_to_the_same_weights(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def interrupt(batch: StepBatch, record: dict[str, Any]) -> None:
        if record["step"] == 3:  # after the update of step 3, before its checkpoint
            raise KeyboardInterrupt

    steps, weights = run_steps(make_trainer, tmp_path / "whole")
    first, _ = run_steps(make_trainer, tmp_path / "cut", on_record=interrupt)
    last = complete_checkpoints(tmp_path / "cut")[-1]
    assert last.name == "checkpoint-2"
    second, resumed = run_steps(make_trainer, tmp_path / "cut", resume=last, adapter=last)
    assert steps == [0, 1, 2, 3]
    assert (first, second) == ([0, 1, 2], [2, 3])
    for name, weight in weights.items():
        assert torch.equal(weight, resumed[name]), name


def test_a_checkpoint_that_was_cut_short_is_not_one(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(self: Any, output_dir: str) -> None:
        if output_dir.endswith("-3"):
            raise KeyboardInterrupt

    monkeypatch.setattr(SelfGCTrainer, "_save_rng_state", die)
    run_steps(make_trainer, tmp_path / "c")
    assert [p.name for p in complete_checkpoints(tmp_path / "c")] == ["checkpoint-1", "checkpoint-2"]
    assert not (tmp_path / "c" / "checkpoint-3").exists()


def test_only_the_newest_checkpoints_are_kept(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    run_steps(make_trainer, tmp_path / "c", config=make_config(keep_checkpoints=2))
    assert [p.name for p in complete_checkpoints(tmp_path / "c")] == ["checkpoint-3", "checkpoint-4"]


def test_a_checkpoint_of_another_config_is_refused(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    run_steps(make_trainer, tmp_path / "c", config=make_config(steps=1))
    checkpoint = complete_checkpoints(tmp_path / "c")[-1]
    state = read_state(checkpoint, make_config(steps=9, token_budget=512))  # may change: same run
    assert (state["step"], state["policy_version"]) == (1, "v1")
    with pytest.raises(UserError, match=r"train.learning_rate=0.01, this config has 0.5"):
        read_state(checkpoint, make_config(learning_rate=0.5))


def test_an_unreadable_state_is_a_user_error(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    (folder / "selfgc_state.json").write_text(json.dumps({"step": 1}))
    with pytest.raises(UserError, match="cannot be read"):
        read_state(folder, make_config())
