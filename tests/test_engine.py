"""What the engine promises: exact tokens (R3), the right adapter (S7, S8), nothing left behind (S6), clear errors."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from selfgc_envs.errors import ServerError, UserError
from selfgc_rl.adapters import AdapterPublisher, check_adapter
from selfgc_rl.config import ServerConfig
from selfgc_rl.engines import _guard, server
from selfgc_rl.engines.rest import request_json
from selfgc_rl.engines.server import VLLMServer, last_error_line
from selfgc_rl.engines.vllm import VLLMEngine
from selfgc_rl.types import Sample

END_OF_MESSAGE = 2  # <|im_end|> of the tiny tokenizer

# -- a fake server: answers what vLLM would, and goes wrong on demand ------------------------------------------------


class FakeServer:
    """Answers /v1/completions truthfully unless ``spoil`` (request, answer) -> status or None changes it."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.loaded: list[str] = []
        self.spoil: Callable[[dict[str, Any], dict[str, Any]], int | None] = lambda request, answer: None
        self.refuse_adapters = False
        self.max_model_len = 2048
        self.raw_logprobs = False
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None: ...

            def reply(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                cards = [{"id": "base", "parent": None, "max_model_len": fake.max_model_len}]
                self.reply(200, {"data": cards + [{"id": name, "parent": "base"} for name in fake.loaded]})

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/v1/completions":
                    fake.requests.append(request)
                    answer = fake.answer(request)
                    self.reply(fake.spoil(request, answer) or 200, answer)
                elif self.path == "/v1/load_lora_adapter":
                    if fake.refuse_adapters:
                        return self.reply(500, {"error": {"message": "LoRA rank 64 is greater than max_lora_rank 32."}})
                    fake.loaded.append(request["lora_name"])
                    self.reply(200, "ok")
                elif self.path == "/v1/unload_lora_adapter":
                    fake.loaded.remove(request["lora_name"])
                    self.reply(200, "ok")

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        flat = request["temperature"] > 1 and not self.raw_logprobs
        choice = {
            "token_ids": [5, 6, 2],
            "prompt_token_ids": request["prompt"],
            "logprobs": {"token_logprobs": [-0.5, -1.0, -0.1], "top_logprobs": [{"a": -7.0 if flat else -0.5}]},
            "text": "hi",
            "finish_reason": "stop",
        }
        return {"model": request["model"], "choices": [choice], "usage": {"completion_tokens": 3}}

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    one = FakeServer()
    yield one
    one.close()


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfgc_rl.engines.vllm._FIRST_BACKOFF_S", 0.01)


def make_engine(url: str, model: str = "base", **options: Any) -> VLLMEngine:
    return VLLMEngine(url, model, **{"temperature": 1.0, "max_new_tokens": 16, **options})


def sample_once(engine: VLLMEngine, prompt: list[int], **options: Any) -> Any:
    async def go() -> Any:
        async with engine:
            return await engine.sample(prompt, **options)

    return asyncio.run(go())


def test_a_sample_holds_what_was_sent_and_what_was_drawn(fake: FakeServer) -> None:
    sample = sample_once(make_engine(fake.url), [1, 2, 3], seed=7)
    assert (sample.prompt_ids, sample.sampled_ids, sample.logprobs) == ((1, 2, 3), (5, 6, 2), (-0.5, -1.0, -0.1))
    assert (sample.policy_version, sample.finish_reason) == ("base", "stop")


def test_every_request_asks_for_the_plain_softmax(fake: FakeServer) -> None:
    """A server takes what a request leaves out from the model's generation_config.json (R11)."""
    sample_once(make_engine(fake.url, temperature=0.7), [1], seed=7)
    sent = fake.requests[0]
    assert (sent["top_p"], sent["top_k"], sent["min_p"], sent["repetition_penalty"]) == (1, 0, 0, 1)
    assert (sent["temperature"], sent["seed"], sent["return_token_ids"]) == (0.7, 7, True)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda a: a["choices"][0]["token_ids"].pop(), "counts disagree: 2 token ids, 3 log-probs, usage says 3"),
        (lambda a: a["choices"][0]["logprobs"]["token_logprobs"].pop(), "counts disagree"),
        (lambda a: a.update(model="base"), "asked for model 'step-1', answered by 'base'"),
        (lambda a: a["choices"][0].update(prompt_token_ids=[1, 9]), "another prompt than was sent.*difference at 1"),
        (lambda a: a["choices"][0].update(finish_reason="abort"), "ended by 'abort'"),
        (lambda a: a["choices"][0]["logprobs"].update(token_logprobs=[-1, None, -1]), "token 1 is None"),
        (lambda a: a["choices"][0]["logprobs"].update(token_logprobs=[-1, -1, -9999.0]), "token 2 is -9999"),
        (lambda a: a["choices"][0].pop("token_ids"), "lacks"),
    ],
)
def test_an_answer_that_breaks_a_promise_is_refused(fake: FakeServer, spoil: Any, words: str) -> None:
    fake.spoil = lambda request, answer: spoil(answer) and None
    with pytest.raises(ServerError, match=words):
        sample_once(make_engine(fake.url, "step-1"), [1, 2])
    assert len(fake.requests) == 1, "a wrong answer is not an infrastructure hiccup: no retry"


def test_a_server_error_is_retried_and_counted(fake: FakeServer) -> None:
    fake.spoil = lambda request, answer: 500 if len(fake.requests) < 3 else None
    engine = make_engine(fake.url, retries=2)
    assert sample_once(engine, [1]).sampled_ids == (5, 6, 2)
    assert (engine.stats.retries, engine.stats.requests, engine.stats.sampled_tokens) == (2, 1, 3)
    assert engine.stats.busy_s > 0


def test_a_server_that_keeps_failing_or_is_gone_ends_in_one_line(fake: FakeServer) -> None:
    fake.spoil = lambda request, answer: answer.update(error={"message": "EngineDeadError"}) or 500
    with pytest.raises(ServerError, match=r"status 500: EngineDeadError \(2 attempts\)"):
        sample_once(make_engine(fake.url, retries=1), [1])
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{s.getsockname()[1]}"
    with pytest.raises(ServerError, match=r"connection failed.*\(2 attempts\)"):
        sample_once(make_engine(nobody, retries=1), [1])


def test_a_hanging_server_times_out(fake: FakeServer) -> None:
    fake.spoil = lambda request, answer: time.sleep(0.5)
    with pytest.raises(ServerError, match="no answer within"):
        sample_once(make_engine(fake.url, retries=0, request_timeout_s=0.1), [1])


def test_too_long_a_prompt_is_named_and_not_retried(fake: FakeServer) -> None:
    fake.spoil = lambda request, answer: answer.update(error={"message": "maximum context length is 4 tokens"}) or 400
    with pytest.raises(ServerError, match="a prompt of 3 tokens plus up to 16 new ones is above its --max-model-len"):
        sample_once(make_engine(fake.url), [1, 2, 3])
    assert len(fake.requests) == 1


def test_an_engine_serves_one_event_loop_after_another(fake: FakeServer) -> None:
    engine = make_engine(fake.url)
    for _ in range(2):
        assert asyncio.run(engine.sample([1])).text == "hi"


# -- attaching -------------------------------------------------------------------------------------------------------


def test_attach_checks_that_the_server_can_do_the_run(fake: FakeServer) -> None:
    assert VLLMServer.attach(fake.url, window_tokens=2048).base_model == "base"
    with pytest.raises(UserError, match="accepts 2048 tokens, this run needs 4096.*--max-model-len 4096"):
        VLLMServer.attach(fake.url, window_tokens=4096)
    VLLMServer.attach(fake.url, window_tokens=16, temperature=0.7)
    fake.raw_logprobs = True
    with pytest.raises(UserError, match="--logprobs-mode processed_logprobs"):
        VLLMServer.attach(fake.url, window_tokens=16, temperature=0.7)


def test_attach_to_nobody_names_the_remedy() -> None:
    with pytest.raises(UserError, match="no vLLM server to use at .*selfgc-rl serve"):
        VLLMServer.attach("http://127.0.0.1:9", window_tokens=16)


# -- publishing ------------------------------------------------------------------------------------------------------


def write_adapter(folder: Path) -> Path:
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    save_file({"lora_A.weight": torch.zeros(2, 2)}, folder / "adapter_model.safetensors")
    return folder


def test_publish_switches_the_engines_and_unloads_the_oldest(fake: FakeServer, tmp_path: Path) -> None:
    other, adapter = FakeServer(), write_adapter(tmp_path / "a")
    engines = [make_engine(fake.url), make_engine(other.url)]
    publisher = AdapterPublisher([fake.url, other.url], engines, keep=2)
    for version in ("v1", "v2", "v3"):
        published = publisher.publish(adapter, version)
        assert published.bytes == (adapter / "adapter_model.safetensors").stat().st_size
        assert [engine.model for engine in engines] == [version, version]
    assert fake.loaded == other.loaded == publisher.loaded == ["v2", "v3"]
    other.close()


def test_a_version_name_is_never_used_again(fake: FakeServer, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a")
    publisher = AdapterPublisher([fake.url], [], keep=1)
    publisher.publish(adapter, "v1")
    publisher.publish(adapter, "v2")  # v1 is unloaded, its cache blocks are not
    with pytest.raises(UserError, match="'v1' was published before"):
        publisher.publish(adapter, "v1")


def test_publish_is_all_or_nothing(fake: FakeServer, tmp_path: Path) -> None:
    other, adapter = FakeServer(), write_adapter(tmp_path / "a")
    engine = make_engine(fake.url)
    publisher = AdapterPublisher([fake.url, other.url], [engine])
    publisher.publish(adapter, "v1")
    other.refuse_adapters = True
    with pytest.raises(UserError, match="refused adapter 'v2'.*rank 64.*--max-lora-rank"):
        publisher.publish(adapter, "v2")
    other.close()
    with pytest.raises(ServerError, match="does not answer"):
        publisher.publish(adapter, "v3")
    assert (fake.loaded, engine.model) == (["v1"], "v1")


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda d: (d / "adapter_config.json").unlink(), "adapter_config.json is missing"),
        (lambda d: (d / "adapter_config.json").write_text("{"), "no LoRA configuration"),
        (lambda d: (d / "adapter_model.safetensors").unlink(), "adapter_model.safetensors is missing"),
        (lambda d: (d / "adapter_model.safetensors").write_bytes(b""), "is damaged"),
        (lambda d: (d / "adapter_model.safetensors").write_bytes(b"\xff" * 64), "is damaged"),
        (lambda d: os.truncate(d / "adapter_model.safetensors", 80), "is damaged.*80 bytes"),
    ],
)
def test_a_malformed_adapter_is_one_clear_line(tmp_path: Path, break_it: Any, words: str) -> None:
    adapter = write_adapter(tmp_path / "a")
    break_it(adapter)
    with pytest.raises(UserError, match=words) as e:
        check_adapter(adapter)
    assert "\n" not in str(e.value) and "save_pretrained" in e.value.remedy


# -- starting and stopping -------------------------------------------------------------------------------------------


def start_with(command: list[str], monkeypatch: pytest.MonkeyPatch, log: Path, **config: Any) -> VLLMServer:
    """``VLLMServer.start`` with another command in place of vLLM."""
    monkeypatch.setattr(server, "_command", lambda *_, **__: command)
    return VLLMServer.start(Path("m"), ServerConfig(**config), window_tokens=64, max_lora_rank=8, log_path=log)


def test_a_busy_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        config = ServerConfig(port=port)
        with pytest.raises(UserError, match=f"port {port}.*server.port"):
            VLLMServer.start(Path("m"), config, window_tokens=64, max_lora_rank=8, log_path=tmp_path / "vllm.log")
    assert not (tmp_path / "vllm.log").exists()


def test_a_server_that_dies_while_starting_shows_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "vllm.log"
    script = "print('INFO starting'); raise ValueError('rope_theta is missing')"
    with pytest.raises(UserError, match="ValueError: rope_theta is missing.*vllm.log"):
        start_with([sys.executable, "-c", script], monkeypatch, log)


def test_a_server_that_is_never_ready_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    with pytest.raises(UserError, match="not ready after 2 s.*start_timeout_s"):
        start_with([sys.executable, "-c", script], monkeypatch, tmp_path / "vllm.log", start_timeout_s=2)
    assert gone(int((tmp_path / "pid").read_text()))


def test_the_cause_is_found_above_its_consequences(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(
        "(EngineCore pid=1) ERROR 12-01 [core.py:1] Traceback (most recent call last):\n"
        "(EngineCore pid=1) ERROR 12-01 [core.py:1] ValueError: Available memory on node 0 (1/23 GiB) is too small\n"
        "(APIServer pid=2)   File 'x.py', line 3\n"
        "(APIServer pid=2) RuntimeError: Engine core initialization failed. See root cause above.\n"
        "[rank0]:[W1201] Warning: something about shutdown\n"
    )
    assert last_error_line(log) == "ValueError: Available memory on node 0 (1/23 GiB) is too small"


def gone(pid: int, within_s: float = 10.0) -> bool:
    """Whether the process is dead (a zombie counts) within the time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.05)
    return False


STUBBORN = (  # a shell that ignores SIGTERM, with a child and an orphaned grandchild, like a server with an engine
    "trap '' TERM; sleep 300 & echo $! >>{0}; (sleep 300 & echo $! >>{0}); echo $$ >>{0}; while :; do sleep 1; done"
)


def started_pids(path: Path, count: int) -> list[int]:
    for _ in range(200):
        if path.exists() and len(path.read_text().split()) == count:
            return [int(pid) for pid in path.read_text().split()]
        time.sleep(0.05)
    raise AssertionError("the command did not start")


def guard_command(parent: int, shell: str) -> list[str]:
    return [sys.executable, "-I", _guard.__file__, str(parent), "sh", "-c", shell]


def test_nothing_survives_a_parent_that_is_killed(tmp_path: Path) -> None:
    """S6: SIGKILL gives the parent no chance to clean up."""
    pids = tmp_path / "pids"
    shell = STUBBORN.format(pids)
    parent_code = (
        "import os, subprocess, sys, time\n"
        f"command = {guard_command(0, shell)!r}; command[3] = str(os.getpid())\n"
        "subprocess.Popen(command, start_new_session=True); time.sleep(300)"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_code])
    try:
        children = started_pids(pids, 3)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert all(gone(pid, 3 * _guard.GRACE_S) for pid in children)


def test_stop_ends_even_what_ignores_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.VLLMServer, "_wait_ready", lambda *_: None)
    pids = tmp_path / "pids"
    with start_with(["sh", "-c", STUBBORN.format(pids)], monkeypatch, tmp_path / "log") as running:
        children = started_pids(pids, 3)
        assert running.pid is not None and running.peak_rss_mb() > 0
    assert all(gone(pid, 0.5) for pid in children), "stop() returns when everything is gone"


def test_the_command_dies_with_its_guard(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    shell = f"echo $$ >>{pids}; exec sleep 300"
    guard = subprocess.Popen(guard_command(os.getpid(), shell), start_new_session=True)
    children = started_pids(pids, 1)
    guard.kill()
    guard.wait()
    assert all(gone(pid) for pid in children)


def test_a_guard_passes_on_the_exit_status() -> None:
    assert subprocess.run(guard_command(os.getpid(), "exit 7"), start_new_session=True).returncode == 7


# -- the real server: one for all, of the tiny model in float32 --------------------------------------------------------


@pytest.fixture(scope="module")
def adapters(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes LoRA adapters of the tiny model with random weights; ``scale`` 1 makes them change everything."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    def make(name: str, *, seed: int, scale: float = 1.0, rank: int = 8) -> Path:
        model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32),
            LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        generator = torch.Generator().manual_seed(seed)
        for key, weight in model.named_parameters():
            if "lora_" in key:
                weight.data = scale * torch.randn(weight.shape, generator=generator) / 8
        folder = tmp_path_factory.mktemp("adapters") / name
        model.save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def publisher(vllm_server: VLLMServer) -> AdapterPublisher:
    return AdapterPublisher([vllm_server.url], [make_engine(vllm_server.url)], keep=1)


def random_prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 384) for _ in range(length)]


def reference_logprobs(sample: Sample, model_dir: Path, adapter: Path | None = None, temperature: float = 1.0) -> Any:
    """Log-probs of the sampled ids by transformers (and PEFT) in float32."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        logits = model(torch.tensor([sample.prompt_ids + sample.sampled_ids])).logits[0]
    logits = logits[len(sample.prompt_ids) - 1 : -1]  # the position before each sampled id
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(sample.sampled_ids)[:, None])[:, 0]


def gap(sample: Sample, reference: Any) -> float:
    """Mean absolute difference of log-probs."""
    import torch

    return float((torch.tensor(sample.logprobs) - reference).abs().mean())


async def sample_many(engine: VLLMEngine, prompts: list[list[int]]) -> list[Sample]:
    async with engine:
        return await asyncio.gather(*(engine.sample(prompt, seed=i) for i, prompt in enumerate(prompts)))


def names_served(one: VLLMServer) -> list[str]:
    return [card["id"] for card in request_json(f"{one.url}/v1/models")["data"]]


@pytest.mark.vllm
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_the_models_own_at_the_sampling_temperature(
    vllm_server: VLLMServer, tiny_model_dir: Path, temperature: float
) -> None:
    engine = make_engine(vllm_server.url, temperature=temperature, max_new_tokens=64)
    sample = sample_once(engine, random_prompt(200, 0), seed=3)
    assert gap(sample, reference_logprobs(sample, tiny_model_dir, temperature=temperature)) < 1e-4
    assert gap(sample, reference_logprobs(sample, tiny_model_dir, temperature=temperature + 0.1)) > 1e-2


@pytest.mark.vllm
def test_a_seed_repeats_the_draw(vllm_server: VLLMServer) -> None:
    engine, prompt = make_engine(vllm_server.url), random_prompt(100, 1)
    first, again, other = (sample_once(engine, prompt, seed=seed).sampled_ids for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.vllm
def test_the_end_of_sequence_id_is_among_the_sampled_ids(vllm_server: VLLMServer) -> None:
    """It is trained like any other sampled id: it is how the policy learns to stop."""
    engine = make_engine(vllm_server.url, max_new_tokens=200)
    samples = asyncio.run(sample_many(engine, [random_prompt(20, i) for i in range(24)]))
    stopped = [s for s in samples if s.finish_reason == "stop"]
    assert stopped and all(s.sampled_ids[-1] == END_OF_MESSAGE for s in stopped)
    assert all(END_OF_MESSAGE not in s.sampled_ids[:-1] for s in samples)
    assert all(len(s.sampled_ids) == 200 for s in samples if s.finish_reason == "length")


@pytest.mark.vllm
def test_many_long_seeded_prompts_do_not_kill_the_engine(vllm_server: VLLMServer) -> None:
    """vLLM's CPU engine dies when it reads the prompt of a seeded request in chunks."""
    engine = make_engine(vllm_server.url, max_new_tokens=4, retries=0)
    samples = asyncio.run(sample_many(engine, [random_prompt(1900, i) for i in range(8)]))
    assert len(samples) == 8 and vllm_server.alive()


@pytest.mark.vllm
def test_a_published_adapter_is_what_samples(
    vllm_server: VLLMServer, publisher: AdapterPublisher, adapters: Callable[..., Path], tiny_model_dir: Path
) -> None:
    """S7: an exaggerated adapter changes the output, and to exactly what PEFT makes of it."""
    prompt, engine, adapter = random_prompt(100, 2), publisher.engines[0], adapters("loud", seed=1)
    base = sample_once(engine, prompt, temperature=0.0)
    publisher.publish(adapter, "s7-loud")
    sample = sample_once(engine, prompt, seed=0)
    assert sample.policy_version == "s7-loud"
    assert sample_once(engine, prompt, temperature=0.0).sampled_ids != base.sampled_ids
    assert gap(sample, reference_logprobs(sample, tiny_model_dir, adapter)) < 1e-4
    assert gap(sample, reference_logprobs(sample, tiny_model_dir)) > 0.1


@pytest.mark.vllm
def test_no_block_of_the_previous_version_is_reused(
    vllm_server: VLLMServer, publisher: AdapterPublisher, adapters: Callable[..., Path], tiny_model_dir: Path
) -> None:
    """S8: the prefix cache is warm with the old version's blocks when the new one is asked the same."""
    prompt, engine = random_prompt(600, 3), publisher.engines[0]
    publisher.publish(adapters("old", seed=1), "s8-old")
    old = [sample_once(engine, prompt, seed=0) for _ in range(2)][-1]
    new_adapter = adapters("new", seed=2)
    publisher.publish(new_adapter, "s8-new")
    engine.metrics()
    new = sample_once(engine, prompt, seed=0)
    assert engine.metrics()["prefix_cache_hit_rate"] == 0.0
    assert new.sampled_ids != old.sampled_ids
    assert gap(new, reference_logprobs(new, tiny_model_dir, new_adapter)) < 1e-4
    sample_once(engine, prompt, seed=0)
    assert engine.metrics()["prefix_cache_hit_rate"] > 0.9


@pytest.mark.vllm
def test_the_stale_version_is_unloaded(
    vllm_server: VLLMServer, publisher: AdapterPublisher, adapters: Callable[..., Path]
) -> None:
    adapter = adapters("a", seed=1)
    publisher.publish(adapter, "u-1")
    publisher.publish(adapter, "u-2")
    assert "u-1" not in names_served(vllm_server) and "u-2" in names_served(vllm_server)
    with pytest.raises(ServerError, match="does not know model 'u-1'"):
        sample_once(make_engine(vllm_server.url, "u-1"), [5, 6])
    with pytest.raises(UserError, match="'u-2'.*already been loaded"):  # by another run on the same server
        AdapterPublisher([vllm_server.url], []).publish(adapter, "u-2")


@pytest.mark.vllm
def test_a_refused_adapter_leaves_the_old_version_live(
    vllm_server: VLLMServer, publisher: AdapterPublisher, adapters: Callable[..., Path], tmp_path: Path
) -> None:
    publisher.publish(adapters("good", seed=1), "r-good")
    too_high = adapters("too-high", seed=1, rank=64)
    wrong_modules = tmp_path / "wrong"
    wrong_modules.mkdir()
    write_adapter(wrong_modules)
    config = json.loads((too_high / "adapter_config.json").read_text())
    (wrong_modules / "adapter_config.json").write_text(json.dumps({**config, "r": 8}))
    for folder in (too_high, wrong_modules):
        with pytest.raises(UserError, match="refused adapter 'r-bad'.*--max-lora-rank") as e:
            publisher.publish(folder, "r-bad")
        assert "\n" not in str(e.value)
    assert publisher.engines[0].model == "r-good" and "r-bad" not in names_served(vllm_server)
    assert sample_once(publisher.engines[0], random_prompt(20, 4)).policy_version == "r-good"


@pytest.mark.vllm
def test_a_prompt_beyond_the_window_is_a_clear_error(vllm_server: VLLMServer) -> None:
    with pytest.raises(ServerError, match="a prompt of 2048 tokens plus up to 16 new ones is above"):
        sample_once(make_engine(vllm_server.url), random_prompt(2048, 5))


@pytest.mark.vllm
def test_attaching_to_a_real_server_tries_its_logprobs_mode(vllm_server: VLLMServer) -> None:
    attached = VLLMServer.attach(vllm_server.url, window_tokens=2048, temperature=0.6)
    attached.stop()
    assert attached.alive() and attached.base_model == "base", "what we only attached to is not ours to stop"


@pytest.mark.vllm
def test_all_of_the_servers_processes_are_under_the_guard(vllm_server: VLLMServer) -> None:
    import psutil

    assert vllm_server.pid is not None and vllm_server.alive()
    tree = [p for p in psutil.Process(vllm_server.pid).children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    assert len(tree) >= 2 and {os.getpgid(p.pid) for p in tree} == {vllm_server.pid}
    assert vllm_server.peak_rss_mb() > 300
