"""Freed memory stays in the process: a step that allocates what the step before freed causes few page faults."""

from __future__ import annotations

import subprocess
import sys

import pytest

_COUNT_FAULTS = """
import resource, sys, torch
from selfgc_rl.cpu_memory import keep_freed_memory
assert sys.argv[1] == "default" or (keep_freed_memory() and keep_freed_memory())
sources = [torch.ones(n) for n in (9_000_000, 12_000_000, 10_000_000)]  # above 32 MiB: glibc maps them

def step():  # like a forward: several large tensors live at once, and all of them go
    held = [source.clone() for source in sources]
    return [tensor + 1 for tensor in held]

for _ in range(4):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(mode: str) -> int:
    command = [sys.executable, "-c", _COUNT_FAULTS, mode]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_a_step_that_allocates_what_the_last_one_freed_causes_few_page_faults() -> None:
    assert _faults("kept") < _faults("default") / 3  # small blocks left in between move some of the large ones
