"""The live policy: a vLLM server, its client and its publisher as one thing that survives the server's death.

Invariants:

* every version name is new: it carries the attempt (one per process), the step and the number of restarts, so neither
  a resumed run nor a restarted server can be answered from the prefix cache of other weights with the same name;
* ``rollouts`` returns episodes only if the server lived through them; otherwise it is restarted (a bounded number of
  times per run, each said), the current adapter is published again and the rollouts are redone from their seeds.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from selfgc_envs.errors import InfrastructureError, ServerError, UserError
from selfgc_rl.adapters import AdapterPublisher
from selfgc_rl.config import Config
from selfgc_rl.engines.server import VLLMServer
from selfgc_rl.engines.vllm import VLLMEngine
from selfgc_rl.types import Episode

MAX_RESTARTS = 3


class LivePolicy:
    """Use as a context manager: the server runs inside it.

    Args:
        model_dir: the base model.
        config: the run's config.
        name: start of every version name; unique among runs that share a server.
        lora_rank: rank of the adapters to come.
        log_path: the server's log.
        say: prints one line for the user.
        waiting: called with the seconds waited while the server starts.
    """

    def __init__(
        self,
        model_dir: Path,
        config: Config,
        *,
        name: str,
        lora_rank: int,
        log_path: Path,
        say: Callable[[str], None],
        waiting: Callable[[float], None] | None = None,
    ) -> None:
        self._model_dir = model_dir
        self._config = config
        self._name = f"{name}-{secrets.token_hex(3)}"
        self._rank = lora_rank
        self._log_path = log_path
        self._say = say
        self._waiting = waiting
        self._adapter: tuple[Path, int] | None = None
        self.restarts = 0
        self.server = self._open()
        self.engine = VLLMEngine(
            self.server.url,
            self.server.base_model,
            temperature=config.rollout.temperature,
            max_new_tokens=config.rollout.max_new_tokens,
            concurrency=config.rollout.concurrency,
        )
        self._publisher = self._new_publisher()

    def _open(self) -> VLLMServer:
        return VLLMServer.open(
            self._model_dir,
            self._config.server,
            window_tokens=self._config.env.window + self._config.rollout.max_new_tokens,
            max_lora_rank=self._rank,
            log_path=self._log_path,
            temperature=self._config.rollout.temperature,
            progress=self._waiting,
        )

    def _new_publisher(self) -> AdapterPublisher:
        return AdapterPublisher([self.server.url], [self.engine], keep=self._config.server.max_loras - 1)

    def publish(self, adapter_dir: Path, step: int) -> str:
        """Make the adapter the live policy; returns the version's name.

        Raises:
            UserError, ServerError: as :meth:`AdapterPublisher.publish`, after the restarts are used up.
        """
        self._adapter = (adapter_dir, step)
        while True:
            version = f"{self._name}-v{step:04d}" + (f"-r{self.restarts}" if self.restarts else "")
            try:
                self._publisher.publish(adapter_dir, version)
                return version
            except (ServerError, UserError):
                if self.server.alive():
                    raise
                self._restart()

    def rollouts(self, collect: Callable[[], list[list[Episode]]]) -> list[list[Episode]]:
        """Episodes from ``collect``, redone if the server died while they ran.

        Raises:
            ServerError: the server cannot be restarted (not ours, or too often).
            InfrastructureError: the server lives, yet not one episode could be played.
        """
        while True:
            try:
                groups = collect()
                failure = None
            except ServerError as e:
                groups, failure = [], e
            if self.server.alive():
                if failure is not None:
                    raise failure
                episodes = [episode for group in groups for episode in group]
                if not any(episode.valid for episode in episodes):
                    reason = next((episode.error for episode in episodes if episode.error), "no episode was played")
                    raise InfrastructureError(f"every episode of the step failed: {reason}")
                return groups
            self._restart()
            assert self._adapter is not None, "publish an adapter before the first rollout"
            self.publish(*self._adapter)

    def _restart(self) -> None:
        reason = self.server.failure()
        if self._config.server.url is not None:
            raise ServerError(f"{reason}; start it again, then go on with --resume")
        if self.restarts == MAX_RESTARTS:
            raise ServerError(f"the server died {MAX_RESTARTS + 1} times, at last: {reason}")
        self.restarts += 1
        self._say(f"the vLLM server died ({reason}); starting it again ({self.restarts} of {MAX_RESTARTS})")
        self.server.stop()
        if self._log_path.is_file():
            self._log_path.replace(self._log_path.with_name(f"{self._log_path.stem}.died{self.restarts}.log"))
        self.server = self._open()
        self.engine.url = self.server.url
        self._publisher = self._new_publisher()

    def close(self) -> None:
        """Stop the server, if it is ours."""
        self.server.stop()

    def __enter__(self) -> LivePolicy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
