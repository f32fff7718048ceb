"""``selfgc-rl play``: watch one episode live, by a scripted demonstrator or by a model."""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from rich.text import Text

from selfgc_envs.errors import InfrastructureError, UserError
from selfgc_envs.tasks import Task, parse_task
from selfgc_rl.commands.common import config_from, console, plain, waiting
from selfgc_rl.config import Config
from selfgc_rl.episode import EnginePolicy, Policy, ScriptedPolicy, run_episode
from selfgc_rl.export import Source, find_source, read_lora_rank
from selfgc_rl.models import resolve_model
from selfgc_rl.play import render_end, render_turn
from selfgc_rl.tokens import load_encoder
from selfgc_rl.types import Episode, Turn

_SCRIPTED = "scripted:"


def run(args: argparse.Namespace) -> int:
    style = _style(args)
    parse_task(args.task)  # a misspelt task needs no model to be refused
    source = find_source(Path(args.adapter), args.model) if args.adapter else None
    config = config_from(args, run_dir=source.run_dir if source else None)
    model_dir = source.base_dir if source else _model_dir(config, args.model)
    encoder = load_encoder(model_dir)
    task = parse_task(args.task, token_counter=encoder.count)
    config = config.model_copy(update={"env": config.env.model_copy(update={"window": task.window})})
    out = console()
    out.print(Text.assemble((task.id, "bold"), f"\n{task.instruction}\n"))

    def show(turn: Turn) -> None:
        out.print(render_turn(turn, window=task.window, threshold=config.reward.threshold))
        time.sleep(args.delay)

    async def play(policy: Policy, task: Task) -> Episode:
        try:
            return await run_episode(
                policy,
                task,
                config=config,
                encoder=encoder,
                episode_id="play",
                group_id="play",
                seed=args.seed,
                on_turn=show,
            )
        finally:
            await policy.close()

    with ExitStack() as stack:
        policy = ScriptedPolicy(style) if style else _model_policy(args, config, model_dir, source, stack)
        episode = asyncio.run(play(policy, task))
    if episode.error:
        raise InfrastructureError(f"the episode failed: {episode.error}")
    out.print(render_end(episode, coefficient=config.reward.coefficient))
    return 0


def _style(args: argparse.Namespace) -> str | None:
    """The scripted style to play, or None when a model plays."""
    if args.policy is None:
        return None if args.adapter or args.model else "fold_drop"
    if not args.policy.startswith(_SCRIPTED):
        raise UserError(f"unknown policy '{args.policy}'", "scripted:STYLE, or --adapter DIR, or --model DIR")
    style: str = args.policy.removeprefix(_SCRIPTED)
    ScriptedPolicy(style)
    return style


def _model_dir(config: Config, model: str | None) -> Path:
    update = {"adapter": None, **({"path": model} if model else {})}
    return resolve_model(config.model.model_copy(update=update))[0]


def _model_policy(
    args: argparse.Namespace, config: Config, model_dir: Path, source: Source | None, stack: ExitStack
) -> Policy:
    """A policy behind a vLLM server that lives as long as ``stack``."""
    from selfgc_rl.live_policy import LivePolicy

    out = console()
    args.log_path = Path(tempfile.gettempdir()) / f"selfgc-play-{os.getpid()}.log"
    spinner, progress = waiting(out, "starting vLLM")
    with spinner:
        live = stack.enter_context(
            LivePolicy(
                model_dir,
                config,
                name="play",
                lora_rank=read_lora_rank(source.adapter_dir) if source else config.model.lora_rank,
                log_path=args.log_path,
                say=plain(out),
                waiting=progress,
            )
        )
    if source:
        live.publish(source.adapter_dir, 0)
    return EnginePolicy(live.engine)
