"""Shared fixtures. Tests run offline and on one thread; those that need the vLLM server share one and run last."""

from __future__ import annotations

import os

for _name, _value in {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}.items():
    os.environ.setdefault(_name, _value)  # before anything imports torch or transformers

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tiny import make_tiny_model

if TYPE_CHECKING:
    from selfgc_rl.engines.server import VLLMServer

hypothesis.settings.register_profile("default", deadline=None)  # a busy machine is not a bug
hypothesis.settings.load_profile("default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first, then slow ones, then those that need the server; otherwise in file order."""
    items.sort(key=lambda item: ("vllm" in item.keywords, "slow" in item.keywords))


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-style model folder (see tiny.py)."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-qwen3", "qwen3")


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama-style model folder with tied embeddings."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama", "llama")


@pytest.fixture(scope="session")
def vllm_server(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    """One vLLM server of the tiny Qwen3 model in float32 for the whole test run (mark users with ``vllm``)."""
    from selfgc_rl.config import ServerConfig
    from selfgc_rl.engines.server import VLLMServer

    config = ServerConfig(kv_cache_gib=0.25, max_num_seqs=16)
    log_path = tmp_path_factory.mktemp("vllm") / "vllm.log"
    with VLLMServer.start(tiny_model_dir, config, window_tokens=2048, max_lora_rank=16, log_path=log_path) as server:
        yield server
