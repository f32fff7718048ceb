"""Serve an export: a vLLM server with the ``hermes`` tool parser on an OpenAI-compatible endpoint, until Ctrl-C.

An adapter export is loaded onto its base model; a merged export is the model. Both answer under one model name, and
both need what ``selfgc.json`` holds: the system prompt and the tools.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfgc_envs.errors import UserError
from selfgc_rl.config import ModelConfig, ServerConfig
from selfgc_rl.engines.server import VLLMServer
from selfgc_rl.export import SERVED_NAME, SETTINGS, check_adapter, read_json

_TOOL_FLAGS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]


@dataclass(frozen=True)
class Export:
    """An export folder, read and checked. ``adapter_dir`` is None for a merged one."""

    settings: dict[str, Any]
    model_dir: Path
    adapter_dir: Path | None

    @property
    def lora_rank(self) -> int:
        return int(self.settings["lora"]["rank"])

    @property
    def server_tokens(self) -> int:
        """Longest prompt plus reply."""
        return int(self.settings["window"]) + int(self.settings["sampling"]["max_new_tokens"])


def read_export(folder: Path, model: str | None = None) -> Export:
    """Read a folder written by ``selfgc-rl export``.

    Args:
        model: base model of an adapter export, when it is not where the export says.

    Raises:
        UserError: no export, a damaged one, or its base model is not there.
    """
    from selfgc_rl.models import resolve_model

    if not (folder / SETTINGS).is_file():
        raise UserError(f"'{folder}' is no export ({SETTINGS} is missing)", "selfgc-rl export RUN --to DIR writes one")
    settings = read_json(folder / SETTINGS)
    try:
        if settings["kind"] == "merged":
            export = Export(settings, resolve_model(ModelConfig(path=str(folder), adapter=None))[0], None)
        else:
            base, _ = resolve_model(ModelConfig(path=model or settings["base_model"]["path"], adapter=None))
            check_adapter(folder, base)
            export = Export(settings, base, folder)
        if export.lora_rank < 1 or export.server_tokens < 1:
            raise ValueError("a size below 1")
    except (KeyError, TypeError, ValueError) as e:
        raise UserError(f"'{folder / SETTINGS}' is damaged ({e!r})", "export again") from None
    return export


def start(
    export: Export,
    *,
    server: ServerConfig,
    log_path: Path,
    progress: Callable[[float], None] | None = None,
) -> VLLMServer:
    """Start the server; it answers under the model name ``selfgc``. Raises as :meth:`VLLMServer.start` does."""
    flags = [*server.extra_args, *_TOOL_FLAGS]
    if export.adapter_dir is None:
        flags += ["--served-model-name", SERVED_NAME]
    else:
        flags += ["--lora-modules", f"{SERVED_NAME}={export.adapter_dir.resolve()}"]
    return VLLMServer.start(
        export.model_dir,
        server.model_copy(update={"extra_args": flags}),
        window_tokens=export.server_tokens,
        max_lora_rank=export.lora_rank,
        log_path=log_path,
        progress=progress,
    )


def curl_example(url: str, export: Export) -> str:
    """A request to paste: the export's system prompt, one tool, and a question that wants a call."""
    body = {
        "model": SERVED_NAME,
        "messages": [
            {"role": "system", "content": export.settings["system_prompt"]},
            {"role": "user", "content": "List the files of the workspace."},
        ],
        "tools": [t for t in export.settings["tools"] if t["function"]["name"] == "list_files"],
        "max_tokens": export.settings["sampling"]["max_new_tokens"],
        "temperature": export.settings["sampling"]["temperature"],
    }
    data = shlex.quote(json.dumps(body, ensure_ascii=False))
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d {data}"
