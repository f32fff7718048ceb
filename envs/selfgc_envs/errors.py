"""The one error taxonomy.

Three kinds of trouble exist, and they never mix:

* **User errors** (:class:`UserError`): a bad config, task file, checkpoint or option. The command stops with
  exit code 2 and one line that names the thing, the place and the remedy.
* **Infrastructure failures** (:class:`InfrastructureError`): a sandbox or a server died. The episode leaves its
  group before the baseline is computed, is counted, and may be retried. They never become a reward.
* **Policy failures**: whatever the model got wrong (bad JSON, unknown id, overflow, a command that ran too long).
  These are *not* exceptions: they are observations the model sees and behaviour the grader judges.
"""

from __future__ import annotations


class SelfGCError(Exception):
    """Base of every error this project raises on purpose."""


class UserError(SelfGCError):
    """Something the user gave us is wrong; exit code 2.

    Args:
        problem: what is wrong and where, in one sentence.
        remedy: what to type or change, in one sentence.
    """

    exit_code = 2

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{problem} → {remedy}" if remedy else problem)


class InfrastructureError(SelfGCError):
    """A part we rely on (sandbox, server, disk) failed; not the policy's fault, and not a reward."""


class SandboxError(InfrastructureError):
    """The sandbox could not be started, or died and could not be restarted."""


class ServerError(InfrastructureError):
    """The inference server died, refused or answered nonsense."""
