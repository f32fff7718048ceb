"""The CPU LoRA plugin gives what vLLM's own operations give, for one adapter, several, and none."""

import pytest

torch = pytest.importorskip("torch")

from selfgc_rl.engines.cpu_lora import expand_slice, shrink  # noqa: E402


@pytest.mark.parametrize("indices", [[1, 1, 1, 1], [0, 2, 0, 1]])
def test_same_numbers_as_vllm(indices):
    from vllm.lora.ops.torch_ops import lora_ops

    torch.manual_seed(0)
    x, a, b = torch.randn(4, 16), torch.randn(3, 1, 8, 16), torch.randn(3, 1, 12, 8)
    index = torch.tensor(indices)
    results = []
    for shrink_op, expand_op in ((lora_ops.bgmv_shrink, lora_ops.bgmv_expand_slice), (shrink, expand_slice)):
        low, out = torch.zeros(4, 8), torch.ones(4, 30)
        shrink_op(x, a, low, index, 0.5)
        expand_op(low, b, out, index, 10, 12, True)
        results.append(out)
    torch.testing.assert_close(*results)


def test_rows_without_an_adapter_are_left_alone():
    x, a, b = torch.randn(3, 4), torch.randn(2, 1, 2, 4), torch.randn(2, 1, 5, 2)
    for index in (torch.tensor([-1, -1, -1]), torch.tensor([-1, 1, -1])):
        low, out = torch.zeros(3, 2), torch.zeros(3, 5)
        shrink(x, a, low, index)
        expand_slice(low, b, out, index, 0, 5)
        assert not out[index < 0].any() and out[index >= 0].any(dim=1).all()


def test_the_plugin_is_registered_with_vllm():
    from importlib.metadata import entry_points

    names = {e.name: e.value for e in entry_points(group="vllm.general_plugins")}
    assert names.get("selfgc_cpu_lora") == "selfgc_rl.engines.cpu_lora:register"
