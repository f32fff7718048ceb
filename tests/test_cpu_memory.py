"""Freed memory stays in the process: large tensors that come and go cause no page faults."""

from __future__ import annotations

import subprocess
import sys

import pytest

_COUNT_FAULTS = """
import resource, sys, torch
from selfgc_rl.cpu_memory import keep_freed_memory
assert sys.argv[1] == "default" or (keep_freed_memory() and keep_freed_memory())
source = torch.ones(4_000_000)
source.clone()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    source.clone()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(mode: str) -> int:
    command = [sys.executable, "-c", _COUNT_FAULTS, mode]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_large_tensors_that_come_and_go_cause_no_page_faults() -> None:
    assert _faults("kept") < 100 < _faults("default")
