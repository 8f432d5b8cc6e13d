"""A written checkpoint is whole, complete and lists only what is there (case Q25)."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qinfer.checkpoint import writer
from qinfer.checkpoint.checkpoint import Checkpoint, open_checkpoint
from qinfer.checkpoint.compressed_tensors import quantization_config
from qinfer.checkpoint.names import all_modules
from qinfer.checkpoint.writer import CheckpointWriter, check_out
from qinfer.errors import CheckpointError, UserError
from qinfer.quant import W8A8Int8
from qinfer.testing import tiny_model
from qinfer.tokenizer import Tokenizer


@pytest.fixture
def source(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(tiny_model("llama", tmp_path / "source", dtype="bfloat16", shards=2))


def copy_tensors(source: Checkpoint, writer: CheckpointWriter) -> None:
    for name in sorted(source.names()):
        writer.add(name, source.tensor(name))


def quantize(source: Checkpoint, writer: CheckpointWriter) -> None:
    modules = all_modules(source.config)
    weights = {f"{module}.weight" for module in modules}
    for module in modules:
        tensors = W8A8Int8().quantize(source.tensor(f"{module}.weight"), dtype=torch.bfloat16)
        for suffix, tensor in tensors.items():
            writer.add(f"{module}.{suffix}", tensor)
    for name in source.names() - weights:
        writer.add(name, source.tensor(name))


def test_one_shard_has_no_index_even_when_the_source_has_one(source: Checkpoint, tmp_path: Path) -> None:
    out = tmp_path / "out"
    writer = CheckpointWriter(source, out)
    copy_tensors(source, writer)
    writer.finish(None, {"report.md": "# done"})
    assert sorted(file.name for file in out.iterdir()) == [
        *("chat_template.jinja", "config.json", "generation_config.json", "model.safetensors"),
        *("report.md", "tokenizer.json", "tokenizer_config.json"),
    ]
    assert (out / "report.md").read_text() == "# done"
    written = load_file(out / "model.safetensors")
    assert all(torch.equal(source.tensor(name), tensor) for name, tensor in written.items())
    assert written.keys() == source.names()
    assert json.loads((out / "config.json").read_text()) == source.raw_config
    assert (out / "model.safetensors").stat().st_mode & 0o444 == (out / "config.json").stat().st_mode & 0o444


def test_several_shards_have_an_index_of_exactly_what_is_there(source: Checkpoint, tmp_path: Path) -> None:
    out = tmp_path / "out"
    writer = CheckpointWriter(source, out, max_shard_bytes=60_000)
    copy_tensors(source, writer)
    writer.finish(None)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in out.glob("*.safetensors"))
    count = len(files)
    assert count > 2
    assert files == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    held = {name: file for file in files for name in load_file(out / file)}
    assert index["weight_map"] == held
    sizes = [source.tensor(n).numel() * source.tensor(n).element_size() for n in source.names()]
    assert index["metadata"] == {"total_size": sum(sizes)}
    for file in files:
        tensors = load_file(out / file)
        assert len(tensors) == 1 or sum(t.numel() * t.element_size() for t in tensors.values()) <= 60_000
    assert open_checkpoint(out).names() == source.names()


def test_q25_quantized_output_serves_without_its_source(source: Checkpoint, tmp_path: Path) -> None:
    out = tmp_path / "out"
    before = Tokenizer.load(source.path)
    texts = [f"Hello {i} wörld <|im_end|> 😊 the  thing\n" for i in range(20)]
    expected = [before.encode(text) for text in texts]
    template = (source.path / "chat_template.jinja").read_text()
    writer = CheckpointWriter(source, out)
    quantize(source, writer)
    writer.finish(quantization_config(W8A8Int8(), ignore=["lm_head"]))
    raw = dict(source.raw_config)
    shutil.rmtree(source.path)

    checkpoint = open_checkpoint(out)
    after = Tokenizer.load(out)
    assert [after.encode(text) for text in texts] == expected
    assert after.eos_token_ids == before.eos_token_ids == {256, 258}
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [258, 256]
    assert (out / "chat_template.jinja").read_text() == template
    written = dict(checkpoint.raw_config)
    assert written.pop("quantization_config")["quantization_status"] == "compressed"
    assert written == raw
    assert written["dtype"] == "bfloat16"


def test_q25_chat_template_inside_tokenizer_config(tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path / "source")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ messages[0]['content'] }}?"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").unlink()
    source = open_checkpoint(folder)
    writer = CheckpointWriter(source, tmp_path / "out")
    copy_tensors(source, writer)
    writer.finish(None)
    tokenizer = Tokenizer.load(tmp_path / "out")
    assert tokenizer.hf.chat_template == settings["chat_template"]
    assert tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": "why"}])) == "why?"


def test_licence_goes_along_and_strangers_do_not(source: Checkpoint, tmp_path: Path) -> None:
    for name in (
        "LICENSE",
        "tokenizer.model",
        "hf_quant_config.json.bak",
        "training.log",
        "other.safetensors",
    ):
        (source.path / name).write_text("x")
    (source.path / "additional_chat_templates").mkdir()
    (source.path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ 1 }}")
    out = tmp_path / "out"
    writer = CheckpointWriter(source, out)
    copy_tensors(source, writer)
    writer.finish(None)
    assert (out / "LICENSE").exists()
    assert (out / "tokenizer.model").exists()
    assert (out / "additional_chat_templates" / "tool_use.jinja").exists()
    assert sorted(file.name for file in out.glob("*.safetensors")) == ["model.safetensors"]
    assert not list(out.glob("*.log")) + list(out.glob("*.bak"))


def test_nothing_appears_until_finished_and_nothing_stays_after_abort(
    source: Checkpoint, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    writer = CheckpointWriter(source, out)
    copy_tensors(source, writer)
    assert not out.exists()
    writer.abort()
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_missing_tensor_leaves_no_output(source: Checkpoint, tmp_path: Path) -> None:
    writer = CheckpointWriter(source, tmp_path / "out")
    for name in source.names() - {"model.norm.weight"}:
        writer.add(name, source.tensor(name))
    with pytest.raises(CheckpointError, match=r"missing: model\.norm\.weight"):
        writer.finish(None)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_existing_output_is_refused_before_any_work_or_replaced_whole(
    source: Checkpoint, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    (out / "config.json").write_text("{}")
    with pytest.raises(UserError, match="is not empty"):
        CheckpointWriter(source, out)
    with pytest.raises(UserError, match="is the source itself"):
        CheckpointWriter(source, source.path, overwrite=True)
    with pytest.raises(UserError, match="is a file"):
        CheckpointWriter(source, out / "notes.txt", overwrite=True)
    writer = CheckpointWriter(source, out, overwrite=True)
    copy_tensors(source, writer)
    assert (out / "notes.txt").exists()
    writer.finish(None)
    assert not (out / "notes.txt").exists()
    assert open_checkpoint(out).names() == source.names()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_views_of_one_storage_are_written_apart(source: Checkpoint, tmp_path: Path) -> None:
    """q, k and v are often slices of one tensor; each must come out as it went in."""
    writer = CheckpointWriter(source, tmp_path / "out")
    for name in source.names() - {"model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"}:
        writer.add(name, source.tensor(name))
    both = torch.randn(64, 256).T.to(torch.bfloat16)
    writer.add("model.layers.0.mlp.gate_proj.weight", both[:128])
    writer.add("model.layers.0.mlp.up_proj.weight", both[128:])
    writer.finish(None)
    out = open_checkpoint(tmp_path / "out")
    assert torch.equal(out.tensor("model.layers.0.mlp.up_proj.weight"), both[128:])


def test_overwriting_deletes_nothing_but_a_checkpoint(tmp_path):
    outer = tmp_path / "outer"
    source = open_checkpoint(tiny_model("llama", outer / "source"))
    with pytest.raises(UserError, match="is the source itself or holds it"):
        CheckpointWriter(source, outer, overwrite=True)
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "mine.csv").write_text("keep")
    for also in ((), ("config.json",)):
        for name in also:
            (kept / name).write_text("{}")
        with pytest.raises(UserError, match=r"holds more than a checkpoint \(.*mine.csv"):
            CheckpointWriter(source, kept, overwrite=True)
    assert (kept / "mine.csv").read_text() == "keep"
    assert source.names()


def test_two_writers_never_mix(source: Checkpoint, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = CheckpointWriter(source, out)
    first.add("model.norm.weight", source.tensor("model.norm.weight"))
    for keep in (False, True):
        with pytest.raises(UserError, match=r"out\.partial is being written by another run"):
            CheckpointWriter(source, out, keep=keep)
    with pytest.raises(UserError, match="another run"):
        check_out(source, out, overwrite=False)
    for name in sorted(source.names() - {"model.norm.weight"}):
        first.add(name, source.tensor(name))
    first.finish(None)
    second = CheckpointWriter(source, out, overwrite=True)
    first.abort()  # which has ended: what is there is not its own
    assert second.folder.is_dir()
    second.abort()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_a_lock_ends_with_its_process(source: Checkpoint, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from qinfer.checkpoint.writer import _locked; "
        "handle = _locked(Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", script, str(tmp_path / "out.partial")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(UserError, match="another run"):
            CheckpointWriter(source, tmp_path / "out")
        other.kill()
    CheckpointWriter(source, tmp_path / "out").abort()


def test_a_run_that_ended_just_before_the_lock_keeps_its_folder(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, locked = tmp_path / "out", writer._locked

    def late(folder: Path) -> int | None:
        out.mkdir()
        (out / "config.json").write_text("{}")
        return locked(folder)

    monkeypatch.setattr(writer, "_locked", late)
    with pytest.raises(UserError, match="is not empty"):
        CheckpointWriter(source, out)
    assert [path.name for path in tmp_path.glob("out*")] == ["out"]
    assert (out / "config.json").read_text() == "{}"
