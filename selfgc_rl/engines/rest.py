"""Small blocking JSON requests to an inference server: health, adapters, metrics. Sampling has its own async client.

No proxy is ever used: an inference server is a peer, and a proxy setting meant for the internet breaks ``127.0.0.1``.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from selfgc_envs.errors import ServerError

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class HTTPRefusal(ServerError):
    """The server answered, with an HTTP error status. ``message`` is the server's own text."""

    def __init__(self, url: str, status: int, message: str) -> None:
        self.status = status
        self.message = message
        super().__init__(f"{url} answered {status}: {message}")


def error_text(body: str) -> str:
    """The message inside an OpenAI-style or FastAPI error body; the first line of anything else."""
    try:
        tree = json.loads(body)
    except ValueError:
        tree = None
    if isinstance(tree, dict):
        error = tree.get("error")
        text = error.get("message") if isinstance(error, dict) else tree.get("message") or tree.get("detail") or error
        body = str(text or body)
    return next((line.strip() for line in body.splitlines() if line.strip()), "(empty answer)")[:500]


def request_text(url: str, payload: Any = None, *, timeout_s: float = 10.0) -> str:
    """GET ``url``, or POST ``payload`` as JSON, and return the body.

    Raises:
        HTTPRefusal: an HTTP error status.
        ServerError: no answer.
    """
    data = None if payload is None else json.dumps(payload).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    try:
        with _opener.open(request, timeout=timeout_s) as answer:
            return answer.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as e:
        raise HTTPRefusal(url, e.code, error_text(e.read().decode("utf-8", "replace"))) from None
    except (OSError, ValueError) as e:  # URLError and timeouts are OSErrors; a malformed URL is a ValueError
        raise ServerError(f"{url} does not answer: {getattr(e, 'reason', e)}") from None


def request_json(url: str, payload: Any = None, *, timeout_s: float = 10.0) -> Any:
    """Like :func:`request_text`, decoded. Raises :class:`ServerError` when the body is not JSON."""
    body = request_text(url, payload, timeout_s=timeout_s)
    try:
        return json.loads(body)
    except ValueError:
        raise ServerError(f"{url} did not answer with JSON but with {body[:80]!r}") from None
