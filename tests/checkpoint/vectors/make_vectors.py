"""Makes the vectors beside this file with the packers of the tools themselves; no test runs it.

    python make_vectors.py MODEL PACKAGES...

MODEL is a safetensors folder of SmolLM2-135M-Instruct, from which real weights are taken. PACKAGES are
folders that hold the unpacked distributions: autoawq 0.2.9 and gptqmodel 7.7.0 (sdist), auto_gptq 0.7.1,
nvidia-modelopt 0.47.0 and fbgemm-gpu-genai 1.9.0 (wheels), and what these import (pip install --no-deps
--target). None of them is needed to run a test: they want CUDA, other versions of torch, or a compiler.

Each vector is one safetensors file of a linear [32, 128]: the tensors as that packer wrote them, `expected`,
what that tool itself dequantizes them to (fbgemm, which never does: code times scale), and the
quantization_config as metadata.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

HERE = Path(__file__).parent
ROWS, COLUMNS, GROUP = 32, 128, 32


def weights(model: Path) -> dict[str, Tensor]:
    with safe_open(model / "model.safetensors", framework="pt") as file:
        real = file.get_tensor("model.layers.0.self_attn.k_proj.weight")[:ROWS, :COLUMNS].float()
    random = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    random[:4] = random[:4].abs()  # asymmetric zero points of 0
    return {"real": real, "random": random}


def ranges(weight: Tensor, size: int, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scale and zero point [N, G] as these tools choose them."""
    groups = weight.view(len(weight), -1, size)
    top = 2**bits - 1
    if symmetric:
        scale = groups.abs().amax(-1) * 2 / top
        return scale.half().float(), torch.full_like(scale, 2 ** (bits - 1))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = ((high - low).clamp(min=1e-5) / top).half().float()
    return scale, (-(low / scale).round()).clamp(0, top)


def linear_of(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight.data = weight.clone()
    return linear


def save(name: str, tensors: dict[str, Tensor], expected: Tensor, config: dict[str, Any]) -> None:
    tensors = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
    tensors["expected"] = expected.contiguous()
    save_file(tensors, HERE / f"{name}.safetensors", metadata={"quantization_config": json.dumps(config)})
    print(name, {key: (list(t.shape), str(t.dtype)) for key, t in tensors.items()})


def on_grid(weight: Tensor, scale: Tensor, zero: Tensor, group: Tensor, top: int) -> Tensor:
    """Weights whose codes are in range, so that packers that do not clamp pack what was meant."""
    code = (weight / scale[:, group] + zero[:, group]).round().clamp(0, top)
    return (code - zero[:, group]) * scale[:, group]


def autoawq(packages: list[str], name: str, weight: Tensor) -> None:
    root = next(Path(p) for p in packages if (Path(p) / "awq").is_dir())
    package = types.ModuleType("awq")  # awq/__init__.py imports what is not needed here
    package.__path__ = [str(root / "awq")]
    sys.modules["awq"] = package
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    scale, zero = ranges(weight, GROUP, 4, False)
    group = torch.arange(COLUMNS) // GROUP
    linear = linear_of(on_grid(weight, scale, zero, group, 15))
    packed = WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scale.T, zeros=zero.T.contiguous())
    tensors = {"qweight": packed.qweight, "qzeros": packed.qzeros, "scales": packed.scales}
    expected = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, GROUP).T
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    save(f"autoawq-{name}", tensors, expected, config)


def autogptq(packages: list[str], name: str, weight: Tensor, bits: int, sym: bool, order: bool) -> None:
    root = next(Path(p) for p in packages if (Path(p) / "auto_gptq").is_dir())
    file = root / "auto_gptq/nn_modules/qlinear/qlinear_cuda.py"
    spec = importlib.util.spec_from_file_location("qlinear_cuda", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    scale, zero = ranges(weight, GROUP, bits, sym)
    if not sym:
        zero = zero.clamp(min=1)  # one less underflows into the neighbouring field: broken in the file
    group = torch.arange(COLUMNS) // GROUP
    if order:
        group = group[torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1))]
    linear = linear_of(on_grid(weight, scale, zero, group, 2**bits - 1))
    packed = module.QuantLinear(bits, GROUP, COLUMNS, ROWS, False, weight_dtype=torch.float16)
    linear.half()
    packed.pack(linear, scale.half(), zero.half(), group.int())
    tensors = {key: getattr(packed, key) for key in ("qweight", "qzeros", "scales", "g_idx")}
    expected = packed(torch.eye(COLUMNS, dtype=torch.float16)).T
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": order, "sym": sym}
    save(f"autogptq-{name}", tensors, expected, config)


def gptqmodel(name: str, weight: Tensor, bits: int, size: int, sym: bool, order: bool) -> None:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    scale, zero = ranges(weight, COLUMNS if size == -1 else size, bits, sym)
    group = torch.arange(COLUMNS) // (COLUMNS if size == -1 else size)
    if order:
        group = group[torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(2))]
    linear = linear_of(on_grid(weight, scale, zero, group, 2**bits - 1))
    packed = TorchLinear(bits, size, sym, order, COLUMNS, ROWS)
    packed.pack(linear, scale, zero, group.int())
    packed.post_init()
    tensors = {key: getattr(packed, key).detach() for key in ("qweight", "qzeros", "scales", "g_idx")}
    expected = packed.dequantize_weight().T.half()
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": order, "sym": sym}
    save(f"gptqmodel-{name}", tensors, expected, {**config, "checkpoint_format": "gptq_v2"})


def modelopt(name: str, weight: Tensor, algorithm: str) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import quant_utils

    model = nn.Sequential(linear_of(weight))
    settings = {"FP8": mtq.FP8_DEFAULT_CFG, "FP8_PER_CHANNEL_PER_TOKEN": mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG}
    inputs = torch.randn(64, COLUMNS, generator=torch.Generator().manual_seed(3))
    mtq.quantize(model, settings[algorithm], lambda m: m(inputs))
    linear = model[0]
    kind = quant_utils.get_quantization_format(linear)
    scale = quant_utils.get_weight_scaling_factor(linear)
    packed = quant_utils.to_quantized_weight(linear.weight.data, scale, kind)
    tensors = {"weight": packed, "weight_scale": scale}
    if algorithm == "FP8":
        tensors["input_scale"] = quant_utils.get_activation_scaling_factor(linear)
    expected = linear.weight_quantizer(linear.weight.data).float().detach()
    producer = {"name": "modelopt", "version": "0.47.0"}
    config = {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "ignore": ["lm_head"],
        "producer": producer,
    }
    save(f"modelopt-{name}", tensors, expected, config)


def fbgemm(packages: list[str], name: str, weight: Tensor) -> None:
    root = next(Path(p) for p in packages if (Path(p) / "fbgemm_gpu/experimental/gemm").is_dir())
    for part in ("fbgemm_gpu", "fbgemm_gpu.experimental", "fbgemm_gpu.experimental.gemm"):
        package = types.ModuleType(part)  # the packages' own __init__ load CUDA libraries
        package.__path__ = [str(root / part.replace(".", "/"))]
        sys.modules[part] = package
    from fbgemm_gpu.experimental.gemm.triton_gemm import fp8_gemm

    packed, scale = fp8_gemm.quantize_fp8_row(weight)  # on a CPU its plain torch form
    tensors = {"weight": packed, "weight_scale": scale.view(-1, 1)}  # as transformers stores it
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    save(f"fbgemm-{name}", tensors, packed.float() * scale[:, None], config)


def main() -> None:
    model, *packages = sys.argv[1:]
    sys.path[:0] = packages
    for kind, weight in weights(Path(model)).items():
        autoawq(packages, kind, weight)
        autogptq(packages, f"{kind}-4-sym", weight, 4, True, False)
        autogptq(packages, f"{kind}-4-asym-order", weight, 4, False, True)
        gptqmodel(f"{kind}-4-asym", weight, 4, GROUP, False, False)
        gptqmodel(f"{kind}-4-sym-order", weight, 4, GROUP, True, True)
        fbgemm(packages, kind, weight)
        modelopt(f"{kind}-fp8", weight, "FP8")
        modelopt(f"{kind}-fp8-channel", weight, "FP8_PER_CHANNEL_PER_TOKEN")
    random = weights(Path(model))["random"]
    for bits in (2, 3, 8):
        autogptq(packages, f"random-{bits}-asym", random, bits, False, False)
    gptqmodel("random-8-channel-sym", random, 8, -1, True, False)
    gptqmodel("random-3-asym", random, 3, GROUP, False, False)


if __name__ == "__main__":
    main()
