"""``dossier`` (held out): documents that refer to one another in changing words; a code printed once is needed last.

No training or demonstration ever uses this family. The references are phrased differently each time and every
document names other documents too, so no single pattern finds the path.
"""

from __future__ import annotations

import random

from selfgc_envs.tasks.base import FamilyInfo, OracleTurn, Task, TextCounter
from selfgc_envs.tasks.sealed import sealed_program
from selfgc_envs.tasks.text import Names, fill

_DOCS = {"nano": 4, "small": 12, "full": 36}
_REFERENCES = (
    "continue with {n}.md",
    "the next file is {n}.md",
    "go on in {n}.md",
    "read {n}.md after this",
    "then see {n}.md",
)
_DECOYS = ("{n}.md is out of date", "do not use {n}.md", "{n}.md was merged elsewhere", "ignore what {n}.md says")
_MAIN = r"""
text = unseal("badge")
print(text if text is not None else "the badge was already printed")
sys.exit(0 if text is not None else 1)
"""


def make(task_id: str, level: str, seed: int, pressure: float, window: int, count: TextCounter) -> Task:
    rng = random.Random(task_id.rsplit(":", 2)[0] + f":{pressure}")
    names = Names(rng)
    n = _DOCS[level]
    docs = [names() for _ in range(n)]
    code, value = names(3), names()
    size = pressure * window / (n + 1)
    badge = fill(["badge is ready", f"code: {code}", f"first file: {docs[0]}.md"], size, rng, names, count)
    files = {"badge": sealed_program({"badge": badge}, salt=task_id, main=_MAIN, once=frozenset({"badge"}))}
    turns = [OracleTurn((("run_bash", {"cmd": "./badge"}),), keep=f"code {code}")]
    for i, doc in enumerate(docs):
        lines = [f"document {i + 1} of {n}", rng.choice(_DECOYS).format(n=names())]
        lines.append(rng.choice(_REFERENCES).format(n=docs[i + 1]) if i < n - 1 else f"last word: {value}")
        files[f"{doc}.md"] = fill(lines, size, rng, names, count) + "\n"
        turns.append(OracleTurn((("read_file", {"path": f"{doc}.md"}),)))
    for _ in range(n):  # documents off the path, same look
        lines = [
            "document of another case",
            rng.choice(_REFERENCES).format(n=names()),
            rng.choice(_DECOYS).format(n=names()),
        ]
        files[f"{names()}.md"] = fill(lines, size, rng, names, count) + "\n"
    answer = f"{code} {value}"
    turns.append(
        OracleTurn((("write_file", {"path": "answer.txt", "content": answer}), ("submit", {})), needs_facts=True)
    )
    return Task(
        id=task_id, family="dossier", level=level, seed=seed, pressure=pressure, window=window,
        instruction=(
            "Run ./badge. It gives a code, once, and a first file. Each file names the next one to read. After the "
            "last file write answer.txt with the code, a space and the last word, then submit."
        ),
        files=files,
        executables=frozenset({"badge"}),
        checks=({"type": "file", "path": "answer.txt", "equals": answer},),
        oracle=tuple(turns),
    )  # fmt: skip


FAMILY = FamilyInfo("dossier", "documents that refer to one another; an early code is needed last", make, heldout=True)
