"""A vLLM plugin: LoRA on CPU as matrix products, not as one gathered weight matrix per token.

vLLM's CPU fallback copies the adapter's matrices once for each token of the batch and multiplies row by row: for a
rank-32 adapter on a 135M model that is 80 MB of memory traffic per token, several times what the model itself needs.
Here the rows of each adapter are multiplied in one product. Same numbers up to rounding; rows without an adapter get
zero. The plugin also keeps freed memory in the process (:mod:`selfgc_rl.cpu_memory`). Registered through vLLM's
``vllm.general_plugins`` entry point, in every vLLM process; it does nothing unless vLLM runs on CPU.
"""

from __future__ import annotations

import sys
from typing import Any

from selfgc_rl.cpu_memory import keep_freed_memory

_SHRINK, _EXPAND, _EXPAND_SLICE = "bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"


def _product(inputs: Any, weights: Any, indices: Any) -> Any:
    """Row i of the result: ``inputs[i] @ weights[indices[i]].T``; zero where the index is negative.

    Shapes: inputs [tokens, in], weights [adapters, (1,) out, in], indices [tokens] → [tokens, out].
    """
    if weights.dim() == 4:
        weights = weights.squeeze(1)
    first = int(indices[0])
    if bool((indices == first).all()):
        if first < 0:
            return inputs.new_zeros(inputs.shape[0], weights.shape[1])
        return inputs @ weights[first].to(inputs.dtype).T
    out = inputs.new_zeros(inputs.shape[0], weights.shape[1])
    for index in indices.unique().tolist():
        if index >= 0:
            rows = (indices == index).nonzero(as_tuple=True)[0]
            out[rows] = inputs[rows] @ weights[index].to(inputs.dtype).T
    return out


def shrink(
    inputs: Any, lora_b_weights: Any, output_tensor: Any, lora_indices_tensor: Any, scaling: float = 1.0
) -> None:
    """``output[:, :rank] = scaling * inputs @ A.T`` per adapter."""
    out = _product(inputs.to(output_tensor.dtype), lora_b_weights, lora_indices_tensor[: inputs.shape[0]])
    output_tensor[:, : out.shape[1]] = out.mul_(scaling)


def expand_slice(
    inputs: Any,
    lora_b_weights: Any,
    output_tensor: Any,
    lora_indices_tensor: Any,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """``output[:, offset : offset + size] (+)= inputs @ B.T`` per adapter."""
    out = _product(inputs.to(output_tensor.dtype), lora_b_weights, lora_indices_tensor[: inputs.shape[0]])
    view = output_tensor[:, slice_offset : slice_offset + slice_size]
    if add_inputs:
        view += out
    else:
        view.copy_(out)


def expand(
    inputs: Any, lora_b_weights: Any, output_tensor: Any, lora_indices_tensor: Any, add_inputs: bool = True
) -> None:
    """``output (+)= inputs @ B.T`` per adapter; adapter and model may pad the output differently."""
    width = min(lora_b_weights.shape[-2], output_tensor.shape[1])
    weights = lora_b_weights[..., :width, :]
    expand_slice(inputs, weights, output_tensor, lora_indices_tensor, 0, width, add_inputs)


def register() -> None:
    """Replace vLLM's three CPU operations, wherever they were already imported, and keep freed memory."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    keep_freed_memory()
    import vllm.lora.ops.torch_ops as torch_ops
    import vllm.lora.ops.torch_ops.lora_ops as lora_ops

    punica = sys.modules.get("vllm.lora.punica_wrapper.punica_cpu")
    for module in filter(None, (lora_ops, torch_ops, punica)):
        for name, function in ((_SHRINK, shrink), (_EXPAND, expand), (_EXPAND_SLICE, expand_slice)):
            setattr(module, name, function)
