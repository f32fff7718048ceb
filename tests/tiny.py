"""A random two-layer model with a real tokenizer, made in well under a second: for tests of everything but skill.

The tokenizer is a byte-level BPE with ChatML markers, so any text can be encoded, and a *sampled* id sequence is
usually not what encoding its text gives: tests that confuse the two fail with it. The head size (32) is one that
vLLM's CPU attention serves. Weights are drawn wide enough that next-token distributions are far from uniform.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # pad, start of a message, end of a message
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_CORPUS = [
    '<tool_call>{"name": "read_file", "arguments": {"path": "src/module.py"}}</tool_call>',
    '<tool_call>{"name": "fold", "arguments": {"id": "obs_"}}</tool_call>',
    '<tool_call>{"name": "run_bash", "arguments": {"cmd": "python -m pytest tests"}}</tool_call>',
    "system user assistant tool plan file observation result budget_used_pct window tokens left",
    "def main() -> int:\n    return 0\n",
]


def make_tiny_model(folder: Path, arch: Literal["qwen3", "llama"] = "qwen3", *, seed: int = 0) -> Path:
    """Write a float32 Hugging Face folder (hidden 64, 2 layers, 2 heads of 32, 1 KV head, context 8192); returns it."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        PretrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )
    classes: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel]]] = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }
    config_class, model_class = classes[arch]
    config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=arch == "llama",
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
