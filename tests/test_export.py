"""An export is the trained policy, whole, or it does not exist."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from selfgc_envs.errors import UserError
from selfgc_rl.checkpoints import STATE_FILE
from selfgc_rl.config import Config, ServerConfig, parse_config, save_config
from selfgc_rl.export import SERVED_NAME, SETTINGS, export_adapter, find_source
from selfgc_rl.serve import curl_example, read_export, start
from selfgc_rl.types import Episode

ROOT = Path(__file__).parents[1]
CHECKPOINT = "checkpoints/checkpoint-2"
PROMPT = [5, 40, 41, 7, 99, 120, 3]


@pytest.fixture(scope="module")
def run_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder as training leaves it, with an adapter that visibly changes the model."""
    from selfgc_rl.models import load_policy

    run = tmp_path_factory.mktemp("runs") / "run"
    torch.manual_seed(0)
    policy = load_policy(tiny_model_dir, None, rank=8, alpha=16, dtype="float32")
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    policy.save_pretrained(str(run / CHECKPOINT))
    (run / CHECKPOINT / STATE_FILE).write_text("{}")
    save_config(parse_config({"model": {"path": str(tiny_model_dir), "adapter": None}}), run / "config.yaml")
    (run / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "success": 0.5, "gap": NaN}\n{"ste')
    return run


def _greedy(model: torch.nn.Module) -> list[int]:
    out = model.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)  # type: ignore[operator]
    return out[0, len(PROMPT) :].tolist()


@pytest.fixture(scope="module")
def trained_greedy(run_dir: Path, tiny_model_dir: Path) -> list[int]:
    from selfgc_rl.models import load_policy

    trained = load_policy(tiny_model_dir, run_dir / CHECKPOINT, rank=1, alpha=1, dtype="float32", trainable=False)
    base = load_policy(tiny_model_dir, None, rank=1, alpha=1, dtype="float32", trainable=False)
    assert _greedy(trained) != _greedy(base), "the test's adapter must change the output"
    return _greedy(trained)


def test_adapter_export_loads_in_peft_with_equal_outputs(
    run_dir: Path, tmp_path: Path, trained_greedy: list[int]
) -> None:
    from peft import AutoPeftModelForCausalLM

    out = export_adapter(find_source(run_dir), tmp_path / "out")
    assert _greedy(AutoPeftModelForCausalLM.from_pretrained(str(out), dtype=torch.float32)) == trained_greedy


def test_merged_export_loads_in_transformers_with_equal_outputs(
    run_dir: Path, tmp_path: Path, trained_greedy: list[int]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = export_adapter(find_source(run_dir), tmp_path / "out", merge=True, dtype="float32")
    assert _greedy(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)) == trained_greedy
    assert AutoTokenizer.from_pretrained(out).chat_template


def test_merge_adds_in_float32_and_casts_once(run_dir: Path, tmp_path: Path, tiny_model_dir: Path) -> None:
    from safetensors.torch import load_file

    out = export_adapter(find_source(run_dir), tmp_path / "out", merge=True, dtype="bfloat16")
    name = "model.layers.0.self_attn.q_proj"
    base = load_file(tiny_model_dir / "model.safetensors")[f"{name}.weight"]
    lora = load_file(run_dir / CHECKPOINT / "adapter_model.safetensors")
    delta = 2.0 * lora[f"base_model.model.{name}.lora_B.weight"] @ lora[f"base_model.model.{name}.lora_A.weight"]
    merged = load_file(out / "model.safetensors")[f"{name}.weight"]
    assert merged.dtype is torch.bfloat16
    assert torch.equal(merged, (base + delta).to(torch.bfloat16))


@pytest.mark.parametrize("merge", [False, True])
def test_export_says_what_it_is_and_checks_out(run_dir: Path, tmp_path: Path, merge: bool) -> None:
    out = export_adapter(find_source(run_dir), tmp_path / "out", merge=merge)
    settings = json.loads((out / SETTINGS).read_text())
    assert settings["kind"] == ("merged" if merge else "adapter")
    assert settings["window"] == Config().env.window and settings["strategy"]["name"] == "selfgc"
    assert "fold" in settings["system_prompt"]
    assert {t["function"]["name"] for t in settings["tools"]} == set(settings["strategy"]["tools"])
    assert settings["figures"]["last_training_step"] == {"step": 2, "success": 0.5, "gap": None}
    assert settings["reward"]["coefficient"] == Config().reward.coefficient and settings["versions"]["torch"]
    sums = dict(reversed(line.split("  ")) for line in (out / "SHA256SUMS").read_text().splitlines())
    assert sums.keys() == {p.name for p in out.iterdir()} - {"SHA256SUMS"}
    for name, digest in sums.items():
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    assert {"README.md", "serve.sh", "tokenizer.json", "generation_config.json"} <= sums.keys()
    assert os.access(out / "serve.sh", os.X_OK)
    subprocess.run(["sh", "-n", str(out / "serve.sh")], check=True)
    assert not [p for p in tmp_path.iterdir() if p != out], "no temporary folder stays behind"


def test_an_existing_target_is_refused_and_untouched(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")
    with pytest.raises(UserError, match="exists"):
        export_adapter(find_source(run_dir), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["note"]


def _cut(adapter: Path) -> None:
    data = (adapter / "adapter_model.safetensors").read_bytes()
    (adapter / "adapter_model.safetensors").write_bytes(data[: len(data) // 2])


def _edit(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def spoil(adapter: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(adapter / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, adapter / "adapter_model.safetensors")

    return spoil


A_WEIGHT = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_cut, "adapter_model.safetensors"),
        (lambda a: (a / "adapter_model.safetensors").unlink(), "missing"),
        (lambda a: (a / "adapter_model.safetensors").write_bytes(b""), "adapter_model.safetensors"),
        (lambda a: (a / "adapter_config.json").write_text("{"), "adapter_config.json"),
        (_edit(lambda t: t.pop(A_WEIGHT)), "layers.1.mlp.up_proj.lora_A.weight' is missing"),
        (_edit(lambda t: t[A_WEIGHT].fill_(float("nan"))), "not finite"),
        (_edit(lambda t: t.update({A_WEIGHT: torch.zeros(4, 64)})), "does not fit"),
        (_edit(lambda t: t.update({A_WEIGHT.replace("layers.1", "layers.9"): torch.zeros(8, 64)})), "layers.9"),
    ],
    ids=["cut", "no-weights", "empty", "bad-config", "half", "nan", "shape", "foreign-layer"],
)
@pytest.mark.parametrize("merge", [False, True])
def test_a_damaged_adapter_is_refused_and_nothing_written(
    run_dir: Path, tmp_path: Path, spoil: Callable[[Path], None], says: str, merge: bool
) -> None:
    run = tmp_path / "run"
    shutil.copytree(run_dir, run)
    spoil(run / CHECKPOINT)
    with pytest.raises(UserError, match=says):
        export_adapter(find_source(run), tmp_path / "out", merge=merge)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_the_newest_checkpoint_of_a_run_is_taken(run_dir: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(run_dir, run)
    newer = run / "checkpoints" / "checkpoint-10"
    shutil.copytree(run / CHECKPOINT, newer)
    (run / "checkpoints" / "checkpoint-11").mkdir()  # interrupted before its first file
    assert find_source(run).adapter_dir == newer
    assert find_source(run / CHECKPOINT).adapter_dir == run / CHECKPOINT
    shutil.copytree(run / CHECKPOINT, run / "adapter")  # the run has ended
    assert find_source(run).adapter_dir == run / "adapter"


def test_an_adapter_without_a_run_names_its_base_or_asks(run_dir: Path, tmp_path: Path, tiny_model_dir: Path) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(run_dir / CHECKPOINT, adapter)
    assert find_source(adapter).base_dir == tiny_model_dir
    config = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": "gone/away"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="--model"):
        find_source(adapter)
    assert find_source(adapter, str(tiny_model_dir)).base_dir == tiny_model_dir


@pytest.mark.slow
def test_a_full_disk_leaves_nothing(run_dir: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    script = 'mount -t tmpfs -o size=100k none "$1" && "$2" -m selfgc_rl.cli export "$3" --to "$1/out"'
    script += '; code=$?; ls -A "$1"; exit $code'
    inside = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("user namespaces are not available")
    command = [*inside, "sh", "-c", script, "sh", disk, sys.executable, run_dir]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'envs'}"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert "no space left" in done.stderr and done.stderr.count("\n") == 1


def test_serve_refuses_what_is_no_export(tmp_path: Path, run_dir: Path) -> None:
    with pytest.raises(UserError, match="no export"):
        read_export(run_dir)
    out = export_adapter(find_source(run_dir), tmp_path / "out")
    _cut(out)
    with pytest.raises(UserError, match="cut short"):
        read_export(out)
    (out / SETTINGS).write_text('{"kind": "merged"}')
    with pytest.raises(UserError):
        read_export(out)


def test_curl_example_is_shell_safe_and_complete(run_dir: Path, tmp_path: Path) -> None:
    import shlex

    export = read_export(export_adapter(find_source(run_dir), tmp_path / "out"))
    words = shlex.split(curl_example("http://127.0.0.1:1", export))
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "selfgc" and body["messages"][0]["content"] == export.settings["system_prompt"]


@pytest.mark.vllm
@pytest.mark.parametrize("merge", [False, True], ids=["adapter", "merged"])
def test_a_served_export_is_the_trained_policy_and_completes_an_episode(
    run_dir: Path, tmp_path: Path, trained_greedy: list[int], merge: bool
) -> None:
    from selfgc_rl.engines.rest import request_json
    from selfgc_rl.engines.vllm import VLLMEngine
    from selfgc_rl.episode import EnginePolicy, run_episode
    from selfgc_rl.tokens import load_encoder

    folder = export_adapter(find_source(run_dir), tmp_path / "out", merge=merge)
    export = read_export(folder)
    encoder = load_encoder(folder)
    config = parse_config({"env": {"max_turns": 2}, "rollout": {"max_new_tokens": 24}})
    server_config = ServerConfig(kv_cache_gib=0.25, max_num_seqs=8)
    with start(export, server=server_config, log_path=tmp_path / "server.log") as server:
        engine = VLLMEngine(server.url, SERVED_NAME, temperature=1.0, max_new_tokens=24)

        async def play() -> tuple[list[int], Episode]:
            async with engine:
                greedy = await engine.sample(PROMPT, temperature=0.0)
                episode = await run_episode(
                    EnginePolicy(engine),
                    "chain:nano:1",
                    config=config,
                    encoder=encoder,
                    episode_id="e",
                    group_id="g",
                    seed=1,
                )
                return list(greedy.sampled_ids), episode

        greedy, episode = asyncio.run(play())
        assert greedy[:12] == trained_greedy
        assert episode.valid and episode.error == "" and episode.stop_reason == "max_turns"
        assert {turn.sample.policy_version for turn in episode.turns} == {SERVED_NAME}
        chat = {"model": SERVED_NAME, "max_tokens": 8, "tools": export.settings["tools"], "tool_choice": "auto"}
        chat["messages"] = [{"role": "user", "content": "List the files."}]
        assert request_json(f"{server.url}/v1/chat/completions", chat, timeout_s=60)["model"] == SERVED_NAME
