"""Model folders and policies: checking what a config names, and loading it for training.

* Checks read file headers only, so a wrong folder is refused in a fraction of a second, before torch is imported.
* Whatever is wrong with a model folder or an adapter becomes a :class:`UserError` that names the file and the remedy.
* A policy is a frozen base model under one LoRA adapter, whose weights are float32 whatever the base's dtype.

``python -m selfgc_rl.models`` converts the embedded model if needed and prints its folder.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfgc_envs.errors import UserError
from selfgc_rl.config import ModelConfig
from selfgc_rl.embedded import embedded_adapter_dir, embedded_model_dir

if TYPE_CHECKING:
    from peft import PeftModel

__all__ = ["embedded_adapter_dir", "embedded_model_dir", "load_policy", "resolve_model"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_PEFT_PREFIX = "base_model.model."


# -- checking what the user gave us -----------------------------------------------------------------------------------


def resolve_model(model: ModelConfig) -> tuple[Path, Path | None]:
    """Turn ``config.model`` into a model folder and an adapter folder (or None), both checked without loading weights.

    Raises:
        UserError: not a model folder, files missing or cut short, or an adapter that does not fit the model.
    """
    model_dir = embedded_model_dir() if model.path == "embedded" else Path(model.path).expanduser()
    shapes = _check_model(model_dir)
    if model.adapter is None:
        return model_dir, None
    if model.adapter != "embedded":
        adapter_dir = Path(model.adapter).expanduser()
    elif model.path == "embedded":
        adapter_dir = embedded_adapter_dir()
    else:
        raise UserError(
            f"the embedded cold-start adapter fits only the embedded model, not {model_dir}",
            "set model.adapter=null, or to a folder that 'selfgc-rl sft' wrote for this model",
        )
    _check_adapter(adapter_dir, model_dir, shapes)
    return model_dir, adapter_dir


def _check_model(folder: Path) -> dict[str, list[int]]:
    """Check a Hugging Face model folder; returns tensor name -> shape, read from the headers of its weight files."""
    remedy = "give model.path a Hugging Face model folder, or 'embedded'"
    if not folder.is_dir():
        raise UserError(f"model folder '{folder}' does not exist", remedy)
    config = _read_json(folder / "config.json", f"'{folder}' is not a model folder", remedy)
    if "model_type" not in config:
        raise UserError(f"'{folder / 'config.json'}' names no model_type", remedy)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise UserError(
            f"model folder '{folder}' has no tokenizer", f"copy the model's {' or '.join(_TOKENIZER_FILES)} into it"
        )
    weights = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed = _read_json(index, f"model folder '{folder}'", "download the model again").get("weight_map", {})
        weights = [folder / name for name in sorted(set(listed.values()))]
    if not weights:
        raise UserError(
            f"model folder '{folder}' has no *.safetensors weights", "save the model with save_pretrained first"
        )
    shapes: dict[str, list[int]] = {}
    for path in weights:
        shapes |= _tensor_shapes(path, "download or convert the model again")
    return shapes


def _check_adapter(folder: Path, model_dir: Path, model_shapes: dict[str, list[int]]) -> None:
    """Check that ``folder`` holds a whole LoRA adapter and that its matrices fit the model's linear layers."""
    if not folder.is_dir():
        raise UserError(f"adapter folder '{folder}' does not exist", "give model.adapter a folder, 'embedded' or null")
    remedy = "give model.adapter a LoRA folder that 'selfgc-rl sft', 'train' or PEFT wrote for this model"
    config = _read_json(folder / "adapter_config.json", f"'{folder}' is not an adapter folder", remedy)
    if config.get("peft_type") != "LORA":
        raise UserError(f"'{folder}' holds an adapter of type {config.get('peft_type')!r}, not LORA", remedy)
    path = folder / "adapter_model.safetensors"
    shapes = _tensor_shapes(path, remedy)
    halves = {name: shape for name, shape in shapes.items() if ".lora_A." in name or ".lora_B." in name}
    if not halves:
        raise UserError(f"'{path}' holds no LoRA matrices", remedy)
    if "quantization_config" in json.loads((model_dir / "config.json").read_text(encoding="utf-8")):
        return  # packed weights have other shapes on disk; load_policy still compares the loaded modules
    known = 0
    for name, shape in halves.items():
        module, half = name.removeprefix(_PEFT_PREFIX).rsplit(".lora_", 1)
        base = model_shapes.get(f"{module}.weight")
        layer = re.match(r".*?\.layers\.\d+\.", module)
        if base is None and layer and not any(n.startswith(layer[0]) for n in model_shapes):
            raise UserError(f"adapter '{folder}' has weights for {module}, a layer that {model_dir} lacks", remedy)
        if base is None:  # transformers may rename or fuse modules on loading
            continue
        known += 1
        fits = shape[1:] == base[1:] if half.startswith("A") else shape[:1] == base[:1]
        if not fits:
            raise UserError(
                f"adapter '{folder}' does not fit {model_dir}: {name} has shape {shape}, {module} has {base}", remedy
            )
    if not known:
        raise UserError(
            f"adapter '{folder}' was made for another architecture: {model_dir} has none of its modules", remedy
        )


def _read_json(path: Path, problem: str, remedy: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{problem}: it has no {path.name}", remedy) from None
    except (OSError, ValueError) as e:
        raise UserError(f"'{path}' cannot be read: {str(e).splitlines()[0]}", remedy) from None
    if not isinstance(value, dict):
        raise UserError(f"'{path}' must hold a JSON object", remedy)
    return value


def _tensor_shapes(path: Path, remedy: str) -> dict[str, list[int]]:
    """Tensor name -> shape from a safetensors header; opening also checks that the file is as long as it must be."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as tensors:
            return {name: list(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
    except FileNotFoundError:
        raise UserError(f"'{path}' is missing", remedy) from None
    except (SafetensorError, OSError) as e:
        raise UserError(f"'{path}' is malformed or cut short: {e}", remedy) from None


# -- loading for training ---------------------------------------------------------------------------------------------


def load_policy(
    model_dir: Path,
    adapter_dir: Path | None,
    *,
    rank: int,
    alpha: int,
    dtype: str,
    trainable: bool = True,
    attn_implementation: str = "sdpa",
) -> PeftModel:
    """Load the base model with a LoRA adapter on top; only the adapter is trained, and its weights are float32.

    Args:
        model_dir, adapter_dir: as :func:`resolve_model` returns them; without an adapter a fresh one (which changes
            nothing yet; its A halves are drawn from torch's global seed) covers all linear layers but the LM head.
        rank, alpha: of the fresh adapter; an existing one keeps its own.
        dtype: "float32" or "bfloat16", of the frozen base weights.
        trainable: False freezes the adapter too.

    Raises:
        UserError: the adapter does not fit the model, or holds values that are not finite.
    """
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=getattr(torch, dtype), attn_implementation=attn_implementation, local_files_only=True
    )
    if adapter_dir is None:
        lora = LoraConfig(
            task_type="CAUSAL_LM", r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules="all-linear"
        )
        policy = get_peft_model(base, lora)
        if not trainable:
            policy.requires_grad_(False)
    else:
        remedy = "give model.adapter a LoRA folder made for this model"
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Found missing adapter keys")  # _check_loaded refuses them
                policy = PeftModel.from_pretrained(base, str(adapter_dir), is_trainable=trainable)
        except (RuntimeError, ValueError, TypeError, KeyError, OSError) as e:
            raise UserError(
                f"adapter '{adapter_dir}' cannot be loaded onto {model_dir}: {str(e).splitlines()[0]}", remedy
            ) from e
        _check_loaded(policy, adapter_dir, remedy)
    return policy.train(trainable)


def _check_loaded(policy: PeftModel, adapter_dir: Path, remedy: str) -> None:
    """PEFT only warns about keys without a home; refuse them, and values that would poison every log-prob."""
    import torch
    from peft import get_peft_model_state_dict

    loaded = get_peft_model_state_dict(policy)
    stored = _tensor_shapes(adapter_dir / "adapter_model.safetensors", remedy)
    if astray := sorted(stored.keys() ^ loaded.keys()):
        raise UserError(f"adapter '{adapter_dir}' does not fit the model: {astray[0]} is on one side only", remedy)
    for name, tensor in loaded.items():
        if not torch.isfinite(tensor).all():
            raise UserError(f"adapter '{adapter_dir}': {name} holds values that are not finite", remedy)


if __name__ == "__main__":
    try:
        print(embedded_model_dir())
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(e.exit_code)
