"""selfgc_envs: coding tasks whose context the agent manages itself (fold, drop, expand), on the Gymnasium API.

Imports no torch, transformers, trl or vllm. ``gymnasium.make("SelfGC/Coding-v0", task=..., token_counter=...)``.
"""

import gymnasium

__version__ = "0.1.0"

if "SelfGC/Coding-v0" not in gymnasium.registry:
    gymnasium.register(
        id="SelfGC/Coding-v0",
        entry_point="selfgc_envs.coding_env:CodingEnv",
        disable_env_checker=True,  # observations hold Python records; tests run the checker with its own settings
        order_enforce=False,
    )
