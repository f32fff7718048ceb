"""Messages → prompt ids, message by message, with caching.

A conversation that was edited in the middle shares most of its messages with the one before, so each message is
rendered and tokenised once. That is exact only where the chat template renders a message independently of its
neighbours and tokens do not cross message borders; a self-test at load compares with the template's own rendering,
and a template that fails it takes the slow exact path, with one warning.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from selfgc_envs.errors import UserError

Message = dict[str, str]

_PROBE: list[Message] = [
    {"role": "system", "content": "You act."},
    {"role": "user", "content": "A task\n\nin two paragraphs. "},
    {"role": "assistant", "content": '<tool_call>{"name": "run_bash", "arguments": {"cmd": "ls"}}</tool_call>'},
    {"role": "tool", "content": "a.py\n b.py\n"},
    {"role": "assistant", "content": "thought\n<tool_call>{}</tool_call>"},
    {"role": "tool", "content": " 1"},
    {"role": "tool", "content": "[obs folded: x]"},
    {"role": "user", "content": "budget_used_pct: 12"},
]


class PromptEncoder:
    """Turns messages into the exact ids that are sent to the server.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.

    Raises:
        UserError: the tokenizer has no chat template or no end-of-sequence token.
    """

    def __init__(self, tokenizer: Any) -> None:
        where = getattr(tokenizer, "name_or_path", "tokenizer")
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(f"tokenizer '{where}' has no chat template", "use an instruction-tuned model's folder")
        if tokenizer.eos_token_id is None:
            raise UserError(
                f"tokenizer '{where}' has no end-of-sequence token", "use an instruction-tuned model's folder"
            )
        self.tokenizer = tokenizer
        self.eos_id: int = tokenizer.eos_token_id
        self.pad_id: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self._message_ids = lru_cache(maxsize=65_536)(self._encode_message)
        self._prefix = ""
        self._generation: list[int] = []
        self.merges_tail = not self._accepts_two_users()
        self.cached = self._self_test()
        if not self.cached:
            warnings.warn(
                f"chat template of '{where}' is not message-wise; prompts take the slow exact path", stacklevel=2
            )

    # -- the one path from messages to ids ---------------------------------------------------------------------
    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Prompt ids of a conversation, generation prompt included."""
        if not self.cached:
            return self._tokenize(self._render(list(messages), generation=True))
        ids: list[int] = []
        for i, message in enumerate(messages):
            ids += self._message_ids(message["role"], message["content"], i == 0)
        return ids + self._generation

    def count(self, messages: Sequence[Message]) -> int:
        """Number of prompt ids: the project's one token counter."""
        if not self.cached:
            return len(self.encode(messages))
        total = len(self._generation)
        for i, message in enumerate(messages):
            total += len(self._message_ids(message["role"], message["content"], i == 0))
        return total

    def encode_reply(self, text: str) -> list[int]:
        """Ids of an assistant reply as a model would sample it, end of sequence included (demonstrations only)."""
        return [*self._tokenize(text), self.eos_id]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, without a trailing end-of-sequence token."""
        ids = list(ids)
        if ids and ids[-1] == self.eos_id:
            ids = ids[:-1]
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    # -- parts -------------------------------------------------------------------------------------------------
    def _tokenize(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _render(self, messages: list[Message], *, generation: bool = False) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)

    def _encode_message(self, role: str, content: str, first: bool) -> tuple[int, ...]:
        message = {"role": role, "content": content}
        if first:
            return tuple(self._tokenize(self._render([message])))
        return tuple(self._tokenize(self._render([_PROBE[0], message])[len(self._prefix) :]))

    def _accepts_two_users(self) -> bool:
        try:
            text = self._render([*_PROBE[:2], {"role": "user", "content": "second"}])
        except Exception:  # templates refuse with arbitrary exceptions
            return False
        return "paragraphs" in text and "second" in text

    def _self_test(self) -> bool:
        probe = list(_PROBE)
        if self.merges_tail:
            probe = probe[:-1]
        try:
            self._prefix = self._render(probe[:1])
            whole = self._render(probe)
            with_generation = self._render(probe, generation=True)
        except Exception as e:  # see above
            raise UserError(
                f"the chat template cannot render tool messages: {e}", "use a template with a tool role"
            ) from None
        if not with_generation.startswith(whole):
            return False
        self._generation = self._tokenize(with_generation[len(whole) :])
        self.cached = True
        return self.encode(probe) == self._tokenize(with_generation)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash of vocabulary, merges, special tokens and chat template: what decides how many tokens a text becomes."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) if hasattr(tokenizer, "backend_tokenizer") else {}
    parts = {
        "vocab": sorted(tokenizer.get_vocab().items()),
        "model": {k: v for k, v in backend.get("model", {}).items() if k != "vocab"},
        "normalizer": backend.get("normalizer"),
        "pre_tokenizer": backend.get("pre_tokenizer"),
        "special": {k: str(v) for k, v in sorted(tokenizer.special_tokens_map.items())},
        "chat_template": tokenizer.chat_template,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


def load_encoder(model_dir: str | Path) -> PromptEncoder:
    """The encoder of a model folder. Raises :class:`UserError` when the folder holds no usable tokenizer."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model_dir))
    except (OSError, ValueError, KeyError) as e:
        raise UserError(
            f"no tokenizer in '{model_dir}': {str(e).splitlines()[0]}", "give a Hugging Face model folder"
        ) from None
    return PromptEncoder(tokenizer)
