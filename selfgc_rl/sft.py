"""Cold start: supervised fine-tuning of a LoRA adapter on demonstrations, on TRL's ``SFTTrainer``.

The run folder: ``config.yaml`` (resolved), ``demonstrations.jsonl``, ``metrics.jsonl`` (one line per step),
``checkpoints/checkpoint-N``, and at the end ``adapter`` (with ``SHA256SUMS``) and ``training_log.json``.

* One optimizer step = ``episodes_per_batch`` episodes. Their rows share prefixes, so they are packed into prefix trees
  of at most ``train.token_budget`` tokens; the loss is the mean over all trained tokens of the step, however it is cut.
* The order of episodes is a function of seed and epoch alone, written down before training: a resumed run goes on with
  exactly the batches that are left.
* What is TRL's stays TRL's: loop, optimizer, schedule, checkpoint parts. Its dataset preparation is skipped, because
  rows are token ids already, and its loss, because that would forward every row on its own.
* Held-out demonstrations are scored with teacher forcing: a turn counts when every one of its tokens is the model's
  first choice.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfgc_envs.errors import UserError
from selfgc_rl.checkpoints import STATE_FILE, complete_checkpoints, save_adapter
from selfgc_rl.config import Config, save_config
from selfgc_rl.demonstrations import Demonstration, demonstrations_key, load_demonstrations, plan_demonstrations
from selfgc_rl.embedded import ADAPTER_FILES, file_sha256
from selfgc_rl.metrics import MetricsLog, peak_rss_mb

if TYPE_CHECKING:
    from peft import PeftModel

    from selfgc_rl.tokens import PromptEncoder

Demonstrations = tuple[list[Demonstration], list[Demonstration]]  # to train on, held out

_FREE_KEYS = {"checkpoint_every", "evaluate_every", "adapter_dtype"}  # of config.sft: may change on resume
_EMBEDDED_NAME = "SmolLM2-135M-Instruct"


def train_sft(
    config: Config, output_dir: Path, *, resume: bool = False, demonstrations: Demonstrations | None = None
) -> Path:
    """Train an adapter on demonstrations, or go on from the last complete checkpoint; returns the adapter's folder.

    Args:
        config: ``model.adapter`` "embedded" or null starts a fresh LoRA (the embedded adapter is what this makes);
            a folder is trained further.
        demonstrations: already played ones; default: those of ``config``, cached in the run folder.

    Raises:
        UserError: the folder, the config or the model is not usable, or the checkpoint is of another run.
    """
    from selfgc_rl.models import load_policy, resolve_model
    from selfgc_rl.tokens import load_encoder
    from selfgc_rl.training import prepare_process

    fresh = config.model.adapter in (None, "embedded")
    model_dir, adapter_dir = resolve_model(config.model.model_copy(update={"adapter": None} if fresh else {}))
    plan_demonstrations(config)  # a wrong mixture shows here
    encoder = load_encoder(model_dir)
    settings = _decisive_settings(config, encoder)
    checkpoint, steps_done = _checkpoint_to_resume(output_dir, settings, resume)
    output_dir.mkdir(parents=True, exist_ok=True)
    save_config(config, output_dir / "config.yaml")
    prepare_process(config, output_dir)

    if demonstrations is None:
        with _bar("demonstrations", config.sft.episodes + config.sft.heldout_episodes, "episode") as bar:
            demonstrations = load_demonstrations(
                output_dir / "demonstrations.jsonl", config, encoder, lambda done, total: bar.update(done - bar.n)
            )
    training, heldout = demonstrations
    order = episode_order(len(training), config.sft.epochs, config.sft.episodes_per_batch, config.sft.seed)
    steps = math.ceil(len(order) / config.sft.episodes_per_batch)
    policy = load_policy(
        model_dir,
        checkpoint or adapter_dir,
        rank=config.model.lora_rank,
        alpha=config.model.lora_alpha,
        dtype=config.model.dtype,
    )
    began = time.monotonic()
    log = MetricsLog(output_dir / "metrics.jsonl", steps_done)
    if steps_done < steps:
        from selfgc_rl.sft_trainer import PrefixTreeSFTTrainer

        with _bar("sft", steps, "step", steps_done) as bar:
            trainer = PrefixTreeSFTTrainer(
                policy,
                encoder.tokenizer,
                config,
                output_dir / "checkpoints",
                episodes=[training[i] for i in order],
                heldout=heldout,
                on_record=lambda record: _record(record, log, bar),
                checkpoint_state={"settings": settings},
            )
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    summary = {
        "model": _base_name(config, model_dir),
        "episodes": len(training),
        "turns": sum(len(episode.sequences) for episode in training),
        "success_by_style": _success_by_style(training),
        "steps": steps,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "resumed_at_step": steps_done,
        "peak_rss_mb": round(peak_rss_mb()),
        "last_records": _last_records(output_dir / "metrics.jsonl"),
        "config": config.model_dump(mode="json"),
    }
    adapter = write_adapter(
        policy, output_dir / "adapter", base_name=_base_name(config, model_dir), dtype=config.sft.adapter_dtype
    )
    temporary = output_dir / ".training_log.tmp"
    temporary.write_text(json.dumps(summary, indent=1), encoding="utf-8")
    temporary.replace(output_dir / "training_log.json")
    return adapter


def episode_order(episodes: int, epochs: float, per_batch: int, seed: int) -> list[int]:
    """Indices of the episodes in the order they are trained: each epoch a shuffle of its own, the last may be a part.

    The total is rounded up to whole batches with the next episodes of the order.
    """
    total = math.ceil(math.ceil(episodes * epochs) / per_batch) * per_batch
    order: list[int] = []
    while len(order) < total:
        epoch = list(range(episodes))
        random.Random(f"order {seed} {len(order) // episodes}").shuffle(epoch)
        order += epoch
    return order[:total]


def write_adapter(policy: PeftModel, folder: Path, *, base_name: str, dtype: str) -> Path:
    """Save the adapter for shipping: in ``dtype``, base named without a path, with ``SHA256SUMS``; all or nothing."""
    import torch
    from safetensors.torch import load_file, save_file

    staged = save_adapter(policy, folder.with_name(f".{folder.name}.staged"))
    weights = load_file(staged / "adapter_model.safetensors")
    cast = {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights.items()}
    save_file(cast, staged / "adapter_model.safetensors", metadata={"format": "pt"})
    config_file = staged / "adapter_config.json"
    settings = json.loads(config_file.read_text(encoding="utf-8")) | {"base_model_name_or_path": base_name}
    config_file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    sums = "".join(f"{file_sha256(staged / name)}  {name}\n" for name in ADAPTER_FILES)
    (staged / "SHA256SUMS").write_text(sums, encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    staged.rename(folder)
    return folder


def _base_name(config: Config, model_dir: Path) -> str:
    return _EMBEDDED_NAME if config.model.path == "embedded" else model_dir.name


def _decisive_settings(config: Config, encoder: PromptEncoder) -> dict[str, Any]:
    """What a run must keep to be the same run."""
    return {
        "model": config.model.model_dump(mode="json"),
        "sft": config.sft.model_dump(mode="json", exclude=_FREE_KEYS),
        "demonstrations": demonstrations_key(config, encoder),
        "max_grad_norm": config.train.max_grad_norm,
    }


def _checkpoint_to_resume(output_dir: Path, settings: dict[str, Any], resume: bool) -> tuple[Path | None, int]:
    """The last complete checkpoint of the run and its step, after checking that the folder may be used."""
    if not resume:
        if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
            raise UserError(f"run folder '{output_dir}' is not empty", "add --resume to go on, or choose another --run")
        return None, 0
    if not output_dir.is_dir():
        raise UserError(f"run folder '{output_dir}' does not exist", "start the run without --resume")
    found = complete_checkpoints(output_dir / "checkpoints")
    if not found:
        return None, 0
    try:
        state = json.loads((found[-1] / STATE_FILE).read_text(encoding="utf-8"))
        step, stored = int(state["step"]), dict(state["settings"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(
            f"checkpoint '{found[-1]}' cannot be read ({e!r})", "remove it to go on from an earlier one"
        ) from None
    for part, value in settings.items():
        if stored.get(part) != value:
            raise UserError(
                f"'{found[-1]}' was made with other settings ({part})",
                "resume with the config.yaml of the run folder, or start another run",
            )
    return found[-1], step


def _success_by_style(episodes: Sequence[Demonstration]) -> dict[str, dict[str, float]]:
    """What the demonstrations themselves achieve; episodes that were cut count as failed."""
    styles: dict[str, list[float]] = {}
    for episode in episodes:
        styles.setdefault(episode.style, []).append(episode.success or 0.0)
    return {style: {"episodes": len(s), "success": sum(s) / len(s)} for style, s in sorted(styles.items())}


def _last_records(path: Path, count: int = 10) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[-count:]]


def _bar(name: str, total: int, unit: str, done: int = 0) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, initial=done, desc=name, unit=unit, file=sys.stderr, dynamic_ncols=True)


def _record(record: dict[str, Any], log: MetricsLog, bar: Any) -> None:
    """One step is done: to the file and to the terminal."""
    log.write(record)
    figures = f"loss {record['loss']:.3f}, tokens right {record['accuracy']:.3f}, {record['tok_s']:.0f} tok/s"
    bar.set_postfix_str(figures, refresh=False)
    bar.update(record["step"] - bar.n)
    if heldout := record.get("heldout"):
        exact = ", ".join(f"{family} {scores['exact_turns']:.2f}" for family, scores in heldout.items())
        bar.write(f"step {record['step']}: held-out turns right as a whole: {exact}", file=sys.stderr)
