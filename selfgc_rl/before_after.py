"""Evaluate a trained adapter against what it started from, on the same held-out tasks, behind one vLLM server.

``base`` is the policy training started from: the config's adapter on its model, or the bare model. Both policies are
served by one server, one after the other; an evaluation that was interrupted plays only what is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from selfgc_rl.config import Config
from selfgc_rl.embedded import ADAPTER_FILES, file_sha256
from selfgc_rl.evaluate import compare, play_heldout
from selfgc_rl.export import check_adapter, read_lora_rank
from selfgc_rl.models import resolve_model
from selfgc_rl.tokens import load_encoder

BASE, TRAINED = "base", "trained"


def evaluate_before_after(
    config: Config,
    trained: Path,
    out_dir: Path,
    *,
    say: Callable[[str], None],
    waiting: Callable[[float], None] | None = None,
) -> dict[str, Any]:
    """Play both policies and compare them; returns what ``results.json`` in ``out_dir`` holds.

    Args:
        config: ``model`` names the base policy.
        trained: the adapter folder.
        say: prints one line for the user.
        waiting: called with the seconds waited while the server starts.

    Raises:
        UserError: the adapter is damaged or does not fit, or the folder holds an evaluation under other settings.
        InfrastructureError: the server died, or too many episodes failed; calling again plays only what is missing.
    """
    from selfgc_rl.episode import EnginePolicy
    from selfgc_rl.live_policy import LivePolicy

    model_dir, base = resolve_model(config.model)
    adapters = {BASE: base, TRAINED: trained}
    ranks = [read_lora_rank(adapter) for adapter in adapters.values() if adapter]
    check_adapter(trained, model_dir)
    encoder = load_encoder(model_dir)
    say(f"base:    {base or model_dir}\ntrained: {trained}\nstarting vLLM (log: {out_dir / 'server.log'})")
    out_dir.mkdir(parents=True, exist_ok=True)
    live = LivePolicy(
        model_dir,
        config,
        name="eval",
        lora_rank=max(ranks),
        log_path=out_dir / "server.log",
        say=say,
        waiting=waiting,
    )
    with live:
        for number, (name, adapter) in enumerate(adapters.items()):
            if adapter:
                live.publish(adapter, number)
            policy = EnginePolicy(live.engine, temperature=config.eval.temperature)
            play_heldout(config, name, policy, out_dir, encoder=encoder, identity=_identity(model_dir, adapter))
    return compare(config, out_dir, BASE, TRAINED)


def _identity(model_dir: Path, adapter: Path | None) -> str:
    """What tells a policy from others: its model's folder and the hash of its adapter's weights."""
    return f"{model_dir.name}+{file_sha256(adapter / ADAPTER_FILES[1])[:16] if adapter else 'no adapter'}"
