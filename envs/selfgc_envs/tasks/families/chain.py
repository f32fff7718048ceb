"""``chain``: each command prints the next command's argument, once; the code printed first is needed last.

DESIGN conditions: outputs are sealed under their argument (no grep), the code is printed once, log lines name
look-alike words, and in a quarter of the tasks a later output corrects the code.
"""

from __future__ import annotations

import random

from selfgc_envs.tasks.base import FamilyInfo, OracleTurn, Task, TextCounter
from selfgc_envs.tasks.sealed import sealed_program
from selfgc_envs.tasks.text import Names, fill

_STEPS = {"nano": 5, "small": 14, "full": 40}
_MAIN = r"""
text = unseal(" ".join(sys.argv[1:]))
print(text if text is not None else "unknown word, or already used; usage: ./step WORD")
sys.exit(0 if text is not None else 1)
"""


def make(task_id: str, level: str, seed: int, pressure: float, window: int, count: TextCounter) -> Task:
    rng = random.Random(task_id.rsplit(":", 2)[0] + f":{pressure}")
    names = Names(rng)
    n = _STEPS[level]
    words = ["start", *(names() for _ in range(n))]
    code = names(3)
    keep = {0: code}
    if rng.random() < 0.25:
        keep[rng.randrange(2, n - 1)] = names(3)
    outputs, turns = {}, []
    for i in range(n):
        lines = [f"step {i + 1} of {n} is done" if i < n - 1 else f"all {n} steps are done"]
        if i in keep:
            lines.append(f"code: {keep[i]}" if i == 0 else f"correction, the code is now: {keep[i]}")
        lines.append(f"next word: {words[i + 1]}" if i < n - 1 else f"last word: {words[n]}")
        outputs[words[i]] = fill(lines, pressure * window / n, rng, names, count)
        turns.append(
            OracleTurn(
                calls=(("run_bash", {"cmd": f"./step {words[i]}"}),),
                keep=f"code {keep[i]}" if i in keep else "",
                supersedes=i > 0 and i in keep,
            )
        )
    answer = f"{keep[max(keep)]} {words[n]}"
    turns.append(
        OracleTurn((("write_file", {"path": "answer.txt", "content": answer}), ("submit", {})), needs_facts=True)
    )
    return Task(
        id=task_id, family="chain", level=level, seed=seed, pressure=pressure, window=window,
        instruction=(
            "Run ./step start. Each output gives the next word for ./step. The first output also gives a code; a later "
            "output may correct it. When all steps are done write answer.txt with the code, a space and the last word, "
            "then submit."
        ),
        files={"step": sealed_program(outputs, salt=task_id, main=_MAIN, once=frozenset({"start"}))},
        executables=frozenset({"step"}),
        checks=({"type": "file", "path": "answer.txt", "equals": answer},),
        oracle=tuple(turns),
    )  # fmt: skip


FAMILY = FamilyInfo(
    "chain", "commands that each print the next one's argument; an early code is needed at the end", make
)
