"""A training run from config to adapter: server, policy, trainer, checkpoints, records.

The run folder: ``config.yaml`` (resolved), ``metrics.jsonl`` (one line per step), ``checkpoints/checkpoint-N``,
``adapters/vNNNN`` (the versions the server may still hold), ``server.log``, and at the end ``adapter``.

Step N trains on the tasks that :func:`selfgc_rl.rollout.draw_tasks` names, a stateless function of the seed and N, with
episode seeds that depend on nothing else either. A run that was killed at any moment and resumed from its last complete
checkpoint therefore trains the tasks of an uninterrupted one, each once, and loses only the steps that came after it.

Everything the user can get wrong is checked before torch is imported and before a server starts.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfgc_envs.errors import UserError
from selfgc_envs.tasks import Task, make_task
from selfgc_rl.checkpoints import complete_checkpoints, decisive_values, read_state, save_adapter
from selfgc_rl.config import Config, save_config
from selfgc_rl.episode import EnginePolicy
from selfgc_rl.metrics import MetricsLog, episode_metrics, peak_rss_mb
from selfgc_rl.rollout import draw_tasks, run_groups
from selfgc_rl.types import Episode

if TYPE_CHECKING:
    from selfgc_rl.live_policy import LivePolicy
    from selfgc_rl.tokens import PromptEncoder
    from selfgc_rl.trainer import StepBatch

_TRUNCATED_WARNING = 0.05  # share of replies cut by max_new_tokens from which the user is told


def tasks_of_step(config: Config, encoder: PromptEncoder, step: int) -> list[Task]:
    """The tasks of a step, sized by the tokenizer of the model that acts."""
    env = config.env
    return [
        make_task(
            family,
            level=env.level,
            seed=seed,
            pressure=env.pressure,
            window=env.window,
            token_counter=encoder.count,
        )
        for family, seed in draw_tasks(config, step)
    ]


def train(config: Config, run_dir: Path, *, resume: bool) -> Path:
    """Train, or go on from the last complete checkpoint; returns the folder of the final adapter.

    Raises:
        UserError: the folder, the config, the model or the server is not usable; nothing was trained.
        InfrastructureError: a part died and could not be restarted; ``resume=True`` goes on.
    """
    from selfgc_rl.models import resolve_model
    from selfgc_rl.tokens import load_encoder

    run = _Run(config, run_dir, resume)
    final = run_dir / "adapter"
    if run.steps_done >= config.train.steps and run.checkpoint is not None:
        if not final.is_dir():
            _copy_adapter(run.checkpoint, final)
        run.say(f"all {config.train.steps} steps are done")
        return final
    model_dir, adapter_dir = resolve_model(config.model)
    encoder = load_encoder(model_dir)
    tasks_of_step(config, encoder, run.steps_done)  # a wrong family or level shows here, not after the server's start
    shutil.rmtree(final, ignore_errors=True)  # of a shorter run
    save_config(config, run_dir / "config.yaml")
    prepare_process(config, run_dir)

    from selfgc_rl.live_policy import LivePolicy
    from selfgc_rl.models import load_policy

    policy = load_policy(
        model_dir,
        run.checkpoint or adapter_dir,
        rank=config.model.lora_rank,
        alpha=config.model.lora_alpha,
        dtype=config.model.dtype,
    )
    with (
        run.progress,
        LivePolicy(
            model_dir,
            config,
            name=run_dir.name,
            lora_rank=policy.peft_config["default"].r,
            log_path=run_dir / "server.log",
            say=run.say,
            waiting=run.progress.waiting,
        ) as live,
    ):
        run.train(policy, encoder, live)
    return save_adapter(policy, final)


class _Run:
    """One process's part of a run: what it found in the folder, and what happens at each step."""

    def __init__(self, config: Config, run_dir: Path, resume: bool) -> None:
        self.config = config
        self.run_dir = run_dir
        self.checkpoint: Path | None = None
        self.steps_done = 0
        if resume:
            if not run_dir.is_dir():
                raise UserError(f"run folder '{run_dir}' does not exist", "start the run without --resume")
            found = complete_checkpoints(run_dir / "checkpoints")
            if found:
                self.checkpoint = found[-1]
                self.steps_done = int(read_state(self.checkpoint, config)["step"])
        elif run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
            raise UserError(f"run folder '{run_dir}' is not empty", "add --resume to go on, or choose another --run")
        try:
            (run_dir / "adapters").mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UserError(f"run folder '{run_dir}' cannot be written: {e.strerror}", "choose another --run") from None
        self.progress = _Progress(config.train.steps, self.steps_done)
        self.say = self.progress.say
        self._rollout_s = 0.0
        self._before = (0, 0)  # the engine's totals before the step's rollouts

    def train(self, policy: Any, encoder: PromptEncoder, live: LivePolicy) -> None:
        """All steps that are left, against a server that runs."""
        from selfgc_rl.trainer import SelfGCTrainer

        config = self.config
        log = MetricsLog(self.run_dir / "metrics.jsonl", self.steps_done)

        def publish(step: int) -> str:
            folder = save_adapter(policy, self.run_dir / "adapters" / f"v{step:04d}")
            version = live.publish(folder, step)
            # A server may read the folder of a version it still holds again; older ones are not needed.
            for old in sorted(folder.parent.glob("v*"))[: -config.server.max_loras]:
                shutil.rmtree(old, ignore_errors=True)
            return version

        def collect(step: int) -> list[list[Episode]]:
            self._before = (live.engine.stats.prompt_tokens, live.engine.stats.sampled_tokens)
            return live.rollouts(lambda: self._play(step, encoder, live))

        def on_record(batch: StepBatch, record: dict[str, Any]) -> None:
            self._complete(batch, record, live)
            log.write(record)
            self.progress.step_done(record)

        trainer = SelfGCTrainer(
            policy,
            encoder.tokenizer,
            config,
            self.run_dir / "checkpoints",
            collect=collect,
            publish=publish,
            on_record=on_record,
            on_progress=self.progress.phase,
            checkpoint_extra={"config": decisive_values(config)},
        )
        publish(self.steps_done)
        trainer.train(resume_from_checkpoint=str(self.checkpoint) if self.checkpoint else None)

    def _play(self, step: int, encoder: PromptEncoder, live: LivePolicy) -> list[list[Episode]]:
        tasks = tasks_of_step(self.config, encoder, step)

        async def play() -> list[list[Episode]]:
            async with live.engine:
                return await run_groups(
                    EnginePolicy(live.engine),
                    tasks,
                    config=self.config,
                    encoder=encoder,
                    group_size=self.config.rollout.group_size,
                    seed=self.config.train.seed,
                    progress=lambda done, total: self.progress.phase("rollout", done, total),
                )

        return asyncio.run(play())

    def _complete(self, batch: StepBatch, record: dict[str, Any], live: LivePolicy) -> None:
        """Add what the trainer cannot know: the episodes, the server, the machine. Say what deserves a word."""
        record |= episode_metrics(batch.groups)
        record["rows"] = len(batch.rows)
        record["skipped_groups"] = batch.advantages.skipped_groups
        record["skip_reasons"] = dict(batch.advantages.skip_reasons)
        prompt, sampled = (
            now - before
            for now, before in zip(
                (live.engine.stats.prompt_tokens, live.engine.stats.sampled_tokens), self._before, strict=True
            )
        )
        cache = live.engine.metrics()
        new = round(prompt * (1 - cache.get("prefix_cache_hit_rate", 0.0)))
        record["prompt_tokens"], record["prompt_tokens_new"] = prompt, new
        record["prefix_cache_hit_rate"] = cache.get("prefix_cache_hit_rate")
        record["rollout_tok_s"] = (new + sampled) / batch.rollout_s if batch.rollout_s else None
        record["peak_rss_mb"] = {"trainer": round(peak_rss_mb()), "server": round(live.server.peak_rss_mb())}
        record["server_restarts"] = live.restarts
        step, skipped = record["step"], batch.advantages.skip_reasons
        if skipped:
            reasons = ", ".join(f"{count} × {reason}" for reason, count in sorted(skipped.items()))
            outcome = "" if batch.rows else "; nothing to train, the policy stays as it is"
            self.say(f"step {step}: {batch.advantages.skipped_groups} group(s) skipped ({reasons}){outcome}")
        if record["invalid_episodes"]:
            errors = [e.error for group in batch.groups for e in group if not e.valid and e.error]
            self.say(f"step {step}: {record['invalid_episodes']} episode(s) lost to infrastructure: {errors[:1]}")
        if (record["truncated_replies"] or 0) > _TRUNCATED_WARNING:
            self.say(
                f"step {step}: {record['truncated_replies']:.0%} of the replies were cut at "
                f"rollout.max_new_tokens={self.config.rollout.max_new_tokens}"
            )


class _Progress:
    """The bar over steps, with the last step's figures, and what the running step is at."""

    def __init__(self, steps: int, done: int) -> None:
        self._steps, self._done = steps, done
        self._bar: Any = None
        self._shown = 0.0

    def __enter__(self) -> _Progress:
        from tqdm import tqdm

        self._bar = tqdm(
            total=self._steps, initial=self._done, desc="train", unit="step", file=sys.stderr, dynamic_ncols=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def say(self, line: str) -> None:
        from tqdm import tqdm

        tqdm.write(line, file=sys.stderr)

    def waiting(self, seconds: float) -> None:
        self._describe(f"starting vLLM ({seconds:.0f} s)")

    def phase(self, name: str, done: int, total: int) -> None:
        self._describe(f"step {self._done + 1} {name} {done}/{total}")

    def _describe(self, text: str) -> None:
        now = time.monotonic()
        if now - self._shown > 0.5:
            self._bar.set_description(text)
            self._shown = now

    def step_done(self, record: dict[str, Any]) -> None:
        def figure(name: str) -> str:
            return "-" if record[name] is None else f"{record[name]:.2f}"

        self._done = record["step"]
        names = {"reward": "reward", "success": "success", "budget": "budget_p95", "folds": "folds"}
        self._bar.set_postfix_str(", ".join(f"{text} {figure(key)}" for text, key in names.items()), refresh=False)
        self._bar.set_description("train", refresh=False)
        self._bar.update(self._done - self._bar.n)


def _copy_adapter(checkpoint: Path, final: Path) -> None:
    temporary = final.with_name(".adapter.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copyfile(checkpoint / name, temporary / name)
    temporary.rename(final)


def prepare_process(config: Config, run_dir: Path) -> None:
    """Environment of the libraries, allocator and threads: before torch does anything."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if config.tracking.wandb != "off":
        from importlib.util import find_spec

        if find_spec("wandb") is None:
            raise UserError(
                "tracking.wandb is on, but wandb is not installed", "pip install wandb, or tracking.wandb=off"
            )
        identity = run_dir / "wandb_run_id"
        if not identity.is_file():
            identity.write_text(secrets.token_hex(4), encoding="utf-8")
        os.environ.update(
            WANDB_MODE=config.tracking.wandb,
            WANDB_PROJECT=config.tracking.project,
            WANDB_DIR=str(run_dir),
            WANDB_RUN_ID=identity.read_text(encoding="utf-8").strip(),
            WANDB_RESUME="allow",
        )
    from selfgc_rl.cpu_memory import keep_freed_memory

    keep_freed_memory()
    import torch

    torch.set_num_threads(config.train.threads or len(os.sched_getaffinity(0)))
    torch.manual_seed(config.train.seed)  # a fresh adapter is drawn from it


__all__ = ["prepare_process", "tasks_of_step", "train"]
