"""Inference engines: token ids in, token ids out.

* :mod:`selfgc_rl.engines.server` starts a vLLM server (or attaches to one) and lets nothing of it outlive us.
* :mod:`selfgc_rl.engines.vllm` is the asyncio client that training and evaluation sample from.

Nothing is imported here, so that ``import selfgc_rl.engines`` stays free.
"""
