"""SelfGCTrainer: GRPO on prefix trees, on TRL's stable ``GRPOTrainer``.

One optimizer step = one rollout batch: ``steps_per_generation = gradient_accumulation_steps = num_iterations = 1``.
What is TRL's stays TRL's: loop, optimizer, scheduler, callbacks, checkpoint parts, and the loss itself
(``_compute_loss``: clipped surrogate, importance weights, k3 KL, DAPO token mean). What we override, and why:

* ``_generate_and_score_completions`` collects episodes and turns them into micro-batches. It does not call ``super()``
  on carrier rows: TRL would decode them, score them with reward functions, compute a baseline that cannot leave out
  infrastructure failures, log lengths of rows that are not trained and, with a KL term, run forwards on them; every
  result would be thrown away.
* ``_prepare_inputs`` hands a batch on as it is: TRL would shuffle rows across episodes and split them with a floor
  division that loses the rest.
* ``training_step`` runs forward and backward once per micro-batch. ``num_items_in_batch`` is the number of trained
  tokens of the whole step, so the sum of the micro-batch losses is the token mean over the step: neither the
  splitting into micro-batches nor that of an episode into rows changes the gradient.
* ``_get_per_token_logps_and_entropies`` scores a packed prefix tree as one row of T trained tokens ("tree"), or leaves
  padded rows to TRL ("rows"): two routes to the same loss function. Old log-probs are the current ones, detached
  (there is exactly one update per rollout); the importance weight of a token is ``min(exp(old - sampled), cap)``.
* ``_save_checkpoint`` lets ``Trainer`` write into a hidden folder and renames it when it is complete.

A step with nothing to train runs no backward: gradients stay ``None``, so the optimizer leaves weights and moments
alone while the scheduler advances, and the record of the step says so instead of logging a loss of 0.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers.trainer_callback import PrinterCallback, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOConfig, GRPOTrainer

from selfgc_envs.errors import UserError
from selfgc_rl.advantages import AdvantageResult, group_advantages
from selfgc_rl.checkpoints import finish_checkpoint
from selfgc_rl.config import Config
from selfgc_rl.prefix_tree import PrefixTree, build_tree, pack, token_statistics
from selfgc_rl.rows import rows_from_episodes
from selfgc_rl.types import Episode, Row

if TYPE_CHECKING:
    from peft import PeftModel

Collect = Callable[[int], list[list[Episode]]]


@dataclass
class StepBatch:
    """What one step trains on."""

    groups: list[list[Episode]]
    rows: list[Row]
    advantages: AdvantageResult
    micro_batches: list[dict[str, Any]]  # inputs of TRL's loss, see tree_inputs and padded_inputs
    rollout_s: float = 0.0


@dataclass
class StepStatistics:
    """Sums over the trained tokens of one step, filled while the micro-batches run."""

    tokens_per_micro_batch: list[int] = field(default_factory=list)
    forwarded_tokens: int = 0
    gap_sum: float = 0.0  # |trainer's log-prob - server's log-prob|
    gap_max: float = 0.0
    weight_sum: float = 0.0  # importance weights
    weight_max: float = 0.0
    capped: int = 0
    train_s: float = 0.0
    loss: float | None = None

    @property
    def tokens(self) -> int:
        return sum(self.tokens_per_micro_batch)

    def add(self, logprobs: Tensor, sampled: Tensor, weights: Tensor, mask: Tensor, cap: float) -> None:
        """Account for one micro-batch; all tensors [B, T], detached."""
        kept = mask.bool()
        self.tokens_per_micro_batch.append(int(kept.sum()))
        if not kept.any():
            return
        gap, weights = (logprobs - sampled).abs()[kept], weights[kept]
        self.gap_sum += float(gap.sum())
        self.gap_max = max(self.gap_max, float(gap.max()))
        self.weight_sum += float(weights.sum())
        self.weight_max = max(self.weight_max, float(weights.max()))
        self.capped += int((weights >= cap).sum())

    def record(self, trl_metrics: dict[str, list[float]]) -> dict[str, Any]:
        """The part of the step's metrics that training knows.

        Args:
            trl_metrics: TRL's means over the tokens of each micro-batch, by TRL's names.
        """
        n = self.tokens

        def mean(name: str) -> float | None:
            values = trl_metrics.get(name, ())
            return sum(v * w for v, w in zip(values, self.tokens_per_micro_batch, strict=True)) / n if values else None

        return {
            "trained_tokens": n,
            "forwarded_tokens": self.forwarded_tokens,
            "logprob_gap_mean": self.gap_sum / n if n else None,
            "logprob_gap_max": self.gap_max if n else None,
            "importance_mean": self.weight_sum / n if n else None,
            "importance_max": self.weight_max if n else None,
            "importance_capped": self.capped / n if n else None,
            "clip_ratio": mean("clip_ratio/region_mean"),
            "entropy": mean("entropy"),
            "kl": mean("kl"),
            "train_tok_s": self.forwarded_tokens / self.train_s if n else None,
        }


# -- micro-batches ----------------------------------------------------------------------------------------------------


def tree_inputs(rows: Sequence[Row], trained_tokens: int) -> dict[str, Any]:
    """A packed prefix tree as TRL's loss takes it: one "row" of T trained tokens, each with its own advantage.

    Args:
        rows: what the tree holds.
        trained_tokens: of the whole step, the normaliser of the token mean.
    """
    tree = build_tree([row.prompt_ids + row.sampled_ids for row in rows], [len(row.prompt_ids) for row in rows])
    nothing = torch.zeros(1, 0, dtype=torch.long)
    return {
        "tree": tree,
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": tree.target.unsqueeze(0),
        "completion_mask": torch.ones(1, len(tree.target), dtype=torch.long),
        "advantages": torch.tensor([row.advantage for row in rows], dtype=torch.float32)[tree.row].unsqueeze(0),
        "sampling_per_token_logps": torch.tensor([[x for row in rows for x in row.logprobs]], dtype=torch.float32),
        "num_items_in_batch": torch.tensor(float(trained_tokens)),
        "forwarded_tokens": len(tree.input_ids),
    }


def padded_inputs(rows: Sequence[Row], trained_tokens: int, pad_id: int) -> dict[str, Any]:
    """The same rows in TRL's own layout: left-padded prompts, right-padded completions."""
    prompt = max(len(row.prompt_ids) for row in rows)
    reply = max(len(row.sampled_ids) for row in rows)

    def padded(values: Sequence[Any], width: int, fill: Any, dtype: torch.dtype, *, left: bool = False) -> Tensor:
        table = [[fill] * (width - len(v)) + [*v] if left else [*v] + [fill] * (width - len(v)) for v in values]
        return torch.tensor(table, dtype=dtype)

    prompts, replies = [row.prompt_ids for row in rows], [row.sampled_ids for row in rows]
    return {
        "prompt_ids": padded(prompts, prompt, pad_id, torch.long, left=True),
        "prompt_mask": padded([[1] * len(ids) for ids in prompts], prompt, 0, torch.long, left=True),
        "completion_ids": padded(replies, reply, pad_id, torch.long),
        "completion_mask": padded([[1] * len(ids) for ids in replies], reply, 0, torch.long),
        "advantages": torch.tensor([row.advantage for row in rows], dtype=torch.float32),
        "sampling_per_token_logps": padded([row.logprobs for row in rows], reply, 0.0, torch.float32),
        "num_items_in_batch": torch.tensor(float(trained_tokens)),
        "forwarded_tokens": len(rows) * (prompt + reply),
    }


def micro_batches(rows: Sequence[Row], *, attention: str, token_budget: int, pad_id: int) -> list[dict[str, Any]]:
    """All rows, each in exactly one micro-batch of at most ``token_budget`` tokens (a longer row is alone)."""
    total = sum(len(row.sampled_ids) for row in rows)
    if attention == "tree":
        sequences = [row.prompt_ids + row.sampled_ids for row in rows]
        packs = pack(sequences, [len(row.prompt_ids) for row in rows], token_budget)
        return [tree_inputs([rows[i] for i in members], total) for members in packs]
    batches: list[list[Row]] = []
    prompt = reply = 0
    for row in sorted(rows, key=lambda row: len(row.prompt_ids) + len(row.sampled_ids), reverse=True):
        prompt, reply = max(prompt, len(row.prompt_ids)), max(reply, len(row.sampled_ids))
        if not batches or (len(batches[-1]) + 1) * (prompt + reply) > token_budget:
            batches.append([])
            prompt, reply = len(row.prompt_ids), len(row.sampled_ids)
        batches[-1].append(row)
    return [padded_inputs(batch, total, pad_id) for batch in batches]


# -- the trainer ------------------------------------------------------------------------------------------------------


class SelfGCTrainer(GRPOTrainer):
    """Trains a LoRA policy on the episodes that ``collect`` brings.

    Args:
        policy: from :func:`selfgc_rl.models.load_policy`.
        tokenizer: of the served model.
        config: the run's config.
        checkpoints_dir: where ``checkpoint-N`` folders go.
        collect: step (0-based) -> groups of episodes made by the policy as it is now.
        publish: called after each optimizer step with the number of steps done; saves the adapter, makes it the live
            policy and returns its version.
        on_record: called with the step's batch and record, before its checkpoint; may add to the record.
        on_progress: called with (phase, done, total) while a step runs.
        checkpoint_extra: what goes into the checkpoint's ``selfgc_state.json`` besides step and version.
    """

    def __init__(
        self,
        policy: PeftModel,
        tokenizer: Any,
        config: Config,
        checkpoints_dir: Path,
        *,
        collect: Collect,
        publish: Callable[[int], str],
        on_record: Callable[[StepBatch, dict[str, Any]], None],
        on_progress: Callable[[str, int, int], None] = lambda phase, done, total: None,
        checkpoint_extra: dict[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.statistics = StepStatistics()
        self._collect = collect
        self._publish = publish
        self._on_record = on_record
        self._on_progress = on_progress
        self._checkpoint_extra = dict(checkpoint_extra or {})
        self._version, self._publish_s = "", 0.0
        self._batch: StepBatch | None = None
        self._micro: dict[str, Any] = {}
        self._staging: Path | None = None
        steps = Dataset.from_dict({"prompt": [""] * config.train.steps, "step": list(range(config.train.steps))})
        super().__init__(
            model=policy,
            reward_funcs=_graded_by_environment,
            args=_grpo_config(config, checkpoints_dir),
            train_dataset=steps,
            processing_class=tokenizer,
        )
        if self.accelerator.num_processes > 1:
            raise UserError("this trainer runs in one process", "start it without torchrun or accelerate launch")
        # Set after construction: TRL would otherwise copy the adapter as the KL reference (ours is the base, with the
        # adapter off) and start its own vLLM client (our server is reached by ``collect``).
        self.beta = config.train.beta
        self.use_vllm = True
        self.remove_callback(PrinterCallback)
        self.add_callback(_PublishAfterUpdate(self))

    def publish_adapter(self) -> None:
        """Make the adapter as it is now the live policy."""
        began = time.perf_counter()
        self._version = self._publish(self.state.global_step)
        self._publish_s = time.perf_counter() - began

    # -- from episodes to micro-batches -----------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> StepBatch:
        step = self.state.global_step
        if inputs[0]["step"] != step:
            raise RuntimeError(f"the data loader is at step {inputs[0]['step']}, the trainer at step {step}")
        began = time.perf_counter()
        groups = self._collect(step)
        rollout_s = time.perf_counter() - began
        advantages = group_advantages(groups, scale=self.config.train.advantage_scale)
        rows = rows_from_episodes([episode for group in groups for episode in group], advantages.advantages)
        batches = micro_batches(
            rows,
            attention=self.config.train.attention,
            token_budget=self.config.train.token_budget,
            pad_id=self._tokenizer.pad_token_id,
        )
        return StepBatch(groups, rows, advantages, batches, rollout_s)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Micro-batches come ready: only their tensors are moved to the device."""
        return {k: v.to(self.accelerator.device) if isinstance(v, Tensor) else v for k, v in inputs.items()}

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        batch = self._batch = self._generate_and_score_completions(inputs)
        self.statistics = StepStatistics()
        began = time.perf_counter()
        total = torch.zeros((), device=self.accelerator.device)
        for done, micro in enumerate(batch.micro_batches):
            self._on_progress("train", done, len(batch.micro_batches))
            total += super().training_step(model, micro, micro["num_items_in_batch"])
            self.statistics.forwarded_tokens += micro["forwarded_tokens"]
        self.statistics.train_s = time.perf_counter() - began
        expected = sum(len(row.sampled_ids) for row in batch.rows)
        if self.statistics.tokens != expected:
            raise RuntimeError(f"{self.statistics.tokens} tokens were trained, {expected} were sampled")
        if batch.rows:
            self.statistics.loss = float(total)
        return total

    # -- the loss ---------------------------------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        self._micro = inputs
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probs and entropies [B, T] of the micro-batch, and beside them what the loss needs of its tokens."""

        def score() -> tuple[Tensor, Tensor | None, Tensor | None]:
            tree: PrefixTree | None = micro.get("tree")
            if tree is None:
                return super(SelfGCTrainer, self)._get_per_token_logps_and_entropies(
                    model, input_ids, attention_mask, logits_to_keep, compute_entropy=True
                )
            scored = token_statistics(self.accelerator.unwrap_model(model), tree, temperature=self.temperature)
            return scored.logprobs.unsqueeze(0), scored.entropy.unsqueeze(0), None

        micro = self._micro
        if self.beta != 0.0:
            with torch.no_grad(), self.accelerator.unwrap_model(model).disable_adapter():
                micro["ref_per_token_logps"] = score()[0]
        logprobs, entropy, _ = score()
        cap = self.config.train.importance_cap
        old = micro.get("old_per_token_logps", logprobs).detach()
        sampled, mask = micro["sampling_per_token_logps"], micro["completion_mask"]
        weights = torch.exp(old - sampled).clamp(max=cap)
        micro["importance_sampling_ratio"] = weights
        self.statistics.add(logprobs.detach(), sampled, weights, mask, cap)
        return logprobs, entropy, None

    # -- after the step ---------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """One record per step; trackers get the numbers of the same record."""
        batch, self._batch = self._batch, None
        if batch is None:  # Trainer's summary at the end
            return
        record = {
            "step": self.state.global_step,
            "policy_version": self._version,
            "loss": self.statistics.loss,
            "grad_norm": logs.get("grad_norm") if batch.rows else None,
            "lr": logs.get("learning_rate"),
            "seconds": {"rollout": batch.rollout_s, "train": self.statistics.train_s, "publish": self._publish_s},
            **self.statistics.record(self._metrics["train"]),
        }
        self._metrics["train"].clear()
        self._on_record(batch, record)
        super().log(flat_numbers(record), start_time)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """A checkpoint needs none; ``export`` writes the card."""

    def _send_telemetry(self) -> None:
        """Nothing is sent anywhere."""

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging) if self._staging is not None else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write everything into ``.partial``, then rename: a ``checkpoint-N`` folder that exists is complete."""
        home = Path(self.args.output_dir)
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self._staging = home / ".partial"
        shutil.rmtree(self._staging, ignore_errors=True)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Could not find a config file", UserWarning)  # PEFT asking a hub
                super()._save_checkpoint(model, trial)
        finally:
            staged, self._staging = self._staging / name, None
        state = {"step": self.state.global_step, "policy_version": self._version, **self._checkpoint_extra}
        finish_checkpoint(staged, home, state, keep=self.config.train.keep_checkpoints)


class _PublishAfterUpdate(TrainerCallback):
    def __init__(self, trainer: SelfGCTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._trainer.publish_adapter()


def _graded_by_environment(**_: Any) -> list[float]:
    """TRL wants a reward source; ours is in the episodes, and this one is never asked."""
    raise NotImplementedError("episodes come with their reward")


def _grpo_config(config: Config, checkpoints_dir: Path) -> GRPOConfig:
    train, size = config.train, config.rollout.group_size
    return GRPOConfig(
        output_dir=str(checkpoints_dir),
        max_steps=train.steps,
        # The data set has one row per step; TRL wants it repeated group_size times to fill one batch.
        per_device_train_batch_size=size,
        num_generations=size,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_iterations=1,
        shuffle_dataset=False,
        learning_rate=train.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=train.warmup_steps,
        max_grad_norm=train.max_grad_norm,
        loss_type="dapo",
        scale_rewards="none",
        epsilon=train.epsilon,
        epsilon_high=train.epsilon_high,
        beta=0.0,
        importance_sampling_level="token",
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=train.importance_cap,
        mask_truncated_completions=False,
        temperature=config.rollout.temperature,
        max_completion_length=config.rollout.max_new_tokens,
        disable_dropout=True,  # the served policy has none
        gradient_checkpointing=train.gradient_checkpointing,
        bf16=False,  # dtypes are the policy's own; no autocast
        fp16=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        logging_strategy="steps",
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=train.checkpoint_every,
        disable_tqdm=True,
        report_to=[] if config.tracking.wandb == "off" else ["wandb"],
        run_name=config.tracking.run_name,
        seed=train.seed,
    )


def flat_numbers(record: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a nested record, keys joined by slashes."""
    flat: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            flat |= flat_numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[prefix + key] = value
    return flat
