"""KV scales: the maxima of the keys and values that the cache would get, and the three ways to write them."""

import json
from dataclasses import replace

import pytest
import torch

from qinfer.calibrate import kv_scales, pipeline
from qinfer.calibrate.block import dense_layer, embed_batches, load_block
from qinfer.calibrate.prepare import prepare_job
from qinfer.calibrate.settings import Settings
from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.engine.kv_pool import scales_in
from qinfer.errors import UserError
from qinfer.llm import LLM
from qinfer.model.causal import CausalAttention
from qinfer.sampling_params import SamplingParams
from qinfer.testing import tiny_model
from qinfer.tokenizer import Tokenizer

CPU = torch.device("cpu")
TEXT = [f"Keys and values of text number {i} are looked at." for i in range(4)]


class _Seen(CausalAttention):
    def __call__(self, layer, heads, **settings):
        _, self.k, self.v = heads.turned()
        return super().__call__(layer, heads, **settings)


def _quantize(source, out, **arguments):
    arguments = {"scheme": "w8a16-int8", "method": "rtn", "calibration": TEXT, "max_seq_len": 24, **arguments}
    job = prepare_job(open_checkpoint(source), Tokenizer.load(source), out, Settings(**arguments))
    job = replace(job, dtype=torch.float32)
    return job, pipeline.run(job, progress=False)


def _maxima_of_the_first_layer(job, source):
    checkpoint = open_checkpoint(source)
    layer = dense_layer(checkpoint.config, 0, load_block(checkpoint, 0), device=CPU, dtype=torch.float32)
    k, v = [], []
    for batch in embed_batches(
        checkpoint, job.data.sequences, search_tokens=1, device=CPU, dtype=torch.float32
    ):
        attend = _Seen(batch.num_sequences)
        layer(batch.hidden, batch.rope, attend)
        k.append(attend.k)
        v.append(attend.v)
    return [torch.cat(x).abs().amax(dim=(0, 2)) for x in (k, v)]


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_scales_are_the_maxima_after_norm_and_rotation(family, tmp_path):
    source = tiny_model(family, tmp_path / "source")
    job, report = _quantize(source, tmp_path / "out", kv_scales="fp8-head")
    checkpoint = open_checkpoint(tmp_path / "out")
    for name, expected in zip("kv", _maxima_of_the_first_layer(job, source), strict=True):
        scale = checkpoint.tensor(f"{checkpoint.config.tensor_prefix}layers.0.self_attn.{name}_scale")
        assert scale.shape == (checkpoint.config.num_kv_heads, 1, 1)
        # the layer that made them has 8-bit weights
        torch.testing.assert_close(scale.flatten() * 448, expected, rtol=0.02, atol=0)
        assert report.layers[0].kv_absmax[name] == pytest.approx((scale.flatten() * 448).tolist(), rel=1e-6)


def test_fp8_per_tensor_is_announced_read_and_served(tmp_path):
    source = tiny_model("llama", tmp_path / "source")
    _, report = _quantize(source, tmp_path / "out", kv_scales="fp8")
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.raw_config["quantization_config"]["kv_cache_scheme"] == {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False
    }  # fmt: skip
    for i, (k, v) in scales_in(checkpoint).items():
        assert checkpoint.header(f"model.layers.{i}.self_attn.k_scale")[0] == (1,)
        maxima = report.layers[i].kv_absmax
        assert (k * 448, v * 448) == pytest.approx((max(maxima["k"]), max(maxima["v"])), rel=1e-6)
    llm = LLM(str(tmp_path / "out"), allow_ungated=True, dtype="float32", num_kv_blocks=8)
    assert llm.generate("a", SamplingParams(max_tokens=4, temperature=0))[0].outputs[0].token_ids


def test_per_head_scales_are_served_on_the_largest(tmp_path):
    source = tiny_model("llama", tmp_path / "source")
    _, report = _quantize(source, tmp_path / "out", kv_scales="fp8-head")
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.raw_config["quantization_config"]["kv_cache_scheme"]["strategy"] == "attn_head"
    for i, (k, v) in scales_in(checkpoint).items():
        maxima = report.layers[i].kv_absmax
        assert (k * 448, v * 448) == pytest.approx((max(maxima["k"]), max(maxima["v"])), rel=1e-6)


def test_int8_lies_in_a_file_beside_the_checkpoint_and_is_not_announced(tmp_path):
    source = tiny_model("llama", tmp_path / "source")
    _, report = _quantize(source, tmp_path / "out", kv_scales="int8-head")
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.raw_config["quantization_config"]["kv_cache_scheme"] is None
    assert not [name for name in checkpoint.names() if name.endswith("k_scale")]
    written = json.loads((tmp_path / "out" / kv_scales.SIDECAR).read_text())["scales"]
    for i, layer in enumerate(report.layers):
        for name in "kv":
            assert [s * 127 for s in written[str(i)][name]] == pytest.approx(layer.kv_absmax[name], rel=1e-6)


def test_unknown_kinds_are_refused_before_any_work(tmp_path):
    source = tiny_model("llama", tmp_path / "source")
    with pytest.raises(UserError, match="unknown KV scales 'int4'; choose one of fp8, fp8-head, int8-head"):
        _quantize(source, tmp_path / "out", kv_scales="int4")
