"""Rows that share prefixes -> one packed sequence in which each distinct token is forwarded once.

The rows of an episode (and of its siblings) repeat most of their tokens. We put all rows into a path-compressed trie
and lay it out in depth-first order, so that three facts describe everything the model needs:

* position id = depth in the trie (what the token's position was in its own row);
* token ``k`` is visible to token ``q`` iff ``k <= q < subtree_end[k]``: a row sees exactly its own prefix;
* the log-prob of a trained token is read at its predecessor, so a row's last token is never forwarded.

Hence log-probs and gradients equal those of one row per sample (fp32: rounding only), at the cost of the unique
tokens. Heavier children come first: the longest history is one contiguous *run*, and on CPU attention is one causal
block per run plus one dense block per branch (all queries of the branch's subtree against the keys above it), merged
by log-sum-exp. On CUDA the visibility rule is a FlexAttention block mask.

Invariants: sum of trained tokens over trees = sum over rows (duplicates count as often as they occur); unique tokens
= number of distinct proper prefixes; equal contexts with different targets share one LM-head position.

Attention is registered with transformers' ``AttentionInterface``/``AttentionMaskInterface`` under the name
``prefix_tree``; without a tree it is plain SDPA, so the same model still generates and scores ordinary batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from selfgc_envs.errors import UserError

ATTENTION_NAME = "prefix_tree"
_LOGITS_PER_CHUNK = 1 << 23  # bounds the memory of the LM head: 32 MiB of fp32 logits at a time


class Segment(NamedTuple):
    """A node of the trie in packed order: tokens ``start..end``, descendants ``end..subtree_end``."""

    start: int
    end: int
    parent: int  # index of the parent segment, -1 for a root
    subtree_end: int


class AttentionBlock(NamedTuple):
    """Queries ``q_start..q_end`` see keys ``k_start..k_end``: all of them, or causally (same range, same length)."""

    q_start: int
    q_end: int
    k_start: int
    k_end: int
    causal: bool


@dataclass(frozen=True)
class PrefixTree:
    """N distinct forwarded tokens in depth-first order; T trained tokens in row order, then token order."""

    input_ids: Tensor  # [N] long
    position_ids: Tensor  # [N] long, depth in the trie
    segments: tuple[Segment, ...]
    predecessor: Tensor  # [T] long, packed index whose logits predict the token
    target: Tensor  # [T] long, the trained token's id
    row: Tensor  # [T] long, index into the sequences given to build_tree

    @cached_property
    def blocks(self) -> tuple[AttentionBlock, ...]:
        """Attention as dense rectangles: each token's visible keys are covered exactly once, causal blocks first."""
        runs: list[list[int]] = []  # start, end, end of the subtree; a run = a chain of contiguous segments
        run_of: list[int] = []
        branches: list[AttentionBlock] = []
        for segment in self.segments:
            if segment.parent >= 0 and self.segments[segment.parent].end == segment.start:
                run_of.append(run_of[segment.parent])
                runs[run_of[-1]][1] = segment.end
                continue
            run_of.append(len(runs))
            runs.append([segment.start, segment.end])
            if segment.parent >= 0:
                above = runs[run_of[segment.parent]][0]
                attach = self.segments[segment.parent].end
                branches.append(AttentionBlock(segment.start, segment.subtree_end, above, attach, causal=False))
        return tuple(AttentionBlock(start, end, start, end, causal=True) for start, end in runs) + tuple(branches)

    def block_mask(self, device: torch.device) -> BlockMask:
        """The visibility rule for FlexAttention."""
        n = len(self.input_ids)
        subtree_end = torch.empty(n, dtype=torch.long)
        for segment in self.segments:
            subtree_end[segment.start : segment.end] = segment.subtree_end
        subtree_end = subtree_end.to(device)

        def visible(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return (kv <= q) & (q < subtree_end[kv])

        return create_block_mask(visible, B=None, H=None, Q_LEN=n, KV_LEN=n, device=device)


# ------------------------------------------------------------------------------------------------- building


class _Node:
    """Tokens ``top..bottom`` (depths) of ``path``, below ``parent``."""

    __slots__ = ("path", "top", "bottom", "parent", "children", "weight", "start")

    def __init__(self, path: tuple[int, ...], top: int, bottom: int, parent: _Node | None) -> None:
        self.path, self.top, self.bottom, self.parent = path, top, bottom, parent
        self.children: list[_Node] = []
        self.weight = 0  # tokens in the subtree
        self.start = 0  # packed index of the first token


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix (binary search over slices, which compare at C speed)."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _forwarded_paths(sequences: Sequence[Sequence[int]], trained_from: Sequence[int]) -> list[tuple[int, ...]]:
    """What each row needs forwarded: all but its last token; nothing if it trains nothing."""
    if len(sequences) != len(trained_from):
        raise ValueError(f"{len(sequences)} sequences but {len(trained_from)} values of trained_from")
    paths = []
    for index, (sequence, first) in enumerate(zip(sequences, trained_from, strict=True)):
        if not 1 <= first <= len(sequence):
            raise ValueError(f"row {index}: trained_from is {first}, must be in 1..{len(sequence)} (the row's length)")
        paths.append(tuple(sequence[:-1]) if first < len(sequence) else ())
    return paths


def _insert(root: _Node, last: _Node, path: tuple[int, ...], shared: int) -> _Node:
    """Add ``path``, which shares ``shared`` tokens with the path ending in ``last``; returns its end node."""
    node = last
    while node.top >= shared and node is not root:
        node = node.parent  # type: ignore[assignment]  # only the root has no parent
    if node.bottom > shared:  # the paths part inside this node: cut it, the lower half keeps the identity
        assert node.parent is not None
        upper = _Node(node.path, node.top, shared, node.parent)
        node.parent.children[node.parent.children.index(node)] = upper
        node.parent, node.top = upper, shared
        upper.children.append(node)
        node = upper
    if len(path) > shared:
        child = _Node(path, shared, len(path), node)
        node.children.append(child)
        node = child
    return node


def _depth_first(root: _Node) -> list[_Node]:
    """All nodes below ``root``, parents before children, heaviest subtree first; sets ``weight`` and ``start``."""
    order, stack = [], [root]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(node.children)
    for node in reversed(order):
        node.weight = node.bottom - node.top + sum(child.weight for child in node.children)
    order, stack, packed = [], [root], 0
    while stack:
        node = stack.pop()
        node.start = packed
        packed += node.bottom - node.top
        order.append(node)
        stack.extend(sorted(node.children, key=lambda child: child.weight))
    return order[1:]


def build_tree(sequences: Sequence[Sequence[int]], trained_from: Sequence[int]) -> PrefixTree:
    """Pack rows into one prefix tree.

    Args:
        sequences: token ids of each row, prompt then sampled.
        trained_from: per row, the index of its first trained token (``len(sequence)``: the row trains nothing).

    Raises:
        ValueError: lengths disagree, or a trained token has no predecessor (``trained_from`` below 1).
    """
    paths = _forwarded_paths(sequences, trained_from)
    root = _Node((), 0, 0, None)
    ends: dict[tuple[int, ...], _Node] = {(): root}
    previous: tuple[int, ...] = ()
    for path in sorted(set(paths)):
        ends[path] = _insert(root, ends[previous], path, _common_prefix(previous, path))
        previous = path

    nodes = _depth_first(root)
    index = {id(node): i for i, node in enumerate(nodes)}
    segments: list[Segment] = []
    input_ids: list[int] = []
    position_ids: list[int] = []
    for node in nodes:
        input_ids += node.path[node.top : node.bottom]
        position_ids += range(node.top, node.bottom)
        end = node.start + node.bottom - node.top
        segments.append(Segment(node.start, end, index.get(id(node.parent), -1), node.start + node.weight))

    predecessor: list[int] = []
    target: list[int] = []
    row: list[int] = []
    for i, (sequence, first, path) in enumerate(zip(sequences, trained_from, paths, strict=True)):
        pieces: list[range] = []
        node = ends[path]
        while node.bottom >= first and node.parent is not None:  # depths first-1 .. len(path)-1
            top = max(node.top, first - 1)
            pieces.append(range(node.start + top - node.top, node.start + node.bottom - node.top))
            node = node.parent
        for piece in reversed(pieces):
            predecessor += piece
        target += sequence[first:]
        row += [i] * (len(sequence) - first)

    def long(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long)

    return PrefixTree(long(input_ids), long(position_ids), tuple(segments), long(predecessor), long(target), long(row))


def pack(sequences: Sequence[Sequence[int]], trained_from: Sequence[int], token_budget: int) -> list[list[int]]:
    """Distribute rows over trees of at most ``token_budget`` distinct tokens.

    Rows are taken in lexicographic order, so rows that share a prefix land together. Only a row that is longer than
    the budget on its own makes a larger tree.

    Returns:
        Row indices per tree; each row appears exactly once.
    """
    paths = _forwarded_paths(sequences, trained_from)
    trees: list[list[int]] = []
    used = 0
    previous: tuple[int, ...] = ()
    for i in sorted(range(len(paths)), key=lambda i: paths[i]):
        new = len(paths[i]) - _common_prefix(previous, paths[i])
        if not trees or (used and used + new > token_budget):
            trees.append([])
            used, new = 0, len(paths[i])
        trees[-1].append(i)
        used += new
        previous = paths[i]
    return trees


# ------------------------------------------------------------------------------------------------ attention


class _CPUTreeAttention(torch.autograd.Function):
    """Attention over a tree's blocks with torch's CPU flash kernel, results merged by log-sum-exp.

    Each block's softmax is over its own keys; weighting the blocks of a query by ``exp(lse_block - lse_total)``
    gives the softmax over all of them. Backward is exact per block: given the *merged* output and log-sum-exp, the
    kernel recomputes the true probabilities of the block's keys. Nothing is concatenated and no mask exists.
    Shapes: query [1, heads, N, D], key and value [1, kv_heads, N, D]; returns [1, heads, N, D].
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: tuple[AttentionBlock, ...], scale: float
    ) -> Tensor:
        _, heads, n, width = query.shape
        output = query.new_empty(1, n, heads, width).transpose(1, 2)
        total = query.new_empty(1, n, heads, dtype=torch.float32).transpose(1, 2)  # log-sum-exp, [1, heads, N]
        for q_start, q_end, k_start, k_end, causal in blocks:
            part, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query[:, :, q_start:q_end], key[:, :, k_start:k_end], value[:, :, k_start:k_end],
                0.0, causal, scale=scale,
            )  # fmt: skip
            out_view, lse_view = output[:, :, q_start:q_end], total[:, :, q_start:q_end]
            if causal:
                out_view.copy_(part)
                lse_view.copy_(lse)
                continue
            weight = torch.sigmoid(lse - lse_view).unsqueeze(-1).to(part.dtype)  # e^lse / (e^lse + e^total)
            out_view.lerp_(part, weight)
            lse_view.copy_(torch.logaddexp(lse_view, lse))
        ctx.save_for_backward(query, key, value, output, total)
        ctx.blocks, ctx.scale = blocks, scale
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, total = ctx.saved_tensors
        grads = tuple(torch.zeros_like(t) for t in (query, key, value))
        for q_start, q_end, k_start, k_end, causal in ctx.blocks:
            queries, keys = slice(q_start, q_end), slice(k_start, k_end)
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_output[:, :, queries], query[:, :, queries], key[:, :, keys], value[:, :, keys],
                output[:, :, queries], total[:, :, queries], 0.0, causal, scale=ctx.scale,
            )  # fmt: skip
            for grad, part, where in zip(grads, parts, (queries, keys, keys), strict=True):
                grad[:, :, where] += part
        return *grads, None, None


def _tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    *,
    prefix_tree: PrefixTree | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention interface; ``prefix_tree`` arrives through the model's keyword arguments."""
    if prefix_tree is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    if kwargs.get("sliding_window") is not None or dropout > 0:
        raise UserError(
            "prefix-tree attention supports neither sliding-window layers nor attention dropout",
            "set attention_dropout to 0, or train.attention=rows",
        )
    if isinstance(attention_mask, BlockMask):
        return flex_attention_forward(module, query, key, value, attention_mask, scaling=scaling)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = _CPUTreeAttention.apply(query, key, value, prefix_tree.blocks, scale)
    return output.transpose(1, 2), None


AttentionInterface.register(ATTENTION_NAME, _tree_attention)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


# -------------------------------------------------------------------------------------------------- scoring


class TokenStatistics(NamedTuple):
    """Per trained token, in the tree's order; only ``logprobs`` carries gradients."""

    logprobs: Tensor  # [T] natural log, at the temperature
    entropy: Tensor  # [T] of the distribution the token was drawn from, nats
    correct: Tensor  # [T] bool, the token was the most likely one


class _FrozenHeadLogprobs(torch.autograd.Function):
    """log softmax(hidden W^T / temperature) at the targets, for an LM head W that gets no gradient.

    d logprob / d hidden = (W[target] - sum_v p_v W_v) / temperature needs only the expected embedding, which forward
    computes while it holds the logits: backward recomputes none. hidden [U, H]; slot, target [T] (slot in 0..U).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, slot: Tensor, target: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = torch.nn.functional.linear(hidden, weight).float().div_(temperature)
        logprobs, entropy, correct, probabilities = _pick(logits, slot, target)
        expected = None
        if ctx.needs_input_grad[0]:
            expected = probabilities.to(weight.dtype) @ weight
        ctx.save_for_backward(weight, slot, target, expected)
        ctx.temperature, ctx.dtype = temperature, hidden.dtype
        ctx.mark_non_differentiable(entropy, correct)
        return logprobs, entropy, correct

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        weight, slot, target, expected = ctx.saved_tensors
        per_token = (weight[target] - expected[slot]).float() * (grad_logprobs / ctx.temperature).unsqueeze(-1)
        grad = torch.zeros(expected.shape, dtype=torch.float32, device=expected.device).index_add_(0, slot, per_token)
        return grad.to(ctx.dtype), None, None, None, None


def _pick(logits: Tensor, slot: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits [U, V] -> logprobs [T], entropy [T], correct [T], probabilities [U, V]."""
    lse = logits.logsumexp(-1)
    with torch.no_grad():
        probabilities = torch.softmax(logits, -1)
        entropy = lse.detach() - torch.linalg.vecdot(probabilities, logits)
        best = logits.argmax(-1)
    return logits[slot, target] - lse[slot], entropy[slot], best[slot] == target, probabilities


def _head_chunks(slots: int, slot_sorted: Tensor, vocabulary: int) -> Iterator[tuple[int, int, int, int]]:
    """Ranges of LM-head positions and of the trained tokens read there."""
    size = max(1, _LOGITS_PER_CHUNK // vocabulary)
    for first in range(0, slots, size):
        last = min(first + size, slots)
        low, high = torch.searchsorted(slot_sorted, torch.tensor([first, last], device=slot_sorted.device)).tolist()
        yield first, last, low, high


def _base_model(model: nn.Module) -> Any:
    """The transformers causal LM inside a PeftModel (whose LoRA layers are already injected), or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _use_tree_attention(causal_lm: Any) -> None:
    config = causal_lm.config
    if config._attn_implementation == ATTENTION_NAME:
        return
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    scaled = [k for k in ("final_logit_softcapping", "logits_scaling", "logit_scale") if getattr(config, k, None)]
    if kinds != {"full_attention"} or scaled:
        reason = f"has {', '.join(scaled)}" if scaled else f"mixes attention kinds {sorted(kinds)}"
        raise UserError(f"model type '{config.model_type}' {reason}: no prefix tree", "set train.attention=rows")
    causal_lm.set_attn_implementation(ATTENTION_NAME)


def token_statistics(model: nn.Module, tree: PrefixTree, *, temperature: float = 1.0) -> TokenStatistics:
    """Forward the tree once and score its trained tokens.

    Args:
        model: a transformers causal LM with full attention, or a PeftModel around one (unwrapped: no DDP/FSDP shell).
        tree: from :func:`build_tree`; may live on the CPU, tensors are moved to the model's device.
        temperature: divides the logits before the softmax.

    Raises:
        UserError: the model's attention or logits are of a kind the tree cannot reproduce exactly.
    """
    causal_lm = _base_model(model)
    device = causal_lm.device
    if not len(tree.target):  # still a graph: every rank can call backward
        parameter = next((p for p in model.parameters() if p.requires_grad), None)
        nothing = torch.zeros(0, device=device) if parameter is None else parameter.flatten()[:0].float()
        return TokenStatistics(nothing, nothing.detach(), torch.zeros(0, dtype=torch.bool, device=device))
    _use_tree_attention(causal_lm)
    # A ready 4-D mask makes transformers skip its own N x N mask; on CPU the blocks say everything.
    mask = torch.empty(1, 1, 1, 1) if device.type == "cpu" else tree.block_mask(device)
    hidden = causal_lm.base_model(
        input_ids=tree.input_ids.to(device).unsqueeze(0),
        position_ids=tree.position_ids.to(device).unsqueeze(0),
        attention_mask=mask,
        use_cache=False,
        prefix_tree=tree,
    ).last_hidden_state[0]

    positions, slot = torch.unique(tree.predecessor.to(device), return_inverse=True)
    slot, order = torch.sort(slot, stable=True)
    target = tree.target.to(device)[order]
    hidden = hidden.index_select(0, positions)
    head = causal_lm.get_output_embeddings()
    frozen = type(head) is nn.Linear and head.bias is None and not head.weight.requires_grad

    def trained_head(part: Tensor, slot: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _pick(head(part).float() / temperature, slot, target)[:3]

    parts = []
    for first, last, low, high in _head_chunks(len(positions), slot, head.weight.shape[0]):
        where, wanted = slot[low:high] - first, target[low:high]
        if frozen:
            part = _FrozenHeadLogprobs.apply(hidden[first:last], head.weight, where, wanted, temperature)
        else:
            part = checkpoint(trained_head, hidden[first:last], where, wanted, use_reentrant=False)
        parts.append(part)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=device)
    return TokenStatistics(*(torch.cat(kind)[back] for kind in zip(*parts, strict=True)))


def token_logprobs(model: nn.Module, tree: PrefixTree, *, temperature: float = 1.0) -> Tensor:
    """Differentiable log-probs [T] of the tree's trained tokens; see :func:`token_statistics`."""
    return token_statistics(model, tree, temperature=temperature).logprobs
