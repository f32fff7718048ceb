"""A vLLM server as a context manager: started here, or somebody else's that we attach to.

Invariants:

* Nothing of a server we started outlives us, not even when we are SIGKILLed (:mod:`selfgc_rl.engines._guard`).
* ``start`` returns only when the server answers under its own model; whatever goes wrong before that is one
  :class:`UserError` line with the path of the log file, and nothing is left running.
* The server samples from the plain softmax: the model's own ``generation_config.json`` (top-p, repetition penalty)
  is ignored, and log-probs are those of the distribution that was sampled from (``processed_logprobs``).
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from selfgc_envs.errors import ServerError, UserError
from selfgc_rl.config import ServerConfig
from selfgc_rl.engines import _guard
from selfgc_rl.engines.rest import request_json, request_text

BASE_MODEL = "base"  # the name the base model is served under
_HOST = "127.0.0.1"
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM accepts as --max-lora-rank
_CPU_BLOCK_TOKENS = 32  # prefix-cache grain; vLLM's CPU default of 128 would waste up to 127 tokens a turn
_CPU_BATCH_TOKENS = 4096  # tokens of one engine step, enough for a few prompts
_ERROR_LINE = re.compile(r"(?:^|\s)((?:[\w.]*(?:Error|Exception)|[\w.]+: error|error): .+)$")
_NOT_THE_CAUSE = ("Engine core initialization failed", "WorkerProc initialization failed", "Engine core proc")

Progress = Callable[[float], None]


class VLLMServer:
    """A running vLLM server. Make one with :meth:`open`, :meth:`start` or :meth:`attach`; leave it with :meth:`stop`.

    Attributes:
        url: ``http://host:port``.
        base_model: the name the base model is served under.
        log_path: the server's log; None when we only attached.
    """

    def __init__(self, url: str, base_model: str = BASE_MODEL) -> None:
        self.url = url.rstrip("/")
        self.base_model = base_model
        self.log_path: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    # -- ways to get one ------------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        model_dir: Path,
        config: ServerConfig,
        *,
        window_tokens: int,
        max_lora_rank: int,
        log_path: Path,
        temperature: float = 1.0,
        progress: Progress | None = None,
    ) -> VLLMServer:
        """Attach to ``config.url`` if it is set, else start a server. Arguments as in those two."""
        if config.url is not None:
            return cls.attach(config.url, window_tokens=window_tokens, temperature=temperature)
        return cls.start(
            model_dir,
            config,
            window_tokens=window_tokens,
            max_lora_rank=max_lora_rank,
            log_path=log_path,
            progress=progress,
        )

    @classmethod
    def start(
        cls,
        model_dir: Path,
        config: ServerConfig,
        *,
        window_tokens: int,
        max_lora_rank: int,
        log_path: Path,
        progress: Progress | None = None,
    ) -> VLLMServer:
        """Start a server and wait until it is ready (about 40 s on two cores).

        Args:
            window_tokens: longest prompt plus reply, in tokens.
            max_lora_rank: highest adapter rank to come (``config.max_lora_rank`` if that is higher).
            log_path: where stdout and stderr go; overwritten.
            progress: called about twice a second with the seconds waited.

        Raises:
            UserError: the port is taken, or the server died or did not get ready in ``config.start_timeout_s``.
        """
        port = _claim_port(config.port)
        server = cls(f"http://{_HOST}:{port}")
        rank = max(max_lora_rank, config.max_lora_rank)
        if rank > _LORA_RANKS[-1]:
            raise UserError(f"LoRA rank {rank} is above vLLM's limit of {_LORA_RANKS[-1]}", "use a lower lora_rank")
        on_gpu = _has_gpu()
        server._launch(
            _command(model_dir, config, port=port, window_tokens=window_tokens, lora_rank=rank, on_gpu=on_gpu),
            _environment(),
            log_path,
        )
        try:
            server._wait_ready(config.start_timeout_s, progress)
        except BaseException:  # Ctrl-C included: nothing may stay behind
            server.stop()
            raise
        return server

    @classmethod
    def attach(cls, url: str, *, window_tokens: int, temperature: float = 1.0) -> VLLMServer:
        """Use a running server. It is never stopped by us, and adapter folders must be visible from it.

        Args:
            window_tokens: longest prompt plus reply the server has to accept.
            temperature: the sampling temperature; if it is not 1 the server's log-prob mode is tried out.

        Raises:
            UserError: nothing answers there, the window is too short, or log-probs are of another distribution.
        """
        server = cls(url)
        try:
            cards = request_json(f"{server.url}/v1/models")["data"]
            base = next(card for card in cards if not card.get("parent"))
            server.base_model, limit = base["id"], base.get("max_model_len")
        except (ServerError, KeyError, TypeError, StopIteration) as e:
            raise UserError(
                f"no vLLM server to use at {url} ({e or 'no base model listed'})",
                "start one (selfgc-rl serve), or set server.url=null to have one started",
            ) from None
        if limit is not None and limit < window_tokens:
            raise UserError(
                f"the server at {url} accepts {limit} tokens, this run needs {window_tokens}",
                f"restart it with --max-model-len {window_tokens}, or lower env.window",
            )
        if temperature != 1.0:
            server._check_logprobs_mode()
        return server

    # -- a server's life ------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """Process group of the server we started; None when attached."""
        return None if self._process is None else self._process.pid

    def alive(self) -> bool:
        """Whether the server answers its health check (and, if it is ours, its process runs)."""
        if self._process is not None and self._process.poll() is not None:
            return False
        try:
            request_text(f"{self.url}/health", timeout_s=5.0)
        except ServerError:
            return False
        return True

    def peak_rss_mb(self) -> float:
        """Sum over the server's processes of each one's own memory peak, in MB; shared pages count in each."""
        if self._process is None:
            return 0.0
        total_kb = 0
        for pid in _guard.others_in_group(self._process.pid):
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue
            peak = re.search(r"VmHWM:\s+(\d+) kB", status)
            total_kb += int(peak[1]) if peak else 0
        return total_kb / 1000

    def failure(self) -> str:
        """Why the server died, as far as its log tells."""
        if self.log_path is None:
            return f"the server at {self.url} is gone"
        return f"{last_error_line(self.log_path)} (log: {self.log_path})"

    def stop(self) -> None:
        """End the server we started and wait until all its processes are gone. Safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.terminate()  # the guard ends the group: SIGTERM, grace, SIGKILL
            try:
                process.wait(2 * _guard.GRACE_S + 5)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(process.pid, signal.SIGKILL)  # only if the guard was killed or is stuck
        except ProcessLookupError:
            pass
        process.wait()

    def __enter__(self) -> VLLMServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _launch(self, command: list[str], environment: dict[str, str], log_path: Path) -> None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self.log_path = log_path
        guard = [sys.executable, "-I", str(Path(_guard.__file__)), str(os.getpid())]
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                guard + command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def _wait_ready(self, timeout_s: float, progress: Progress | None) -> None:
        assert self._process is not None and self.log_path is not None
        began = time.monotonic()
        while True:
            seconds = time.monotonic() - began
            if progress is not None:
                progress(seconds)
            if self._process.poll() is not None:
                raise UserError(
                    f"the vLLM server stopped while starting: {last_error_line(self.log_path)}",
                    f"the whole log is in {self.log_path}",
                )
            if self.alive():
                return
            if seconds > timeout_s:
                raise UserError(
                    f"the vLLM server was not ready after {timeout_s:.0f} s",
                    f"raise server.start_timeout_s, or see {self.log_path}",
                )
            time.sleep(0.5)

    def _check_logprobs_mode(self) -> None:
        """A processed distribution is flatter at temperature 2 (vLLM's highest) than at 1; a raw one is the same."""
        best = []
        for temperature in (1.0, 2.0):
            answer = request_json(
                f"{self.url}/v1/completions",
                {
                    "model": self.base_model,
                    "prompt": "one two three four",  # no single id: a padding id embeds to zero in many models
                    "max_tokens": 1,
                    "logprobs": 1,
                    "temperature": temperature,
                    "top_p": 1,
                    "top_k": 0,
                },
                timeout_s=120.0,
            )
            best.append(max(answer["choices"][0]["logprobs"]["top_logprobs"][0].values()))
        if abs(best[0] - best[1]) < 1e-6:
            raise UserError(
                f"the server at {self.url} returns log-probs of temperature 1, whatever it samples at",
                "restart it with --logprobs-mode processed_logprobs, or set rollout.temperature=1",
            )


def _claim_port(configured: int | None) -> int:
    """The configured port if it is free, else any free one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            probe.bind((_HOST, configured or 0))
        except OSError as e:
            raise UserError(
                f"port {configured} on {_HOST} cannot be used ({e.strerror})",
                "choose another with server.port=N, or leave server.port=null to have a free one chosen",
            ) from None
        return int(probe.getsockname()[1])


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _command(
    model_dir: Path, config: ServerConfig, *, port: int, window_tokens: int, lora_rank: int, on_gpu: bool
) -> list[str]:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model_dir), "--served-model-name", BASE_MODEL]
    command += ["--host", _HOST, "--port", str(port), "--disable-uvicorn-access-log"]
    command += ["--dtype", config.dtype, "--max-model-len", str(window_tokens)]
    command += ["--max-num-seqs", str(config.max_num_seqs), "--enable-prefix-caching"]
    command += ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
    command += ["--enable-lora", "--max-loras", str(config.max_loras)]
    command += ["--max-lora-rank", str(next(rank for rank in _LORA_RANKS if rank >= lora_rank))]
    if on_gpu:
        command += ["--gpu-memory-utilization", str(config.gpu_memory_utilization)]
    else:
        command += ["--enforce-eager", "--block-size", str(_CPU_BLOCK_TOKENS)]
        command += ["--kv-cache-memory-bytes", str(int(config.kv_cache_gib * 2**30))]
        # A prompt read in chunks, of a request with a seed, kills the CPU engine: "CPU Generator does not use offset".
        batch_tokens = max(window_tokens, _CPU_BATCH_TOKENS)
        command += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(batch_tokens)]
    return command + config.extra_args


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    environment.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override the config's cache size
    # Left to itself vLLM keeps one core free on CPU: half the machine where there are two.
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
    environment.update(
        VLLM_ALLOW_RUNTIME_LORA_UPDATING="True",
        VLLM_SERVER_DEV_MODE="1",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        PYTHONUNBUFFERED="1",
    )
    return environment


def last_error_line(log_path: Path) -> str:
    """The line of a server log that says best what went wrong: the last error that is not a mere consequence."""
    try:
        lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "no log was written"
    for line in reversed(lines):
        found = _ERROR_LINE.search(line)
        if found and not any(text in line for text in _NOT_THE_CAUSE):
            return found[1].strip()[:400]
    return next((line.strip()[:400] for line in reversed(lines) if line.strip()), "the log is empty")
