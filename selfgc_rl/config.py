"""The one config system: typed, unknown keys refused, dotted overrides, resolved copy saved with every run.

A config is YAML → :class:`Config`. ``load_config(path, overrides)`` applies ``a.b.c=value`` strings (values are
parsed as YAML) after the file and before validation, so an override is checked exactly like the file. Every field
has a default that trains the embedded model on two CPU cores; a config file states what differs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from selfgc_envs.errors import UserError


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True)


class ModelConfig(_Section):
    path: str = Field("embedded", description="'embedded' (SmolLM2-135M-Instruct) or a Hugging Face model folder")
    adapter: str | None = Field(
        "embedded", description="LoRA to start from: 'embedded' (cold start), a folder, or null"
    )
    lora_rank: int = Field(32, ge=1, description="rank of a fresh adapter (when adapter is null)")
    lora_alpha: int = Field(64, ge=1, description="alpha of a fresh adapter")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of the trainer's base weights")


class EnvConfig(_Section):
    families: list[str] = Field(["chain", "bugchain"], min_length=1, description="task families, drawn in turn")
    level: Literal["nano", "small", "full"] = "nano"
    pressure: float = Field(1.0, gt=0, le=16, description="sum of needed observations / window")
    window: int = Field(1024, ge=128, description="hard token window, everything included")
    max_turns: int = Field(10, ge=1, description="turn limit of an episode")
    strategy: str = Field("selfgc", description="context strategy")
    strategy_options: dict[str, Any] = Field(default_factory=dict, description="options of the strategy")
    on_overflow: Literal["terminate", "gate", "auto_fold", "summarize"] = "terminate"
    sandbox: Literal["bwrap", "none"] = Field("bwrap", description="'none' runs commands unprotected")


class RewardConfig(_Section):
    coefficient: float = Field(0.3, ge=0, description="lambda: weight of the budget penalty")
    threshold: float = Field(0.6, ge=0, lt=1, description="share of the window above which a turn is charged")
    power: float = Field(1.0, gt=0, description="exponent p of phi(u) = (max(0, u - threshold) / (1 - threshold))^p")
    aggregate: Literal["mean", "max", "last"] = "mean"
    scope: Literal["always", "on_success"] = "always"


class RolloutConfig(_Section):
    groups_per_step: int = Field(4, ge=1, description="tasks per optimizer step")
    group_size: int = Field(8, ge=2, description="episodes per task (G)")
    concurrency: int = Field(32, ge=1, description="episodes in flight at once")
    temperature: float = Field(1.0, gt=0, description="sampling temperature; log-probs are taken at it on both sides")
    max_new_tokens: int = Field(160, ge=1, description="token cap of one reply")
    episode_timeout_s: float = Field(300.0, gt=0, description="hard deadline round one episode, grading included")
    retries: int = Field(1, ge=0, description="retries of an episode after an infrastructure failure")


class TrainConfig(_Section):
    steps: int = Field(8, ge=1, description="optimizer steps")
    learning_rate: float = Field(3e-4, gt=0)
    warmup_steps: int = Field(0, ge=0)
    epsilon: float = Field(0.2, gt=0, lt=1, description="lower clip of the probability ratio")
    epsilon_high: float = Field(0.28, gt=0, description="upper clip of the probability ratio (DAPO)")
    beta: float = Field(0.0, ge=0, description="weight of the KL to the base policy")
    importance_cap: float = Field(2.0, gt=0, description="per-token truncation of the importance ratio")
    advantage_scale: Literal["none", "std"] = Field(
        "none", description="'std' divides by the group's standard deviation"
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in backward: less memory, more time")
    max_grad_norm: float = Field(1.0, gt=0)
    token_budget: int = Field(8192, ge=256, description="distinct tokens of one packed micro-batch")
    attention: Literal["tree", "rows"] = Field("tree", description="packed prefix tree, or one padded row per sample")
    checkpoint_every: int = Field(1, ge=1, description="steps between checkpoints")
    keep_checkpoints: int = Field(2, ge=1)
    seed: int = 0
    threads: int | None = Field(None, description="torch threads of the trainer; null: all cores")


class ServerConfig(_Section):
    url: str | None = Field(None, description="use this running vLLM server instead of starting one")
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    port: int | None = Field(None, ge=1, le=65535, description="null: a free port is chosen")
    kv_cache_gib: float = Field(2.0, gt=0, description="KV cache on CPU (VLLM_CPU_KVCACHE_SPACE)")
    gpu_memory_utilization: float = Field(0.5, gt=0, le=1, description="GPU only: share of device memory for vLLM")
    max_loras: int = Field(3, ge=2, description="adapters resident at once (>= 2: the live one and the next)")
    max_lora_rank: int = Field(32, ge=8)
    max_num_seqs: int = Field(64, ge=1)
    start_timeout_s: float = Field(600.0, gt=0)
    extra_args: list[str] = Field(default_factory=list, description="more arguments for the vLLM server")


class EvalConfig(_Section):
    tasks: int = Field(64, ge=1, description="held-out tasks, shared by base and trained policy")
    episodes_per_task: int = Field(1, ge=1)
    temperature: float | None = Field(None, description="null: the rollout temperature")
    families: list[str] | None = Field(None, description="null: env.families (seeds disjoint from training)")
    pressure: float | None = Field(None, description="null: env.pressure")


class SFTConfig(_Section):
    families: list[str] = Field(["chain", "bugchain"], min_length=1)
    episodes: int = Field(400, ge=1, description="demonstration episodes")
    episodes_per_batch: int = Field(4, ge=1, description="episodes per optimizer step")
    epochs: float = Field(1.0, gt=0)
    learning_rate: float = Field(1e-3, gt=0)
    warmup_steps: int = Field(10, ge=0)
    styles: dict[str, float] = Field(
        default_factory=dict, description="garbage-collection style -> weight; {}: default mixture"
    )
    checkpoint_every: int = Field(20, ge=1)
    evaluate_every: int = Field(20, ge=1, description="steps between teacher-forced evaluations")
    heldout_episodes: int = Field(8, ge=0, description="demonstrations with held-out seeds for that evaluation")
    adapter_dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="dtype of the adapter as written at the end"
    )
    seed: int = 0


class TrackingConfig(_Section):
    wandb: Literal["off", "offline", "online"] = "off"
    project: str = "selfgc-rl"
    run_name: str | None = None


class Config(_Section):
    model: ModelConfig = Field(default_factory=ModelConfig)
    env: EnvConfig = Field(default_factory=EnvConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    server: ServerConfig = Field(default_factory=ServerConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    sft: SFTConfig = Field(default_factory=SFTConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)


def _set_dotted(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    node = tree
    for name in parents:
        child = node.setdefault(name, {})
        if not isinstance(child, dict):
            raise UserError(
                f"override '{key}': '{name}' is a value, not a section", "selfgc-rl train --dry-run prints the keys"
            )
        node = child
    node[leaf] = value


def parse_config(tree: dict[str, Any], where: str = "config") -> Config:
    """Validate a plain dict. Raises :class:`UserError` naming the first wrong key and the keys known there."""
    try:
        return Config.model_validate(tree)
    except ValidationError as e:
        err = e.errors()[0]
        loc = ".".join(str(p) for p in err["loc"])
        if err["type"] == "extra_forbidden":
            section: Any = Config
            for part in err["loc"][:-1]:
                section = section.model_fields[str(part)].annotation
            raise UserError(
                f"{where}: unknown key '{loc}'", f"known keys there: {', '.join(section.model_fields)}"
            ) from None
        more = f" (and {len(e.errors()) - 1} more)" if len(e.errors()) > 1 else ""
        raise UserError(
            f"{where}: {loc or 'top level'}: {err['msg']}, got {err.get('input')!r}{more}", "correct the value"
        ) from None


def load_config(path: str | Path | None = None, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Read a YAML file (or only defaults), apply ``section.key=value`` overrides, validate.

    Raises:
        UserError: the file is missing or no YAML mapping; a key is unknown; a value is out of range.
    """
    tree: dict[str, Any] = {}
    where = "config"
    if path is not None:
        where = str(path)
        try:
            loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(
                f"config file '{path}' does not exist", "ls configs/*.yaml lists the shipped ones"
            ) from None
        except (yaml.YAMLError, UnicodeDecodeError, IsADirectoryError, PermissionError) as e:
            raise UserError(
                f"config file '{path}' cannot be read: {str(e).splitlines()[0]}", "correct the file"
            ) from None
        if loaded is None:
            loaded = {}
        if not isinstance(loaded, dict):
            raise UserError(
                f"config file '{path}' must hold a mapping, found {type(loaded).__name__}",
                "see configs/smollm2-cpu.yaml",
            )
        tree = loaded
    for item in overrides:
        key, eq, raw = item.partition("=")
        if not eq or not key:
            raise UserError(f"override '{item}' is not of the form section.key=value", "e.g. train.steps=4")
        try:
            value = yaml.safe_load(raw)
        except yaml.YAMLError:
            raise UserError(f"override '{item}': the value is not YAML", "quote it") from None
        _set_dotted(tree, key, value)
        where = f"{where} with override '{item}'" if path is None else where
    return parse_config(tree, where)


def save_config(config: Config, path: Path) -> None:
    """Write the resolved config next to the run (temporary name, then rename)."""
    tmp = path.with_suffix(".tmp")
    tmp.write_text(yaml.safe_dump(config.model_dump(), sort_keys=False), encoding="utf-8")
    tmp.replace(path)
