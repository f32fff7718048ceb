"""Sealed tools: workspace programs whose outputs cannot be read before their time.

Each output is stored encrypted under the input that unlocks it (XOR with a SHA-256 stream), so reading or grepping
the program gives nothing: the answer of a chain can only be had by walking it. Outputs marked one-time are erased
from the program after they were printed.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping

_PROGRAM = r"""#!/usr/bin/env python3
import ast, base64, hashlib, json, sys
SALT = {salt!r}
ONCE = {once!r}
DATA = json.loads({data!r})

def stream(key, n):
    out, i = b"", 0
    while len(out) < n:
        out += hashlib.sha256(f"{{SALT}}|{{i}}|{{key}}".encode()).digest()
        i += 1
    return out

def unseal(key):
    slot = hashlib.sha256(f"{{SALT}}#{{key}}".encode()).hexdigest()[:16]
    if slot not in DATA:
        return None
    raw = base64.b64decode(DATA[slot])
    text = bytes(a ^ b for a, b in zip(raw, stream(key, len(raw)))).decode()
    if slot in ONCE:
        gone = dict(DATA)
        del gone[slot]
        source = open(__file__).read()
        open(__file__, "w").write(source.replace(repr(json.dumps(DATA)), repr(json.dumps(gone))))
    return text

{main}
"""


def _stream(salt: str, key: str, n: int) -> bytes:
    out, i = b"", 0
    while len(out) < n:
        out += hashlib.sha256(f"{salt}|{i}|{key}".encode()).digest()
        i += 1
    return out


def _slot(salt: str, key: str) -> str:
    return hashlib.sha256(f"{salt}#{key}".encode()).hexdigest()[:16]


def sealed_program(outputs: Mapping[str, str], *, salt: str, main: str, once: frozenset[str] = frozenset()) -> str:
    """Source of a Python program that prints ``outputs[key]`` only for whoever knows ``key``.

    Args:
        outputs: unlocking key -> text.
        main: program text that computes a key and calls ``unseal(key)`` (None for a wrong key).
        once: keys whose text is erased after the first print.
    """
    data = {}
    for key, text in outputs.items():
        raw = text.encode()
        mixed = bytes(a ^ b for a, b in zip(raw, _stream(salt, key, len(raw)), strict=False))
        data[_slot(salt, key)] = base64.b64encode(mixed).decode()
    return _PROGRAM.format(salt=salt, once=sorted(_slot(salt, k) for k in once), data=json.dumps(data), main=main)
