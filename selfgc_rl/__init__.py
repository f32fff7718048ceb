"""selfgc-rl: reinforcement learning that teaches an open model to garbage-collect its own context."""

__version__ = "0.1.0"
