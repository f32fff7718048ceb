"""``bugchain``: bugs revealed one at a time by a verbose failing check; a release key is printed once, at the start.

The check's reports are sealed under the values found so far, so the next expected value exists nowhere in readable
form until the bugs before it are fixed. In a quarter of the tasks a later report corrects the release key.
"""

from __future__ import annotations

import json
import random
from typing import Any

from selfgc_envs.tasks.base import FamilyInfo, OracleTurn, Task, TextCounter
from selfgc_envs.tasks.sealed import sealed_program
from selfgc_envs.tasks.text import Names, fill

_BUGS = {"nano": 2, "small": 10, "full": 30}
_CONSTANTS = ("LIMIT", "DEPTH", "WIDTH", "PORT", "RATE", "SIZE")
_MAIN = r"""
def value(path, name):
    try:
        for node in ast.parse(open(path).read()).body:
            if isinstance(node, ast.Assign) and node.targets[0].id == name:
                return ast.literal_eval(node.value)
    except Exception:
        return None

key, text = "start", None
while (report := unseal(key)) is not None:
    text, last = report, key
    key = key + "|" + str(value(*json.loads(text.split("\n", 1)[0])))
body = text.partition("\n")[2] if text is not None else ""
note = unseal("note " + last) if text is not None else None
body = body.replace("@note\n", note + "\n" if note else "")
print(body)
sys.exit(0 if "all checks pass" in body else 1)
"""


def make(task_id: str, level: str, seed: int, pressure: float, window: int, count: TextCounter) -> Task:
    rng = random.Random(task_id.rsplit(":", 2)[0] + f":{pressure}")
    names = Names(rng)
    n = _BUGS[level]
    modules = [names() for _ in range(n)]
    constants = [rng.choice(_CONSTANTS) for _ in range(n)]
    wrong = [rng.randrange(10, 99) for _ in range(n)]
    right = [rng.choice([v for v in range(10, 99) if v != w]) for w in wrong]
    keep = {0: names(3)}
    if rng.random() < 0.25:
        keep[rng.randrange(1, n)] = names(3)
    files = {}
    for m, c, w in zip(modules, constants, wrong, strict=True):
        files[f"{m}.py"] = f'"""Settings of {m}."""\n\n{c} = {w}\nNAME = "{m}"\n'
    outputs: dict[str, str] = {}
    turns: list[OracleTurn] = []
    key = "start"
    for i in range(n + 1):
        if i < n:
            lines = [
                f"check {i + 1} of {n}: {modules[i]}.py fails",
                f"AssertionError: {constants[i]} is {wrong[i]}, expected {right[i]}",
            ]
            target = [f"{modules[i]}.py", constants[i]]
        else:
            lines, target = ["all checks pass"], ["", ""]
        if i in keep:
            lines.insert(1, "@note")
            outputs[f"note {key}"] = f"key: {keep[i]}" if i == 0 else f"correction, the key is now: {keep[i]}"
        outputs[key] = json.dumps(target) + "\n" + fill(lines, pressure * window / (n + 1), rng, names, count)
        calls: list[tuple[str, dict[str, str]]] = []
        if i:
            args = {"path": f"{modules[i - 1]}.py", "old": str(wrong[i - 1]), "new": str(right[i - 1])}
            calls.append(("str_replace", args))
        calls.append(("run_bash", {"cmd": "./check"}))
        turns.append(
            OracleTurn(tuple(calls), keep=f"key {keep[i]}" if i in keep else "", supersedes=i > 0 and i in keep)
        )
        if i < n:
            key += f"|{right[i]}"
    answer = keep[max(keep)]
    turns.append(
        OracleTurn((("write_file", {"path": "answer.txt", "content": answer}), ("submit", {})), needs_facts=True)
    )
    checks: list[dict[str, Any]] = [{"type": "file", "path": "answer.txt", "equals": answer}]
    checks += [
        {"type": "constant", "path": f"{m}.py", "name": c, "equals": r}
        for m, c, r in zip(modules, constants, right, strict=True)
    ]
    return Task(
        id=task_id, family="bugchain", level=level, seed=seed, pressure=pressure, window=window,
        instruction=(
            "Run ./check. It reports one wrong constant at a time; repair it in its file and check again. The first "
            "report also gives a key; a later one may correct it. When all checks pass write answer.txt with the key, "
            "then submit."
        ),
        files={**files, "check": sealed_program(outputs, salt=task_id, main=_MAIN, once=frozenset({"note start"}))},
        executables=frozenset({"check"}),
        checks=tuple(checks),
        oracle=tuple(turns),
    )  # fmt: skip


FAMILY = FamilyInfo(
    "bugchain", "bugs revealed one at a time by a verbose check; an early key is needed at the end", make
)
