"""A trained adapter → a folder that serves: adapter or merged weights, tokenizer, settings, model card, checksums.

Invariants:

* The target appears complete or not at all: it is built beside its place under a temporary name and renamed last. A
  full disk or Ctrl-C leaves nothing.
* A target that exists is refused, never written into.
* The adapter is checked against the base model's tensors first: a missing, misshapen, non-finite or half-written
  tensor is a :class:`UserError`, not a folder that serves something else.
* Merging adds in float32 and casts once, at the end.

Layout: ``adapter_model.safetensors`` + ``adapter_config.json`` (or ``model*.safetensors`` + ``config.json``),
tokenizer and chat template, ``generation_config.json``, ``selfgc.json``, ``README.md``, ``serve.sh``, ``SHA256SUMS``.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from selfgc_envs.errors import UserError
from selfgc_rl.checkpoints import complete_checkpoints
from selfgc_rl.config import Config, ModelConfig, load_config
from selfgc_rl.embedded import ADAPTER_FILES, file_sha256
from selfgc_rl.report import results_path, table_rows

SETTINGS = "selfgc.json"
SERVED_NAME = "selfgc"
_TOKENIZER_FILES = re.compile(
    r"(tokenizer|special_tokens_map|added_tokens|vocab|merges|chat_template|spiece|sentencepiece)[\w.-]*\.(json|txt|model|jinja)"
)
_VERSIONED = ("selfgc-rl", "torch", "transformers", "peft", "safetensors")


@dataclass(frozen=True)
class Source:
    """What is exported: an adapter, the base it belongs to, and the run it came from (if it came from one)."""

    adapter_dir: Path
    base_dir: Path
    config: Config
    run_dir: Path | None = None


# -- finding and checking the adapter ---------------------------------------------------------------------------------


def find_adapter(path: Path) -> Path:
    """The adapter folder in ``path``: the folder itself, a run's final adapter, or its newest complete checkpoint.

    Raises:
        UserError: nothing there, or nothing that is an adapter.
    """
    if not path.is_dir():
        raise UserError(f"'{path}' is not a folder", "give a run, a checkpoint or an adapter folder")
    if (path / ADAPTER_FILES[0]).is_file() or (path / ADAPTER_FILES[1]).is_file():
        return path
    newest_first = reversed(complete_checkpoints(path / "checkpoints"))
    for folder in (path / "adapter", *newest_first):
        if (folder / ADAPTER_FILES[0]).is_file():
            return folder
    raise UserError(f"'{path}' holds no adapter and no checkpoint", "give a run folder with a finished step")


def run_of(adapter_dir: Path) -> Path | None:
    """The nearest folder above (or the adapter's own) that holds a run's ``config.yaml``."""
    above = adapter_dir.resolve()
    return next((p for p in (above, *list(above.parents)[:3]) if (p / "config.yaml").is_file()), None)


def find_source(path: Path, model: str | None = None) -> Source:
    """Resolve what the user pointed at. ``model`` overrides the base model ('embedded' or a folder).

    Raises:
        UserError: no adapter there, or its base model cannot be found.
    """
    from selfgc_rl.models import resolve_model

    adapter_dir = find_adapter(path)
    run_dir = run_of(adapter_dir)
    config = load_config(run_dir / "config.yaml") if run_dir else Config()
    if model is None and run_dir is None:
        named = read_json(adapter_dir / ADAPTER_FILES[0]).get("base_model_name_or_path") or ""
        model = named if Path(named).is_dir() else None
        if model is None:
            raise UserError(
                f"'{adapter_dir}' does not say which base model it is for", "--model DIR or --model embedded"
            )
    chosen = config.model.model_copy(update={"adapter": None, **({"path": model} if model else {})})
    base_dir, _ = resolve_model(chosen)
    return Source(adapter_dir, base_dir, config, run_dir)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises :class:`UserError` when it is missing or not one."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UserError(f"cannot read '{path}': {e.strerror}", "the folder is incomplete: use another") from None
    except ValueError:
        tree = None
    if not isinstance(tree, dict):
        raise UserError(f"'{path}' does not hold a JSON object", "the file is damaged: use another folder")
    return tree


def read_lora_rank(adapter_dir: Path) -> int:
    """The rank an adapter's config states. Raises :class:`UserError` when it states none."""
    rank = read_json(adapter_dir / ADAPTER_FILES[0]).get("r")
    if not isinstance(rank, int) or rank < 1:
        raise UserError(f"'{adapter_dir}' states no LoRA rank", "use another checkpoint")
    return rank


def check_adapter(adapter_dir: Path, base_dir: Path) -> int:
    """Check that an adapter is whole, finite and fits its base; returns its rank. No base weights are read.

    The base is built without memory (meta device) under the adapter's own config, so what must be in the file is
    what PEFT would save for it, tensor by tensor.

    Raises:
        UserError: says which tensor is wrong and how.
    """
    import torch
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    from selfgc_rl.models import resolve_model

    resolve_model(ModelConfig(path=str(base_dir), adapter=str(adapter_dir)))
    file, remedy = adapter_dir / ADAPTER_FILES[1], "use another checkpoint, or the base it was made for: --model DIR"
    try:
        lora = PeftConfig.from_pretrained(str(adapter_dir))
        with torch.device("meta"):
            base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base_dir))
            wanted = {k: v.shape for k, v in get_peft_model_state_dict(get_peft_model(base, lora)).items()}
    except (ValueError, TypeError, KeyError) as e:
        raise UserError(f"'{adapter_dir}' does not fit '{base_dir}': {str(e).splitlines()[0]}", remedy) from None
    stored = load_file(file)
    for name in sorted(wanted.keys() | stored.keys()):
        if name not in stored:
            raise UserError(f"'{file}' is incomplete: '{name}' is missing", remedy)
        if name not in wanted or wanted[name] != stored[name].shape:
            raise UserError(f"'{file}' does not fit '{base_dir}': '{name}' {list(stored[name].shape)}", remedy)
        if not bool(torch.isfinite(stored[name]).all()):
            raise UserError(f"'{file}': '{name}' has values that are not finite", "use an earlier checkpoint")
    return int(lora.r)


# -- writing the folder -----------------------------------------------------------------------------------------------


def export_adapter(source: Source, to: Path, *, merge: bool = False, dtype: str | None = None) -> Path:
    """Write ``source`` to the new folder ``to``.

    Args:
        merge: write merged model weights instead of the adapter.
        dtype: of the written weights; default: as stored (adapter) or the config's ``model.dtype`` (merged).

    Raises:
        UserError: ``to`` exists, the adapter is damaged or does not fit, the disk is full.
    """
    if os.path.lexists(to):
        raise UserError(f"'{to}' exists", "choose a new folder, or remove it first")
    rank = check_adapter(source.adapter_dir, source.base_dir)
    target = to.absolute()
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        _write_weights(source, partial, merge=merge, dtype=dtype)
        _copy_tokenizer(source.base_dir, partial)
        _write_settings(source, partial, merge=merge, rank=rank)
        _write_checksums(partial)
        partial.rename(target)
    except BaseException as e:
        shutil.rmtree(partial, ignore_errors=True)
        # safetensors reports a full disk as its own error type, with the system's text inside
        if getattr(e, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(e):
            raise UserError(f"no space left for '{to}'; nothing was written", "free some space there") from None
        raise
    return to


def _write_weights(source: Source, folder: Path, *, merge: bool, dtype: str | None) -> None:
    import torch

    if merge:
        from selfgc_rl.models import load_policy

        policy = load_policy(source.base_dir, source.adapter_dir, rank=0, alpha=0, dtype="float32", trainable=False)
        model = policy.merge_and_unload(safe_merge=True).to(getattr(torch, dtype or source.config.model.dtype))
        model.save_pretrained(folder)
    else:
        from safetensors.torch import load_file, save_file

        tensors = load_file(source.adapter_dir / ADAPTER_FILES[1])
        if dtype:
            tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
        save_file(tensors, folder / ADAPTER_FILES[1], metadata={"format": "pt"})
        config = read_json(source.adapter_dir / ADAPTER_FILES[0])
        config |= {"base_model_name_or_path": str(source.base_dir), "inference_mode": True}
        _write_text(folder / ADAPTER_FILES[0], json.dumps(config, indent=2, sort_keys=True) + "\n")
    for written in folder.iterdir():
        written.chmod(0o644)  # safetensors writes 0600


def _copy_tokenizer(base_dir: Path, folder: Path) -> None:
    for file in sorted(base_dir.iterdir()):
        if file.is_file() and _TOKENIZER_FILES.fullmatch(file.name) and "safetensors" not in file.name:
            shutil.copyfile(file, folder / file.name)
    generation = base_dir / "generation_config.json"
    if generation.is_file():
        shutil.copyfile(generation, folder / generation.name)
    elif not (folder / generation.name).exists():
        _write_text(folder / generation.name, "{}\n")


def _tools() -> list[dict[str, Any]]:
    """The tools in OpenAI's format, as a client passes them."""
    from selfgc_envs.actions import TOOLS

    kinds = {str: "string", int: "integer"}
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.help,
                "parameters": {
                    "type": "object",
                    "properties": {name: {"type": kinds[kind]} for name, kind in tool.params.items()},
                    "required": [name for name in tool.params if name not in tool.optional],
                },
            },
        }
        for tool in TOOLS.values()
    ]


def _figures(run_dir: Path | None) -> dict[str, Any]:
    """What the run recorded about itself: the last training step and the evaluation, if they are there."""
    if run_dir is None:
        return {}
    figures: dict[str, Any] = {}
    if evaluation := results_path(run_dir):
        figures["evaluation"] = read_json(evaluation)
    metrics = run_dir / "metrics.jsonl"
    if metrics.is_file():
        for line in reversed(metrics.read_text(encoding="utf-8").splitlines()):
            try:
                figures["last_training_step"] = json.loads(line)
                break
            except ValueError:
                continue  # a half-written last line
    return figures


def _versions() -> dict[str, str]:
    found = {}
    for name in _VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _write_settings(source: Source, folder: Path, *, merge: bool, rank: int) -> None:
    from selfgc_envs.strategies import make_strategy
    from selfgc_envs.view import system_prompt

    config = source.config
    strategy = make_strategy(config.env.strategy, config.env.strategy_options)
    weights = source.adapter_dir / ADAPTER_FILES[1]
    settings = {
        "format": 1,
        "kind": "merged" if merge else "adapter",
        "base_model": {
            "path": config.model.path if config.model.path == "embedded" else str(source.base_dir),
            "sha256": {f.name: file_sha256(f) for f in sorted(source.base_dir.glob("*.safetensors"))},
        },
        "lora": {"rank": rank, "sha256": file_sha256(weights)},
        "strategy": {
            "name": strategy.name,
            "options": config.env.strategy_options,
            "tools": list(strategy.tools),
        },
        "system_prompt": system_prompt(strategy),
        "tools": [t for t in _tools() if t["function"]["name"] in strategy.tools],
        "window": config.env.window,
        "max_turns": config.env.max_turns,
        "sampling": {"temperature": config.rollout.temperature, "max_new_tokens": config.rollout.max_new_tokens},
        "reward": config.reward.model_dump(),
        "figures": _figures(source.run_dir),
        "versions": _versions(),
    }
    _write_text(folder / SETTINGS, json.dumps(_finite(settings), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    _write_text(folder / "README.md", _model_card(settings, folder.name))
    _write_text(folder / "serve.sh", _serve_script(source, merge=merge, rank=rank))
    (folder / "serve.sh").chmod(0o755)


def _finite(tree: Any) -> Any:
    """NaN and infinities are no JSON: null."""
    if isinstance(tree, Mapping):
        return {key: _finite(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


_SERVE_SH = """#!/bin/sh
# Serve this folder with vLLM on an OpenAI-compatible endpoint; more vLLM options go through: ./serve.sh --port 8001
here=$(cd "$(dirname "$0")" && pwd)
{base}exec "${{PYTHON:-python}}" -m vllm.entrypoints.openai.api_server --max-model-len {max_len} \\
  --enable-auto-tool-choice --tool-call-parser hermes {model} "$@"
"""


def _serve_script(source: Source, *, merge: bool, rank: int) -> str:
    """A shell script that needs vLLM only; an adapter's base can be moved with the variable BASE."""
    if merge:
        base, model = "", f'--model "$here" --served-model-name {SERVED_NAME}'
    else:
        base = f"BASE=${{BASE:-{shlex.quote(str(source.base_dir))}}}\n"
        allowed = max(8, 1 << (rank - 1).bit_length())  # vLLM takes powers of two
        model = f'--model "$BASE" --enable-lora --max-lora-rank {allowed} --lora-modules {SERVED_NAME}="$here"'
    max_len = source.config.env.window + source.config.rollout.max_new_tokens
    return _SERVE_SH.format(base=base, model=model, max_len=max_len)


def _model_card(settings: Mapping[str, Any], name: str) -> str:
    evaluation = settings["figures"].get("evaluation", {})
    lines = [
        "---",
        "tags: [selfgc-rl, context-management, lora]",
        "---",
        "# A policy that manages its own context",
        "",
        f"{'Merged weights' if settings['kind'] == 'merged' else 'A LoRA adapter'} trained with selfgc-rl on base "
        f"model `{settings['base_model']['path']}`. It works in a window of {settings['window']} tokens with strategy "
        f"`{settings['strategy']['name']}`: {', '.join(settings['strategy']['tools'])}.",
        "",
        "## Serve",
        "",
        "`./serve.sh` (or `selfgc-rl serve DIR`) starts an OpenAI-compatible vLLM with the `hermes` tool parser. "
        f"Ask for model `{SERVED_NAME}`; send the system prompt and the tools of `{SETTINGS}`.",
        "",
        "## Figures",
        "",
    ]
    if {"base", "trained", "ci95"} <= evaluation.keys():
        lines += ["| | base | trained |", "|---|---|---|"]
        lines += [f"| {what} | {base} | {trained} |" for what, base, trained in table_rows(evaluation)]
    else:
        lines.append("Not evaluated yet: `selfgc-rl eval --adapter DIR`.")
    lines += ["", "`sha256sum -c SHA256SUMS` checks the files.", ""]
    return "\n".join(lines)


def _write_checksums(folder: Path) -> None:
    sums = [f"{file_sha256(f)}  {f.name}\n" for f in sorted(folder.iterdir())]
    _write_text(folder / "SHA256SUMS", "".join(sums))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
