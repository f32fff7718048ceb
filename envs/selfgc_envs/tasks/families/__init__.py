"""The procedural families. To add one: a file with ``FAMILY`` and a line here."""

from selfgc_envs.tasks.families import bugchain, chain, dossier

FAMILIES = {m.FAMILY.name: m.FAMILY for m in (chain, bugchain, dossier)}
