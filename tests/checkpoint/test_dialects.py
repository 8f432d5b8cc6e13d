"""Checkpoints of other tools: what their packers wrote means here what they say (cases Q03, Q04, Q24).

The vectors were written by AutoAWQ, AutoGPTQ, GPTQModel, fbgemm and ModelOpt themselves; `expected` is each
tool's own dequantization: scale times a small integer, which one rounding to float16 leaves exact.
"""

import importlib.util
import json
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from qinfer.checkpoint import awq, gptq
from qinfer.checkpoint.checkpoint import Checkpoint, open_checkpoint
from qinfer.checkpoint.names import all_modules
from qinfer.engine.kv_pool import scales_in
from qinfer.errors import CheckpointError, UnsupportedModelError
from qinfer.model.causal import CausalAttention
from qinfer.model.decoder import load_decoder
from qinfer.quant import W4A16, Dense, Scheme, W4A16Ordered, W8A8Fp8, W8A8Fp8Static, W8A16Int8
from qinfer.quant.packing import unpack, unpack_zero_points
from qinfer.testing import error_ratio


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


folders = _load("dialect_folders")
SCHEMES: dict[str, Scheme] = {
    "autoawq-real": W4A16(32, False),
    "autoawq-random": W4A16(32, False),
    "autogptq-real-4-sym": W4A16(32, True),
    "autogptq-random-4-sym": W4A16(32, True),
    "autogptq-real-4-asym-order": W4A16Ordered(32, False),
    "autogptq-random-4-asym-order": W4A16Ordered(32, False),
    "gptqmodel-real-4-asym": W4A16(32, False),
    "gptqmodel-random-4-asym": W4A16(32, False),
    "gptqmodel-real-4-sym-order": W4A16Ordered(32, True),
    "gptqmodel-random-4-sym-order": W4A16Ordered(32, True),
    "gptqmodel-random-8-channel-sym": W8A16Int8(),
    "autogptq-random-8-asym": Dense(),
    "autogptq-random-3-asym": Dense(),
    "autogptq-random-2-asym": Dense(),
    "gptqmodel-random-3-asym": Dense(),
    "fbgemm-real": W8A8Fp8(),
    "fbgemm-random": W8A8Fp8(),
    "modelopt-real-fp8": W8A8Fp8Static(),
    "modelopt-random-fp8": W8A8Fp8Static(),
    "modelopt-real-fp8-channel": W8A8Fp8(),
    "modelopt-random-fp8-channel": W8A8Fp8(),
}
PACKED = [name for name in SCHEMES if isinstance(SCHEMES[name], W4A16 | W8A16Int8)]


def opened(name: str, folder: Path) -> Checkpoint:
    tensors, _, config = folders.vector(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of those that run dense; a test of its own looks at it
        return open_checkpoint(folders.write_folder(folder, tensors, config))


def assert_means(meant: Tensor, expected: Tensor) -> None:
    """Equal, or where the tool dequantizes in float32 (ModelOpt, which divides) within its last bit."""
    if expected.dtype is torch.float16:
        assert torch.equal(meant.half(), expected)
    torch.testing.assert_close(meant.to(expected.dtype), expected, rtol=2**-22, atol=0)


def test_every_vector_has_its_scheme() -> None:
    assert sorted(SCHEMES) == folders.NAMES


@pytest.mark.parametrize("name", SCHEMES)
def test_packers_output_means_what_the_packer_says(name: str, tmp_path: Path) -> None:
    _, expected, _ = folders.vector(name)
    checkpoint = opened(name, tmp_path)
    assert checkpoint.is_quantized
    for module in folders.modules():
        assert checkpoint.scheme(module) == SCHEMES[name]
        meant = SCHEMES[name].dequantize(checkpoint.module(module))
        assert_means(meant, expected)
    assert checkpoint.scheme("model.layers.0.mlp.down_proj") == Dense()


@pytest.mark.parametrize("name", [name for name in SCHEMES if "random" in name])
def test_model_in_a_dialect_has_the_logits_of_its_meaning(name: str, tmp_path: Path) -> None:
    checkpoint = opened(name, tmp_path / "packed")
    dense = folders.write_folder(tmp_path / "dense", {"weight": torch.zeros(32, 128)}, None)
    reference = LlamaForCausalLM.from_pretrained(dense, dtype=torch.float32)
    for module in all_modules(checkpoint.config):
        scheme, tensors = checkpoint.scheme(module), checkpoint.module(module)
        linear = reference.get_submodule(module)
        linear.weight.data = scheme.dequantize(tensors)
        linear.register_forward_pre_hook(
            lambda _, inputs, scheme=scheme, tensors=tensors: (scheme.fake_quantize(inputs[0], tensors),)
        )
    token_ids = folders.token_ids()
    with torch.inference_mode():
        expected = reference(token_ids[None]).logits[0]
        decoder = load_decoder(checkpoint)
        out = decoder.logits(decoder.forward(token_ids, torch.arange(24), CausalAttention(1)))
    assert error_ratio(out, expected) < 1e-5


@pytest.mark.parametrize("asked", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["autoawq-random", "gptqmodel-random-4-asym"])
def test_q01_float16_scales_serve_in_the_dtype_of_the_activations(
    name: str, asked: torch.dtype | None, tmp_path: Path
) -> None:
    folders.edit_config(opened(name, tmp_path).path, dtype="bfloat16")
    checkpoint = open_checkpoint(tmp_path)
    ids, positions = folders.token_ids(), torch.arange(24)
    with torch.inference_mode():
        precise = load_decoder(checkpoint, dtype=torch.float32)
        expected = precise.logits(precise.forward(ids, positions, CausalAttention(1)))
        decoder = load_decoder(checkpoint, dtype=asked)
        hidden = decoder.forward(ids, positions, CausalAttention(1))
    assert hidden.dtype == decoder.dtype == (asked or torch.bfloat16)
    narrow = asked is torch.float16
    assert 0 < error_ratio(decoder.logits(hidden), expected) < (0.005 if narrow else 0.03)


@pytest.mark.parametrize("name", PACKED)
def test_what_is_read_is_written_as_the_packer_wrote_it(name: str, tmp_path: Path) -> None:
    tensors, _, config = folders.vector(name)
    module = opened(name, tmp_path).module(folders.modules()[0])
    writer = awq if config["quant_method"] == "awq" else gptq
    written = writer.file_tensors_of(SCHEMES[name], module)
    settings = writer.quantization_config(SCHEMES[name])
    decides = ("quant_method", "bits", "group_size", "sym", "zero_point", "version", "desc_act")
    assert {key: settings[key] for key in decides if key in settings} == {
        key: config[key] for key in decides if key in config
    }
    assert written.keys() == tensors.keys()
    ours = settings.get("checkpoint_format", "gptq")
    theirs = config.get("checkpoint_format", "gptq")
    shift = {"gptq": -1, "gptq_v2": 0}  # version 1 stores a zero point less one: 0x11111111 in a word of 8
    for suffix, tensor in written.items():
        if suffix == "qzeros":
            ones = 0x11111111 if config["bits"] == 4 else 0x01010101
            tensor = tensor + (shift[theirs] - shift[ours]) * ones
        assert tensor.dtype == tensors[suffix].dtype
        assert torch.equal(tensor, tensors[suffix]), suffix


def test_q04_nibble_orders() -> None:
    codes = torch.arange(8, dtype=torch.uint8).repeat(8, 1)  # code k of output n is n
    tensors = {
        "weight_packed": torch.full((8, 1), 0, dtype=torch.int32),
        "weight_scale": torch.ones(8, 1),
        "weight_shape": torch.tensor([8, 8]),
    }
    tensors["weight_packed"] = codes.T.contiguous().view(8, 8)[:, ::2].mul(17).contiguous().view(torch.int32)
    in_order = gptq.file_tensors_of(W4A16(32, True), {**tensors})["qweight"]
    assert in_order.flatten().tolist() == [0x11111111 * n for n in range(8)]
    assert awq.file_tensors_of(W4A16(32, True), tensors)["qweight"].flatten().tolist() == [0x75316420] * 8
    along = (codes[:, ::2] | codes[:, 1::2] << 4).contiguous().view(torch.int32)
    written = gptq.file_tensors_of(W4A16(32, True), {**tensors, "weight_packed": along})["qweight"]
    assert written.flatten().tolist() == [0x76543210] * 8


def test_q04_all_patterns_come_back() -> None:
    halves = torch.arange(65536)
    packed = (halves | halves.flip(0) << 16).where(
        halves.flip(0) < 32768, (halves | halves.flip(0) << 16) - 2**32
    )
    packed = packed.int().view(-1, 32)
    assert torch.equal(awq._words(awq._outputs(packed).T), packed)


def test_q03_zero_point_0_stays_0(tmp_path: Path) -> None:
    for name in ("autoawq-random", "gptqmodel-random-4-asym"):
        module = opened(name, tmp_path / name).module(folders.modules()[0])
        zero = unpack_zero_points(module["weight_zero_point"], 4, 32) + 8
        assert (zero[:4] == 0).all()
        assert (W4A16(32, False).dequantize(module)[:4] >= 0).all()
        written = gptq.file_tensors_of(W4A16(32, False), module)
        assert gptq.quantization_config(W4A16(32, False))["checkpoint_format"] == "gptq_v2"
        config = {**gptq.quantization_config(W4A16(32, False)), "group_size": 32}
        again = open_checkpoint(folders.write_folder(tmp_path / f"{name}-2", written, config))
        back = again.module(folders.modules()[0])
        assert all(torch.equal(back[suffix], module[suffix]) for suffix in module)


@pytest.mark.parametrize(("size", "settled"), [(-1, 128), (128, 128), (64, 64)])
def test_wide_groups_are_several_of_ours_with_one_scale(size: int, settled: int, tmp_path: Path) -> None:
    groups = 128 // (128 if size == -1 else size)
    codes = torch.randint(-(2**31), 2**31, (128, 4), dtype=torch.int64).int()
    scales = torch.rand(groups, 32).half() + 0.1
    zeros = torch.randint(-(2**31), 2**31, (groups, 4), dtype=torch.int64).int()
    config = {"quant_method": "awq", "w_bit": 4, "q_group_size": size, "zero_point": True, "version": "GEMM"}
    tensors = {"qweight": codes, "qzeros": zeros, "scales": scales}
    checkpoint = open_checkpoint(folders.write_folder(tmp_path, tensors, config))
    module = folders.modules()[0]
    assert checkpoint.scheme(module) == W4A16(settled, False)
    step = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7]) * 4
    fields = ((codes[:, :, None] >> step) & 15).flatten(1), ((zeros[:, :, None] >> step) & 15).flatten(1)
    rows = torch.arange(128) // (128 // groups)
    expected = ((fields[0] - fields[1][rows]) * scales.float()[rows]).T
    assert torch.equal(W4A16(settled, False).dequantize(checkpoint.module(module)), expected)


def test_single_linears_have_settings_of_their_own(tmp_path: Path) -> None:
    tensors, _, config = folders.vector("gptqmodel-random-4-asym")
    eight, expected, _ = folders.vector("gptqmodel-random-8-channel-sym")
    folder = folders.write_folder(tmp_path, tensors, config)
    up = {f"model.layers.1.mlp.{m}.{s}": t for m in ("gate_proj", "up_proj") for s, t in eight.items()}
    dense = {"model.layers.0.self_attn.k_proj.weight": torch.ones(32, 128)}
    drop = tuple(f"model.layers.0.self_attn.k_proj.{suffix}" for suffix in tensors)
    folders.change_tensors(folder, drop, **up, **dense)
    dynamic = {
        "+:.*layers\\.1\\.mlp\\.(gate|up)_proj": {"bits": 8, "group_size": -1, "sym": True},
        "-:.*layers\\.0\\.self_attn\\.k_proj": {},
    }
    folders.edit_config(folder, quantization_config={**config, "dynamic": dynamic})
    with pytest.warns(UserWarning, match=r"2 quantized linears \(model.layers.0.self_attn.q_proj, \.\.\.\)"):
        checkpoint = open_checkpoint(folder)
    assert checkpoint.scheme("model.layers.1.mlp.up_proj") == W8A16Int8()
    meant = W8A16Int8().dequantize(checkpoint.module("model.layers.1.mlp.up_proj"))
    assert torch.equal(meant.half(), expected)
    # one dense linear among q, k and v: the others join it
    assert {checkpoint.scheme(f"model.layers.0.self_attn.{m}_proj") for m in "qkv"} == {Dense()}


def test_q24_orders_that_differ_within_one_product_are_dequantized(tmp_path: Path) -> None:
    tensors, expected, config = folders.vector("gptqmodel-random-4-sym-order")
    folder = folders.write_folder(tmp_path, tensors, config)
    other = "model.layers.0.mlp.up_proj"
    order = tensors["g_idx"].flip(0)
    folders.change_tensors(folder, **{f"{other}.g_idx": order})
    with pytest.warns(UserWarning, match="2 quantized linears"):
        checkpoint = open_checkpoint(folder)
    assert checkpoint.scheme(other) == checkpoint.scheme("model.layers.0.mlp.gate_proj") == Dense()
    assert torch.equal(checkpoint.module("model.layers.0.mlp.gate_proj")["weight"].half(), expected)
    codes = unpack(tensors["qweight"].T.contiguous(), 4, 128).float()
    scale = tensors["scales"].float().T
    assert torch.equal(checkpoint.module(other)["weight"], codes * scale[:, order.long()])


@pytest.mark.parametrize("name", ["autoawq-random", "autogptq-random-4-sym", "modelopt-random-fp8"])
def test_q19_each_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    tensors, _, config = folders.vector(name)
    for suffix in tensors.keys() - {"g_idx", "weight"}:
        folder = folders.write_folder(tmp_path / suffix, tensors, config)
        lost = f"model.layers.1.mlp.gate_proj.{suffix}"
        folders.change_tensors(folder, (lost,))
        with pytest.raises(CheckpointError, match=f"missing: {lost}"):
            open_checkpoint(folder)


@pytest.mark.filterwarnings("ignore:.*dequantized while loading")
def test_settings_that_contradict_the_tensors(tmp_path: Path) -> None:
    tensors, _, config = folders.vector("gptqmodel-random-4-asym")
    checkpoint = open_checkpoint(folders.write_folder(tmp_path / "sym", tensors, {**config, "sym": True}))
    with pytest.raises(CheckpointError, match=r"model.layers.0.self_attn.q_proj: .*sym: true, but qzeros"):
        checkpoint.module("model.layers.0.self_attn.q_proj")
    folder = folders.write_folder(tmp_path / "bits", tensors, {**config, "bits": 8})
    with pytest.raises(CheckpointError, match=r"qweight is \[16, 32\] I32, not \[32, 32\]"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (
            "autoawq-random",
            {"version": "gemv"},
            "layout 'gemv' are not supported; gemm is",
        ),
        ("autoawq-random", {"bits": 8}, "AWQ with 8 bits"),
        ("gptqmodel-random-4-asym", {"checkpoint_format": "marlin"}, "layout 'marlin'.*gptq and gptq_v2"),
        ("autogptq-random-4-sym", {"is_marlin_format": True}, "layout 'marlin'"),
        ("autogptq-random-4-sym", {"bits": 5}, "GPTQ with 5 bits is not supported; 2, 3, 4 and 8 are"),
        ("modelopt-random-fp8", {"quant_algo": "NVFP4"}, "ModelOpt's NVFP4 is not supported; FP8, FP8_PER"),
        (
            "modelopt-random-fp8",
            {"quant_method": "bitsandbytes"},
            "'bitsandbytes'.*supported: compressed",
        ),
        ("autoawq-random", {"group_size": "many"}, "quantization_config of awq cannot be understood"),
        ("autogptq-random-4-sym", {"dynamic": {"(": {}}}, "dynamic '\\('"),
    ],
)
def test_what_cannot_be_read_says_precisely_why(
    name: str, changes: dict[str, object], said: str, tmp_path: Path
) -> None:
    tensors, _, config = folders.vector(name)
    folder = folders.write_folder(tmp_path, tensors, {**config, **changes})
    with pytest.raises((UnsupportedModelError, CheckpointError), match=said):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("autogptq-random-4-sym", "quantize_config.json"),
        ("autoawq-random", "quant_config.json"),
        ("modelopt-random-fp8", "hf_quant_config.json"),
    ],
)
def test_q21_settings_in_the_tools_own_file(name: str, file: str, tmp_path: Path) -> None:
    tensors, expected, config = folders.vector(name)
    folder = folders.write_folder(tmp_path, tensors, None)
    own = {key: value for key, value in config.items() if key != "quant_method"}
    if file.startswith("hf_"):  # ModelOpt's older layout
        own = {"producer": own["producer"], "quantization": {"quant_algo": own["quant_algo"]}}
    (folder / file).write_text(json.dumps(own))
    checkpoint = open_checkpoint(folder)
    module = folders.modules()[3]
    meant = checkpoint.scheme(module).dequantize(checkpoint.module(module))
    assert_means(meant, expected)


@pytest.mark.parametrize("layout", ["config.json", "hf_quant_config.json"])
def test_modelopts_kv_scales_are_read(layout: str, tmp_path: Path) -> None:
    tensors, _, config = folders.vector("modelopt-random-fp8")
    scheme = {"dynamic": False, "num_bits": 8, "type": "float"}
    if layout == "config.json":
        folder = folders.write_folder(tmp_path, tensors, {**config, "kv_cache_scheme": scheme})
    else:
        folder = folders.write_folder(tmp_path, tensors, None)
        own = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
        document = {"producer": config["producer"], "quantization": own}
        (folder / layout).write_text(json.dumps(document))
    scales = {
        f"model.layers.{i}.self_attn.{x}_proj.{x}_scale": torch.tensor(0.01 * (i + 1) * (1 + (x == "v")))
        for i in range(2)
        for x in "kv"
    }
    folders.change_tensors(folder, **scales)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.quantization.kv_cache_scheme is not None
    assert scales_in(checkpoint) == {
        0: (pytest.approx(0.01), pytest.approx(0.02)),
        1: (pytest.approx(0.02), pytest.approx(0.04)),
    }
