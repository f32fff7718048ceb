"""Token-exact sampling from a vLLM server: prompt ids in, sampled ids and their log-probs out.

What a :class:`~selfgc_rl.types.Sample` promises, checked on every answer (a violation is a :class:`ServerError`):

* the server read exactly the prompt ids we sent, and answered under the model name we asked for;
* ``len(sampled_ids) == len(logprobs) == usage.completion_tokens``; the end-of-sequence id, when sampled, is among
  them; no log-prob is missing or impossible;
* ids were drawn from the plain softmax at ``temperature``: top-p, top-k, min-p and penalties are switched off in each
  request, because a server falls back on the model's ``generation_config.json`` for what a request leaves out.

``engine.model`` is the policy version: the name of the live adapter (:mod:`selfgc_rl.adapters` switches it). It is read
once per call, so an episode under way goes on with the next version, and each sample says which one made it.

Retries cover infrastructure only: refused or dropped connections, time-outs, 5xx.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from selfgc_envs.errors import ServerError
from selfgc_rl.engines.rest import error_text, request_text
from selfgc_rl.engines.server import BASE_MODEL, VLLMServer
from selfgc_rl.types import Sample

__all__ = ["BASE_MODEL", "EngineStats", "VLLMEngine", "VLLMServer"]

_FIRST_BACKOFF_S = 0.5
_PLAIN_SOFTMAX = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class _TryAgain(Exception):
    """An infrastructure failure that another attempt may get past."""


@dataclass
class EngineStats:
    """Totals since the engine was made. ``busy_s``: seconds with at least one request in flight."""

    requests: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    busy_s: float = 0.0


class VLLMEngine:
    """Asyncio client of one server. Usable from one event loop at a time, any number of loops in turn.

    Args:
        url: the server, ``http://host:port``.
        served_model: model name to start with (``server.base_model``, or a published adapter version).
        temperature: default sampling temperature; log-probs are taken at it.
        max_new_tokens: cap of one reply.
        concurrency: requests in flight at once; more wait here.
        retries: further attempts after an infrastructure failure, with doubling pauses.
        request_timeout_s: seconds without an answer after which an attempt counts as failed.
    """

    def __init__(
        self,
        url: str,
        served_model: str,
        *,
        temperature: float,
        max_new_tokens: int,
        concurrency: int = 32,
        retries: int = 3,
        request_timeout_s: float = 300.0,
    ) -> None:
        self.url = url.rstrip("/")
        self.model = served_model
        self.temperature = temperature
        self.max_new_tokens = max_new_tokens
        self.concurrency = concurrency
        self.retries = retries
        self.request_timeout_s = request_timeout_s
        self.stats = EngineStats()
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._in_flight = 0
        self._busy_since = 0.0
        self._cache_counts = (0.0, 0.0)

    async def sample(
        self, prompt_ids: Sequence[int], *, seed: int | None = None, temperature: float | None = None
    ) -> Sample:
        """One reply to ``prompt_ids``.

        Args:
            seed: makes the draw repeatable for a given model, prompt and batch composition.
            temperature: instead of the engine's; 0 is greedy.

        Raises:
            ServerError: the server is gone, kept failing, refused the request, or broke a promise listed above.
        """
        request = {
            **_PLAIN_SOFTMAX,
            "model": self.model,
            "prompt": list(prompt_ids),
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature if temperature is None else temperature,
            "seed": seed,
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        self._enter()
        try:
            answer = await self._post_with_retries(request)
        finally:
            self._leave()
        sample = checked_sample(answer, request)
        self.stats.requests += 1
        self.stats.prompt_tokens += len(sample.prompt_ids)
        self.stats.sampled_tokens += len(sample.sampled_ids)
        return sample

    def metrics(self) -> dict[str, float]:
        """Prefix-cache use since the last call, from the server's ``/metrics``; {} if nothing was looked up since.

        Returns:
            ``prefix_cache_hit_rate`` in [0, 1] and ``prefix_cache_queries`` (tokens looked up).
        """
        text = request_text(f"{self.url}/metrics")
        queries = _counter(text, "vllm:prefix_cache_queries_total")
        hits = _counter(text, "vllm:prefix_cache_hits_total")
        before, self._cache_counts = self._cache_counts, (queries, hits)
        if queries <= before[0]:
            return {}
        rate = (hits - before[1]) / (queries - before[0])
        return {"prefix_cache_hit_rate": rate, "prefix_cache_queries": queries - before[0]}

    async def close(self) -> None:
        """Close the connections. The engine can be used again afterwards."""
        if self._session is not None and self._loop is asyncio.get_running_loop():
            await self._session.close()
        self._session = None

    async def __aenter__(self) -> VLLMEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        if self._in_flight == 0:
            self._busy_since = time.monotonic()
        self._in_flight += 1

    def _leave(self) -> None:
        self._in_flight -= 1
        if self._in_flight == 0:
            self.stats.busy_s += time.monotonic() - self._busy_since

    def _open_session(self) -> aiohttp.ClientSession:
        """One session per event loop. Connections are not kept alive: on the loopback a new one costs nothing, and
        a server that closes an idle one just as it is reused would look like a failure."""
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed or self._loop is not loop:
            if self._session is not None and not self._session.closed:
                self._session.detach()  # its loop has ended; it holds no connections
            self._loop = loop
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self.concurrency, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=self.request_timeout_s),
            )
        return self._session

    async def _post_with_retries(self, request: dict[str, Any]) -> Any:
        for attempt in range(self.retries + 1):
            try:
                return await self._post(request)
            except _TryAgain as e:
                if attempt == self.retries:
                    tries = f" ({attempt + 1} attempts)" if attempt else ""
                    raise ServerError(f"vLLM server {self.url}: {e}{tries}") from None
            self.stats.retries += 1
            await asyncio.sleep(_FIRST_BACKOFF_S * 2**attempt * random.uniform(0.8, 1.2))
        raise AssertionError("unreachable")

    async def _post(self, request: dict[str, Any]) -> Any:
        try:
            async with self._open_session().post(f"{self.url}/v1/completions", json=request) as response:
                body = await response.text()
                if response.status >= 500:
                    raise _TryAgain(f"status {response.status}: {error_text(body)}")
                if response.status != 200:
                    raise ServerError(_refusal(self.url, request, response.status, error_text(body)))
                return await response.json(content_type=None)
        except TimeoutError:
            raise _TryAgain(f"no answer within {self.request_timeout_s:.0f} s") from None
        except aiohttp.ClientError as e:
            raise _TryAgain(f"connection failed: {e or type(e).__name__}") from None
        except ValueError as e:
            raise _TryAgain(f"the answer is not JSON: {e}") from None


def checked_sample(answer: Any, request: dict[str, Any]) -> Sample:
    """The :class:`Sample` in a completions answer, after the checks of the module docstring.

    Raises:
        ServerError: naming what differed, with both sides.
    """
    try:
        choice = answer["choices"][0]
        sampled_ids, prompt_ids = choice["token_ids"], choice["prompt_token_ids"]
        logprobs = choice["logprobs"]["token_logprobs"]
        text, finish_reason = choice["text"], choice["finish_reason"]
        model, counted = answer["model"], answer["usage"]["completion_tokens"]
        lengths = (len(sampled_ids), len(logprobs))
    except (KeyError, IndexError, TypeError) as e:
        raise ServerError(f"vLLM's answer lacks {e!r}: it must be 0.31 or newer, serving /v1/completions") from None
    if model != request["model"]:
        raise ServerError(f"asked for model '{request['model']}', answered by '{model}'")
    if prompt_ids != request["prompt"]:
        raise ServerError(
            f"the server read another prompt than was sent: {len(prompt_ids)} ids for {len(request['prompt'])}, "
            f"first difference at {_first_difference(prompt_ids, request['prompt'])}"
        )
    if lengths != (counted, counted) or counted == 0:
        raise ServerError(
            f"counts disagree: {lengths[0]} token ids, {lengths[1]} log-probs, usage says {counted} tokens were sampled"
        )
    if finish_reason not in ("stop", "length"):
        raise ServerError(f"the reply ended by '{finish_reason}', not by a stop token or the length cap")
    for position, logprob in enumerate(logprobs):
        if not isinstance(logprob, int | float) or not -9000.0 < logprob <= 1e-3:  # vLLM writes -9999 for -inf
            raise ServerError(f"the log-prob of sampled token {position} is {logprob}")
    return Sample(
        prompt_ids=tuple(prompt_ids),
        sampled_ids=tuple(sampled_ids),
        logprobs=tuple(float(logprob) for logprob in logprobs),
        text=text,
        finish_reason=finish_reason,
        policy_version=model,
    )


def _refusal(url: str, request: dict[str, Any], status: int, message: str) -> str:
    prompt, reply = len(request["prompt"]), request["max_tokens"]
    if "context length" in message or "max_model_len" in message or "max_tokens" in message:
        return (
            f"vLLM server {url}: a prompt of {prompt} tokens plus up to {reply} new ones is above its "
            f"--max-model-len ({message})"
        )
    if status == 404:
        return f"vLLM server {url} does not know model '{request['model']}' (unloaded, or the server was restarted)"
    return f"vLLM server {url} refused the request with status {status}: {message}"


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _counter(metrics_text: str, name: str) -> float:
    """Sum of a Prometheus counter over its labels."""
    pattern = rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$"
    return sum(float(value) for value in re.findall(pattern, metrics_text, re.MULTILINE))
