"""Demonstration episodes of the scripted policies, as token rows: what the cold start is trained on.

* A demonstration is one episode in the real environment; each of its turns is a row (prompt ids, reply ids) exactly as
  the policy would meet it when it acts.
* Styles are drawn from a mixture, families in turn, seeds below ``HELDOUT_SEED_BASE``; held-out demonstrations have
  seeds from there on and one style, the good one.
* A turn that needs a fact which its style has thrown away is not imitated: the episode is cut there.
* Playing episodes costs minutes, so they are cached in one JSON-lines file, whose first line names everything they
  depend on (settings, environment version, tokenizer). A file with another first line is made again.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import selfgc_envs
from selfgc_envs.coding_env import CodingEnv
from selfgc_envs.errors import UserError
from selfgc_envs.scripted import DEFAULT_MIXTURE, STYLES, make_demonstrator
from selfgc_envs.tasks import HELDOUT_SEED_BASE, make_task
from selfgc_rl.config import Config
from selfgc_rl.tokens import PromptEncoder, tokenizer_fingerprint

HELDOUT_STYLE = "fold_drop"
_PLAYERS = 4  # episodes played at once; most of their time is the sandbox's


@dataclass(frozen=True)
class Demonstration:
    """One episode. Turn ``i`` is the row ``sequences[i]``, trained from token ``trained_from[i]`` on."""

    family: str
    seed: int
    style: str
    success: float | None  # None: cut before its end
    sequences: tuple[tuple[int, ...], ...]
    trained_from: tuple[int, ...]


def demonstrate(plan: tuple[str, int, str], config: Config, encoder: PromptEncoder) -> Demonstration:
    """Play one episode. ``plan`` is (family, seed, style)."""
    family, seed, style = plan
    env_config = config.env
    task = make_task(
        family,
        level=env_config.level,
        seed=seed,
        pressure=env_config.pressure,
        window=env_config.window,
        token_counter=encoder.count,
    )
    env = CodingEnv(
        task,
        token_counter=encoder.count,
        strategy=env_config.strategy,
        strategy_options=env_config.strategy_options,
        max_turns=env_config.max_turns,
        on_overflow=env_config.on_overflow,
        sandbox=env_config.sandbox,
        merge_tail=encoder.merges_tail,
    )
    sequences, trained_from = [], []
    try:
        obs, _ = env.reset()
        demonstrator = make_demonstrator(env, style, random.Random(f"demonstrator {seed}"))
        while env.stop_reason is None and not demonstrator.blind:
            reply = demonstrator.act(obs)
            prompt_ids = encoder.encode(obs["messages"])
            sequences.append((*prompt_ids, *encoder.encode_reply(reply)))
            trained_from.append(len(prompt_ids))
            obs, *_ = env.step(reply)
        return Demonstration(family, seed, style, env.success, tuple(sequences), tuple(trained_from))
    finally:
        env.close()


def plan_demonstrations(config: Config) -> tuple[list[tuple[str, int, str]], list[tuple[str, int, str]]]:
    """(family, seed, style) of each training and each held-out episode: functions of the config alone.

    Raises:
        UserError: an unknown style, or weights that are not a mixture.
    """
    sft = config.sft
    mixture = sft.styles or DEFAULT_MIXTURE
    if unknown := sorted(set(mixture) - set(STYLES)):
        raise UserError(f"sft.styles: unknown style '{unknown[0]}'", f"styles: {', '.join(STYLES)}")
    if min(mixture.values()) < 0 or sum(mixture.values()) <= 0:
        raise UserError("sft.styles: weights must be at least 0, and one above 0", "e.g. {never: 1, fold: 1}")
    rng = random.Random(f"demonstrations {sft.seed}")
    first = rng.randrange(HELDOUT_SEED_BASE - sft.episodes) if sft.episodes < HELDOUT_SEED_BASE else 0
    styles = rng.choices(list(mixture), list(mixture.values()), k=sft.episodes)
    families = sft.families
    training = [(families[i % len(families)], first + i, style) for i, style in enumerate(styles)]
    heldout = [(families[i % len(families)], HELDOUT_SEED_BASE + i, HELDOUT_STYLE) for i in range(sft.heldout_episodes)]
    return training, heldout


def load_demonstrations(
    path: Path, config: Config, encoder: PromptEncoder, progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[list[Demonstration], list[Demonstration]]:
    """Training and held-out demonstrations, from the cache at ``path`` if it fits, else played and cached.

    Args:
        progress: called with (episodes played, episodes in all).

    Raises:
        UserError: the settings name an unknown style or family, or no sandbox is available.
    """
    training, heldout = plan_demonstrations(config)
    plan = training + heldout
    key = demonstrations_key(config, encoder)
    episodes = _read(path, key, len(plan))
    if episodes is None:
        episodes = []
        pool = ThreadPoolExecutor(_PLAYERS)
        try:
            for episode in pool.map(lambda one: demonstrate(one, config, encoder), plan):
                episodes.append(episode)
                progress(len(episodes), len(plan))
        finally:
            pool.shutdown(cancel_futures=True)
        _write(path, key, episodes)
    return episodes[: len(training)], episodes[len(training) :]


def demonstrations_key(config: Config, encoder: PromptEncoder) -> str:
    """Hash of everything the episodes depend on."""
    plans = plan_demonstrations(config)
    tokenizer = tokenizer_fingerprint(encoder.tokenizer)
    parts = [selfgc_envs.__version__, config.env.model_dump(mode="json"), plans, tokenizer]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _read(path: Path, key: str, count: int) -> list[Demonstration] | None:
    """The cached episodes, or None if there are none for this key. The file was renamed into place when complete."""
    if not path.is_file():
        return None
    with path.open(encoding="utf-8") as lines:
        if json.loads(next(lines, "{}")) != {"key": key, "episodes": count}:
            return None
        return [_from_json(json.loads(line)) for line in lines]


def _from_json(record: dict[str, Any]) -> Demonstration:
    record["sequences"] = tuple(tuple(ids) for ids in record["sequences"])
    record["trained_from"] = tuple(record["trained_from"])
    return Demonstration(**record)


def _write(path: Path, key: str, episodes: Sequence[Demonstration]) -> None:
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"key": key, "episodes": len(episodes)}) + "\n")
        for episode in episodes:
            file.write(json.dumps(asdict(episode)) + "\n")
    temporary.replace(path)
