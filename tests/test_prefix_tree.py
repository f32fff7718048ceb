"""Prefix trees: pure structure, then exactness of log-probs and gradients against one padded row per sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from selfgc_envs.errors import UserError
from selfgc_rl.prefix_tree import PrefixTree, build_tree, pack, token_logprobs, token_statistics

VOCABULARY = 61

# -- structure --------------------------------------------------------------------------------------------------------


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Rows over three tokens, so that prefixes, duplicates and rows inside others are common."""
    sequences = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=8))
    return sequences, [draw(st.integers(1, len(sequence))) for sequence in sequences]


def root_path(tree: PrefixTree, packed: int) -> list[int]:
    """Packed indices from the root to ``packed``, read back through the parents."""
    at = next(i for i, segment in enumerate(tree.segments) if segment.start <= packed < segment.end)
    path = list(range(tree.segments[at].start, packed + 1))
    while (at := tree.segments[at].parent) >= 0:
        path = list(range(tree.segments[at].start, tree.segments[at].end)) + path
    return path


def forwarded(sequence: list[int], first: int) -> list[int]:
    return sequence[:-1] if first < len(sequence) else []


@given(rows())
def test_each_trained_token_has_its_own_context(case: tuple[list[list[int]], list[int]]) -> None:
    sequences, trained_from = case
    tree = build_tree(sequences, trained_from)
    expected = [(i, t) for i, seq in enumerate(sequences) for t in range(trained_from[i], len(seq))]
    assert tree.row.tolist() == [i for i, _ in expected]
    assert tree.target.tolist() == [sequences[i][t] for i, t in expected]
    ids = tree.input_ids.tolist()
    for (i, t), packed in zip(expected, tree.predecessor.tolist(), strict=True):
        path = root_path(tree, packed)
        assert [ids[k] for k in path] == sequences[i][:t]
        assert tree.position_ids[path].tolist() == list(range(t))


@given(rows())
def test_trained_tokens_equal_sampled_tokens_and_each_distinct_token_is_forwarded_once(
    case: tuple[list[list[int]], list[int]],
) -> None:
    sequences, trained_from = case
    tree = build_tree(sequences, trained_from)
    assert len(tree.target) == sum(len(seq) - first for seq, first in zip(sequences, trained_from, strict=True))
    prefixes = {
        tuple(path[: n + 1])
        for seq, first in zip(sequences, trained_from, strict=True)
        for path in [forwarded(seq, first)]
        for n in range(len(path))
    }
    assert len(tree.input_ids) == len(prefixes)


def visibility(tree: PrefixTree) -> Tensor:
    """[N, N]: which keys each query sees, by the parents."""
    visible = torch.zeros(len(tree.input_ids), len(tree.input_ids), dtype=torch.long)
    for q in range(len(visible)):
        visible[q, root_path(tree, q)] = 1
    return visible


@given(rows())
def test_attention_blocks_cover_each_visible_key_exactly_once(case: tuple[list[list[int]], list[int]]) -> None:
    tree = build_tree(*case)
    covered = torch.zeros(len(tree.input_ids), len(tree.input_ids), dtype=torch.long)
    for q_start, q_end, k_start, k_end, causal in tree.blocks:
        block = torch.ones(q_end - q_start, k_end - k_start, dtype=torch.long)
        covered[q_start:q_end, k_start:k_end] += block.tril() if causal else block
    assert covered.tolist() == visibility(tree).tolist()


def test_the_block_mask_shows_each_token_exactly_its_root_path() -> None:
    tree = build_tree(*example_rows())
    at = torch.arange(len(tree.input_ids))
    mask = tree.block_mask(torch.device("cpu")).mask_mod(None, None, at[:, None], at[None, :])
    assert mask.long().tolist() == visibility(tree).tolist()


@given(rows(), st.integers(1, 12))
def test_pack_covers_each_row_once_within_the_budget(case: tuple[list[list[int]], list[int]], budget: int) -> None:
    sequences, trained_from = case
    trees = pack(sequences, trained_from, budget)
    assert sorted(i for members in trees for i in members) == list(range(len(sequences)))
    for members in trees:
        size = len(build_tree([sequences[i] for i in members], [trained_from[i] for i in members]).input_ids)
        longest = max(len(forwarded(sequences[i], trained_from[i])) for i in members)
        assert size <= max(budget, longest)
        assert size <= budget or len({tuple(forwarded(sequences[i], trained_from[i])) for i in members} - {()}) == 1


def test_pack_keeps_rows_that_share_a_prefix_together() -> None:
    a, b = [1] * 10, [2] * 10
    sequences = [a + [3, 4], b + [3, 4], a + [5, 6], b + [5, 6]]
    assert sorted(map(sorted, pack(sequences, [10] * 4, 14))) == [[0, 2], [1, 3]]


def test_the_longest_history_is_one_causal_block() -> None:
    """Turns hang off the transcript as branches; the transcript itself is not cut into pieces."""
    history = list(range(40))
    sequences = [history[:n] + [50 + n, 51 + n] for n in (10, 20, 30, 40)]
    tree = build_tree(sequences, [len(seq) - 1 for seq in sequences])
    assert max(block.q_end - block.q_start for block in tree.blocks if block.causal) == 41
    assert len(tree.blocks) == 4 + 3


@pytest.mark.parametrize("trained_from", [[0], [4], [1, 1]])
def test_rows_that_cannot_be_trained_are_refused(trained_from: list[int]) -> None:
    with pytest.raises(ValueError, match="trained_from"):
        build_tree([[1, 2, 3]], trained_from)


# -- exactness --------------------------------------------------------------------------------------------------------

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": 0,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**_SIZES, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "llama": LlamaConfig(**_SIZES, tie_word_embeddings=True),
}


def make_model(name: str, lora: bool) -> nn.Module:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="sdpa")
    if lora:
        settings = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, settings)
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.2)
    return model.train()


def example_rows() -> tuple[list[list[int]], list[int]]:
    """Two episodes with one system prompt: branches, a fold in the middle, identical rows, rows inside others."""
    generator = torch.Generator().manual_seed(5)

    def ids(n: int) -> list[int]:
        return torch.randint(0, VOCABULARY, (n,), generator=generator).tolist()

    system = ids(12)
    sequences, trained_from = [], []
    for _ in range(2):
        history = system + ids(5)
        for turn in range(4):
            if turn == 3:
                history = history[:20] + ids(1) + history[25:]  # a fold: everything after it is new
            prompt = history + ids(6)
            sequences.append(prompt + ids(4))
            trained_from.append(len(prompt))
            history = history + ids(7)
    first, at = sequences[0], trained_from[0]
    sequences += [first, first[:-2], first + ids(3), first[: at + 1] + ids(2), ids(2)]
    trained_from += [at, at, at + 2, at, 1]
    return sequences, trained_from


def padded_logprobs(
    model: nn.Module, sequences: list[list[int]], trained_from: list[int], temperature: float
) -> Tensor:
    """The reference: one right-padded row per sample, transformers' own attention and LM head."""
    width = max(map(len, sequences))
    ids = torch.tensor([seq + [0] * (width - len(seq)) for seq in sequences])
    mask = torch.tensor([[1] * len(seq) + [0] * (width - len(seq)) for seq in sequences])
    logprobs = (model(input_ids=ids, attention_mask=mask).logits / temperature).log_softmax(-1)
    picked = []
    for i, (seq, first) in enumerate(zip(sequences, trained_from, strict=True)):
        at = torch.arange(first, len(seq))
        picked.append(logprobs[i, at - 1, torch.tensor(seq)[at]])
    return torch.cat(picked)


def gradients(model: nn.Module, logprobs: Tensor) -> dict[str, Tensor]:
    """Of a loss in which every token has a weight of its own, of either sign."""
    model.zero_grad()
    logprobs.mul(torch.linspace(-1.0, 1.3, len(logprobs))).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def relative_error(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-12))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_and_gradients_equal_one_row_per_sample(
    name: str, lora: bool, checkpointing: bool, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selfgc_rl.prefix_tree._LOGITS_PER_CHUNK", 7 * VOCABULARY)  # several chunks of the LM head
    model = make_model(name, lora)
    sequences, trained_from = example_rows()
    reference = padded_logprobs(model, sequences, trained_from, temperature)
    expected = gradients(model, reference)

    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if lora:
            model.enable_input_require_grads()
    logprobs = token_logprobs(model, build_tree(sequences, trained_from), temperature=temperature)
    actual = gradients(model, logprobs)

    assert relative_error(logprobs.detach(), reference.detach()) < 1e-5
    assert actual.keys() == expected.keys()
    total = torch.cat([g.flatten() for g in expected.values()]).norm()
    for key, gradient in actual.items():
        size = max(float(expected[key].norm()), 1e-2 * float(total))
        assert float((gradient - expected[key]).norm()) < 1e-5 * size, key


def test_packing_into_several_trees_leaves_the_gradient_unchanged() -> None:
    model = make_model("llama", lora=True)
    sequences, trained_from = example_rows()
    whole = build_tree(sequences, trained_from)
    model.zero_grad()
    token_logprobs(model, whole).sum().backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    trees = pack(sequences, trained_from, 60)
    assert len(trees) > 2
    for members in trees:
        tree = build_tree([sequences[i] for i in members], [trained_from[i] for i in members])
        token_logprobs(model, tree).sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert relative_error(parameter.grad, expected[name]) < 1e-5


@pytest.mark.parametrize("lora", [True, False], ids=["frozen head", "trained head"])
def test_entropy_and_first_choices_are_those_of_the_distribution(lora: bool) -> None:
    model = make_model("qwen3", lora)
    prompt = [1, 2, 3, 4, 5]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt])).logits[0, -1] / 0.5
    best = int(logits.argmax())
    tree = build_tree([[*prompt, best], [*prompt, (best + 1) % VOCABULARY]], [5, 5])
    scored = token_statistics(model, tree, temperature=0.5)
    assert scored.correct.tolist() == [True, False]
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(scored.entropy, entropy.expand(2), rtol=1e-4, atol=1e-5)
    assert scored.logprobs.requires_grad and not scored.entropy.requires_grad


def test_the_lm_head_sees_only_predecessors_each_once() -> None:
    """No logits for untrained positions, one position for equal contexts."""
    model = make_model("llama", lora=False)
    seen: list[int] = []
    model.get_output_embeddings().register_forward_hook(lambda m, args, out: seen.append(args[0].shape[0]))
    prompt = [7] * 30
    token_logprobs(model, build_tree([[*prompt, 1, 2], [*prompt, 1, 2], [*prompt, 3]], [30, 30, 30]))
    assert seen == [2]


def test_nothing_to_train_still_gives_a_graph() -> None:
    model = make_model("llama", lora=True)
    logprobs = token_logprobs(model, build_tree([[1, 2, 3]], [3]))
    logprobs.sum().backward()
    assert logprobs.shape == (0,)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_the_model_still_does_ordinary_forwards_after_a_tree() -> None:
    model = make_model("llama", lora=False)
    ids, mask = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    before = model(input_ids=ids, attention_mask=mask).logits
    token_logprobs(model, build_tree([[1, 2, 3]], [1]))
    after = model(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(after[mask.bool()], before[mask.bool()])


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (MistralConfig(**_SIZES, sliding_window=4), "sliding-window layers"),
        (
            Qwen3Config(**_SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1),
            "mixes attention kinds",
        ),
        (LlamaConfig(**_SIZES, attention_dropout=0.1), "attention dropout"),
        (GraniteConfig(**_SIZES, logits_scaling=2.0), "has logits_scaling"),
    ],
    ids=["sliding", "hybrid", "dropout", "scaled logits"],
)
def test_models_the_tree_cannot_reproduce_are_refused(config: Any, why: str) -> None:
    model = AutoModelForCausalLM.from_config(config).train()
    with pytest.raises(UserError, match=why):
        token_logprobs(model, build_tree([[1, 2, 3, 4, 5, 6]], [1]))
