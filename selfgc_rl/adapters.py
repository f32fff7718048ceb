"""Publish versioned LoRA adapters to one or many vLLM servers.

Invariants:

* All or nothing: a version is live on every server, or on none; the engines switch only after the last server took it.
* A version name is used once. vLLM keys its prefix cache on the adapter's name (and path), so a name that came back
  with other weights would be answered from stale blocks. Runs that share a server need names that differ.
* The newest ``keep`` versions stay loaded, so that requests under way end on the version they began with. Their
  folders must stay on disk as they are: a server may evict an adapter from memory and read it again.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from selfgc_envs.errors import ServerError, UserError
from selfgc_rl.engines.rest import HTTPRefusal, request_text
from selfgc_rl.engines.vllm import VLLMEngine

_LOAD_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Published:
    """What one publish cost: wall-clock seconds, and bytes of weights per server."""

    version: str
    seconds: float
    bytes: int


class AdapterPublisher:
    """Loads adapters on all servers and points the engines at them.

    Args:
        urls: the servers.
        engines: the clients whose ``model`` follows the live version.
        keep: versions that stay loaded (the live one included); fewer than the servers' ``--max-loras``.
    """

    def __init__(self, urls: Sequence[str], engines: Sequence[VLLMEngine], keep: int = 2) -> None:
        if keep < 1:
            raise ValueError("keep must be at least 1: the live version")
        self.urls = [url.rstrip("/") for url in urls]
        self.engines = list(engines)
        self.keep = keep
        self.loaded: list[str] = []  # oldest first
        self._used: set[str] = set()

    def publish(self, adapter_dir: Path, version: str) -> Published:
        """Make ``version`` the live policy everywhere.

        Raises:
            UserError: the name was used before, or the adapter is malformed or does not fit the servers.
            ServerError: a server did not answer. After either, the version before is still live.
        """
        began = time.monotonic()
        if version in self._used:
            raise UserError(
                f"adapter version '{version}' was published before", "versions are never reused: take a new name"
            )
        size = check_adapter(adapter_dir)
        done: list[str] = []
        for url in self.urls:
            try:
                self._load(url, adapter_dir, version)
            except (ServerError, UserError):
                for other in done:
                    self._unload(other, version)
                raise
            done.append(url)
        self._used.add(version)
        self.loaded.append(version)
        for engine in self.engines:
            engine.model = version
        while len(self.loaded) > self.keep:
            oldest = self.loaded.pop(0)
            for url in self.urls:
                self._unload(url, oldest)
        return Published(version, time.monotonic() - began, size)

    def _load(self, url: str, adapter_dir: Path, version: str) -> None:
        payload = {"lora_name": version, "lora_path": str(adapter_dir.resolve())}
        try:
            request_text(f"{url}/v1/load_lora_adapter", payload, timeout_s=_LOAD_TIMEOUT_S)
        except HTTPRefusal as e:
            if e.status == 404 and e.message == "Not Found":
                raise UserError(
                    f"the server at {url} cannot load adapters while it runs",
                    "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",
                ) from None
            raise UserError(
                f"the server at {url} refused adapter '{version}' from {adapter_dir}: {e.message}",
                "check that it was made for this base model, and its rank against --max-lora-rank",
            ) from None

    def _unload(self, url: str, version: str) -> None:
        """Best effort: what stays behind costs memory, and its name is never used again."""
        try:
            request_text(f"{url}/v1/unload_lora_adapter", {"lora_name": version})
        except ServerError:
            pass


def check_adapter(adapter_dir: Path) -> int:
    """Size in bytes of the weights of a PEFT LoRA folder that looks sound.

    Raises:
        UserError: a file is missing, cut short, or not what its name says.
    """
    remedy = "give a folder written by save_pretrained of a PEFT LoRA model"
    config_path, weights_path = adapter_dir / "adapter_config.json", adapter_dir / "adapter_model.safetensors"
    for path in (config_path, weights_path):
        if not path.is_file():
            raise UserError(f"{adapter_dir} is not a LoRA adapter: {path.name} is missing", remedy)
    try:
        json.loads(config_path.read_text(encoding="utf-8"))["r"]
    except (ValueError, KeyError, TypeError) as e:
        raise UserError(f"{config_path} is no LoRA configuration ({type(e).__name__}: {e})", remedy) from None
    size = weights_path.stat().st_size
    try:
        with weights_path.open("rb") as f:
            header_bytes = struct.unpack("<Q", f.read(8))[0]
            if header_bytes > size:
                raise ValueError("header longer than the file")
            header = json.loads(f.read(header_bytes))
        end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        if 8 + header_bytes + end != size:
            raise ValueError(f"{size} bytes, its header promises {8 + header_bytes + end}")
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{weights_path} is damaged ({e})", remedy) from None
    return size
