"""``selfgc-rl train --dry-run``: what a run would do and need, from the config and the file headers alone.

The estimates are arithmetic, not measurements: token counts are upper bounds, memory is the sum of the large parts
(weights, optimizer, activations kept for the backward pass, KV cache).
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from selfgc_rl.config import Config

_BYTES = {"float32": 4, "bfloat16": 2, "auto": 2}
_RUNTIME_GIB = 1.0  # interpreter and libraries of one torch process


@dataclass(frozen=True)
class ModelSize:
    """Sizes read from a model folder. ``lora`` is the number of trained parameters."""

    parameters: int
    lora: int
    hidden: int
    intermediate: int
    layers: int
    vocab: int


def model_size(model_dir: Path, adapter_dir: Path | None, rank: int) -> ModelSize:
    """Read the sizes from ``config.json`` and the safetensors headers; no weights are loaded."""
    from safetensors import safe_open

    def shapes(folder: Path) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="numpy") as tensors:
                found |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}
        return found

    def count(shape: list[int]) -> int:
        total = 1
        for size in shape:
            total *= size
        return total

    base = shapes(model_dir)
    linear = [s for n, s in base.items() if len(s) == 2 and ".layers." in n]
    lora = sum(map(count, shapes(adapter_dir).values())) if adapter_dir else rank * sum(a + b for a, b in linear)
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    hidden = int(config.get("hidden_size", 0))
    return ModelSize(
        parameters=sum(map(count, base.values())),
        lora=lora,
        hidden=hidden,
        intermediate=int(config.get("intermediate_size", 4 * hidden)),
        layers=int(config.get("num_hidden_layers", 0)),
        vocab=int(config.get("vocab_size", 0)),
    )


def trainer_gib(config: Config, size: ModelSize) -> float:
    """Weights, LoRA with gradient and two Adam moments, activations of one micro-batch, logits of its trained tokens.

    A layer keeps about 8 hidden-sized and 3 MLP-sized float32 values per token; about a quarter of a micro-batch's
    tokens are trained, each with logits, their softmax and its gradient.
    """
    activations = config.train.token_budget * size.layers * (8 * size.hidden + 3 * size.intermediate) * 4
    logits = config.train.token_budget // 4 * size.vocab * 4 * 3
    total = size.parameters * _BYTES[config.model.dtype] + 16 * size.lora + activations + logits
    return _RUNTIME_GIB + total / 2**30


def server_gib(config: Config, size: ModelSize) -> float:
    """Weights, resident adapters, KV cache."""
    weights = (size.parameters + config.server.max_loras * size.lora) * _BYTES[config.server.dtype]
    return 2 * _RUNTIME_GIB + weights / 2**30 + config.server.kv_cache_gib


def server_tokens(config: Config) -> int:
    """Longest prompt plus reply."""
    return config.env.window + config.rollout.max_new_tokens


def _server_line(config: Config, model_dir: Path) -> str:
    if config.server.url:
        return f"uses {config.server.url}"
    from selfgc_rl.engines.server import _command, _has_gpu

    command = _command(
        model_dir,
        config.server,
        port=config.server.port or 0,
        window_tokens=server_tokens(config),
        lora_rank=config.server.max_lora_rank,
        on_gpu=_has_gpu(),
    )
    return shlex.join(["python", *command[1:]]) + ("" if config.server.port else "  (0: a free port is chosen)")


def _available_gib() -> float | None:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) / 2**20
    except OSError:
        pass
    return None


def plan_lines(config: Config, run_dir: Path) -> list[tuple[str, str]]:
    """The plan as (what, text) pairs.

    Raises:
        UserError: the model, the adapter or a family is not there.
    """
    from selfgc_envs.strategies import make_strategy
    from selfgc_envs.tasks import make_task
    from selfgc_rl.models import resolve_model

    env, rollout, train = config.env, config.rollout, config.train
    for family in env.families:
        make_task(family, level=env.level, pressure=env.pressure, window=env.window)
    strategy = make_strategy(env.strategy, env.strategy_options)
    model_dir, adapter_dir = resolve_model(config.model)
    size = model_size(model_dir, adapter_dir, config.model.lora_rank)
    episodes = rollout.groups_per_step * rollout.group_size
    calls = episodes * env.max_turns
    checkpoint_mb = 12 * size.lora / 1e6  # adapter and two Adam moments, float32
    trainer, server = trainer_gib(config, size), server_gib(config, size)
    server_text = "not ours" if config.server.url else f"{server:.1f} GiB"
    available = _available_gib()
    free = f", {available:.1f} GiB available" if available else ""
    short = " — NOT ENOUGH" if available and trainer + (0 if config.server.url else server) > available else ""
    fresh = f"fresh LoRA of rank {config.model.lora_rank} on all linear layers"
    return [
        ("run folder", str(run_dir)),
        ("model", f"{config.model.path} ({model_dir}, {size.parameters / 1e6:.0f} M parameters, {config.model.dtype})"),
        ("adapter", f"{adapter_dir or fresh} ({size.lora / 1e6:.1f} M trained parameters)"),
        ("tasks", f"{', '.join(env.families)} at level {env.level}, pressure {env.pressure:g}"),
        ("context", f"window {env.window} tokens, up to {env.max_turns} turns, overflow: {env.on_overflow}"),
        ("strategy", f"{env.strategy}: {', '.join(strategy.tools)}"),
        ("reward", f"success − {config.reward.coefficient:g} · {config.reward.aggregate} φ(u), "
                   f"charged above {config.reward.threshold:.0%} of the window"),
        ("one step", f"{rollout.groups_per_step} tasks × {rollout.group_size} episodes = {episodes} episodes, "
                     f"at most {calls} model calls"),
        ("tokens per step", f"at most {calls * rollout.max_new_tokens:,} sampled and {calls * env.window:,} read; "
                            f"about {round(episodes * env.pressure * env.window):,} of observations"),
        ("training", f"{train.steps} steps, learning rate {train.learning_rate:g}, {train.attention} attention, "
                     f"micro-batches of {train.token_budget} tokens"),
        ("server", _server_line(config, model_dir)),
        ("memory (estimate)", f"trainer {trainer:.1f} GiB, server {server_text}{free}{short}"),
        ("checkpoints", f"every {train.checkpoint_every} step(s), the newest {train.keep_checkpoints} kept, "
                        f"{checkpoint_mb:.0f} MB each"),
        ("evaluation", f"{config.eval.tasks} held-out tasks × {config.eval.episodes_per_task} episode(s)"),
        ("tracking", f"metrics.jsonl; W&B {config.tracking.wandb}"),
    ]  # fmt: skip
