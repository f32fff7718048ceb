"""PrefixTreeSFTTrainer: TRL's ``SFTTrainer`` on prefix trees of whole episodes. See :mod:`selfgc_rl.sft`.

Override points: ``training_step`` runs forward and backward once per tree, ``compute_loss`` scores a tree,
``_save_checkpoint`` renames a complete checkpoint into place, ``log`` makes the step's record.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers.trainer_callback import PrinterCallback, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import SFTConfig, SFTTrainer

from selfgc_envs.errors import UserError
from selfgc_rl.checkpoints import finish_checkpoint
from selfgc_rl.config import Config
from selfgc_rl.demonstrations import Demonstration
from selfgc_rl.prefix_tree import PrefixTree, build_tree, pack, token_statistics

if TYPE_CHECKING:
    from peft import PeftModel

_FINAL_RATE = 0.1  # of the peak learning rate, at the end of the cosine
_KEEP_CHECKPOINTS = 2


def episode_trees(episodes: Sequence[Demonstration], token_budget: int) -> list[PrefixTree]:
    """All rows of the episodes, packed: each in exactly one tree; equal prefixes are shared across episodes."""
    sequences = [ids for episode in episodes for ids in episode.sequences]
    trained_from = [first for episode in episodes for first in episode.trained_from]
    packs = pack(sequences, trained_from, token_budget)
    return [build_tree([sequences[i] for i in rows], [trained_from[i] for i in rows]) for rows in packs]


@torch.no_grad()
def teacher_forced_scores(
    policy: PeftModel, episodes: Sequence[Demonstration], token_budget: int
) -> dict[str, dict[str, float]]:
    """Per family: ``exact_turns`` (share of turns with only first choices of the policy), ``loss`` per token."""
    exact: dict[str, list[bool]] = {}
    nll: dict[str, list[float]] = {}
    training = policy.training
    policy.eval()
    for episode in episodes:
        for tree in episode_trees([episode], token_budget):
            scored = token_statistics(policy, tree)
            turns = torch.ones(int(tree.row.max()) + 1, dtype=torch.long)
            turns.scatter_reduce_(0, tree.row, scored.correct.cpu().long(), "amin")
            exact.setdefault(episode.family, []).extend(turns.bool().tolist())
            nll.setdefault(episode.family, []).extend((-scored.logprobs).tolist())
    policy.train(training)
    return {
        family: {"exact_turns": sum(hits) / len(hits), "loss": sum(nll[family]) / len(nll[family])}
        for family, hits in sorted(exact.items())
    }


class PrefixTreeSFTTrainer(SFTTrainer):
    """Trains a LoRA policy on demonstrations, ``sft.episodes_per_batch`` of them per step, in the order given.

    Args:
        policy: from :func:`selfgc_rl.models.load_policy`.
        tokenizer: of the model.
        config: the run's config.
        checkpoints_dir: where ``checkpoint-N`` folders go.
        episodes: the whole run's, in training order; a multiple of the batch.
        heldout: scored every ``sft.evaluate_every`` steps and after the last.
        on_record: called with each step's record, before its checkpoint.
        checkpoint_state: what goes into the checkpoint's ``selfgc_state.json`` besides the step.
    """

    def __init__(
        self,
        policy: PeftModel,
        tokenizer: Any,
        config: Config,
        checkpoints_dir: Path,
        *,
        episodes: Sequence[Demonstration],
        heldout: Sequence[Demonstration],
        on_record: Callable[[dict[str, Any]], None],
        checkpoint_state: dict[str, Any],
    ) -> None:
        self.config = config
        self._heldout = list(heldout)
        self._on_record = on_record
        self._checkpoint_state = checkpoint_state
        self._staging: Path | None = None
        self._step: dict[str, Any] | None = None  # the record of the step that runs
        self._evaluation: dict[str, dict[str, float]] = {}

        def collate(examples: list[dict[str, int]]) -> dict[str, Any]:
            return {"trees": episode_trees([episodes[e["episode"]] for e in examples], config.train.token_budget)}

        super().__init__(
            model=policy,
            args=_sft_config(config, checkpoints_dir, len(episodes)),
            data_collator=collate,
            train_dataset=Dataset.from_dict({"episode": list(range(len(episodes)))}),
            processing_class=tokenizer,
        )
        if self.accelerator.num_processes > 1:
            raise UserError("this trainer runs in one process", "start it without torchrun or accelerate launch")
        self.remove_callback(PrinterCallback)
        self.add_callback(_EvaluateHeldout(self))

    # -- one step ---------------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        began = time.perf_counter()
        trees: list[PrefixTree] = inputs["trees"]
        trained = sum(len(tree.target) for tree in trees)
        self._step = {"trained_tokens": trained, "accuracy": 0.0}
        total = torch.zeros((), device=self.accelerator.device)
        for tree in trees:
            total += super().training_step(model, {"tree": tree, "trained_tokens": trained})
        forwarded = sum(len(tree.input_ids) for tree in trees)
        seconds = time.perf_counter() - began
        self._step |= {"loss": float(total), "forwarded_tokens": forwarded, "trees": len(trees)}
        self._step |= {"seconds": seconds, "tok_s": forwarded / seconds}
        return total

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """This tree's part of the step's mean negative log-likelihood per trained token."""
        assert self._step is not None
        scored = token_statistics(self.accelerator.unwrap_model(model), inputs["tree"])
        self._step["accuracy"] += float(scored.correct.sum()) / inputs["trained_tokens"]
        return -scored.logprobs.sum() / inputs["trained_tokens"]

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not estimated: transformers' rule counts padded rows."""
        return 0

    def evaluate_heldout(self) -> None:
        """Score the held-out demonstrations if this step is one to do so; the result goes into its record."""
        step, last = self.state.global_step, self.state.max_steps
        if self._heldout and (step % self.config.sft.evaluate_every == 0 or step == last):
            policy = self.accelerator.unwrap_model(self.model)
            self._evaluation = teacher_forced_scores(policy, self._heldout, self.config.train.token_budget)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """One record per step; trackers get its numbers."""
        step, self._step = self._step, None
        if step is None:  # Trainer's summary at the end
            return
        record = {
            "step": self.state.global_step,
            "lr": logs.get("learning_rate"),
            "grad_norm": logs.get("grad_norm"),
            **step,
        }
        if self._evaluation:
            record["heldout"], self._evaluation = self._evaluation, {}
        self._on_record(record)
        flat = {f"heldout/{family}/{k}": v for family, s in record.get("heldout", {}).items() for k, v in s.items()}
        super().log({k: v for k, v in record.items() if isinstance(v, int | float)} | flat, start_time)

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
            super()._save_checkpoint(model, trial)
        finally:
            staged, self._staging = self._staging / name, None
        state = {"step": self.state.global_step, **self._checkpoint_state}
        finish_checkpoint(staged, home, state, keep=_KEEP_CHECKPOINTS)


class _EvaluateHeldout(TrainerCallback):
    def __init__(self, trainer: PrefixTreeSFTTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._trainer.evaluate_heldout()


def _sft_config(config: Config, checkpoints_dir: Path, episodes: int) -> SFTConfig:
    sft = config.sft
    return SFTConfig(
        output_dir=str(checkpoints_dir),
        max_steps=episodes // sft.episodes_per_batch,
        per_device_train_batch_size=sft.episodes_per_batch,
        gradient_accumulation_steps=1,
        train_sampling_strategy="sequential",  # the order is in the data set
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        max_length=None,
        learning_rate=sft.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": _FINAL_RATE},
        warmup_steps=sft.warmup_steps,
        weight_decay=0.0,
        max_grad_norm=config.train.max_grad_norm,
        gradient_checkpointing=config.train.gradient_checkpointing,
        bf16=False,  # dtypes are the policy's own; no autocast
        fp16=False,
        dataloader_pin_memory=False,  # batches are trees, moved by the forward
        logging_strategy="steps",
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=sft.checkpoint_every,
        disable_tqdm=True,
        report_to=[] if config.tracking.wandb == "off" else ["wandb"],
        run_name=config.tracking.run_name,
        seed=sft.seed,
    )
