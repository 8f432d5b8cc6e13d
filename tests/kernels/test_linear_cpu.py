"""Products in float32 where a CPU has no instructions for less: exact integers, and bfloat16 no worse."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from qinfer.kernels import int8_row_cpu, linear_cpu, w8a8_int8_cpu
from qinfer.testing import error_ratio

NAMES = ("has_int8_product", "has_bfloat16_product")


@pytest.fixture(params=[1 << 22, 1 << 11], ids=["whole", "slices"])
def _without_instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor that has none; small weights are one slice or many."""
    for module in (linear_cpu, w8a8_int8_cpu, int8_row_cpu):
        for name in NAMES:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda: False)
    monkeypatch.setattr(linear_cpu, "SLICE", request.param)


def random_int8(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


@pytest.mark.usefixtures("_without_instructions")
@pytest.mark.parametrize("columns", [1, 7, 1023, 1024, 1025, 2048, 2049, 14336])
def test_integers_are_exact_at_their_largest(columns: int) -> None:
    """Every sum that a float32 can hold, and the nearest float32 of those that it cannot."""
    torch.manual_seed(0)
    codes, weight = random_int8(3, columns).clamp_(-127), random_int8(5, columns)
    codes[0], weight[0], weight[1] = 127, -128, 127
    codes[1] = -127
    sums = linear_cpu.integer_sums(codes.float(), weight)
    exact = codes.long() @ weight.long().T
    assert torch.equal(sums, exact.float())
    assert int(exact[0, 0]) == -127 * 128 * columns


@pytest.mark.usefixtures("_without_instructions")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (4, 576), (40, 1536)])
def test_the_product_is_that_of_int8_instructions(rows: int, columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, weight, scale = torch.randn(rows, columns).to(dtype), random_int8(48, columns), torch.rand(48)
    codes, row_scale = w8a8_int8_cpu.scaled(x)
    integers = codes.round().char().long() @ weight.long().T
    expected = (integers.float() * scale * row_scale).to(dtype)
    assert torch.equal(w8a8_int8_cpu.w8a8_int8_cpu(x, weight, scale), expected)


@pytest.mark.usefixtures("_without_instructions")
def test_one_row_too() -> None:
    torch.manual_seed(2)
    weight, scale = random_int8(48, 1536), torch.rand(48)
    row = int8_row_cpu.quantize(torch.randn(1, 1536))
    integers = row.codes.long().T @ weight.long().T
    expected = integers.float() * scale * torch.tensor(row.scale)
    assert torch.equal(int8_row_cpu.product(row, weight, scale), expected)


@pytest.mark.usefixtures("_without_instructions")
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("columns", [64, 1100])
def test_a_broken_row_harms_no_other(columns: int, broken: float) -> None:
    x, weight = torch.randn(9, columns), random_int8(16, columns)
    clean = w8a8_int8_cpu.w8a8_int8_cpu(x, weight, torch.ones(16))
    x[4, columns - 9] = broken
    y = w8a8_int8_cpu.w8a8_int8_cpu(x, weight, torch.ones(16))
    assert y[4].isnan().all()
    assert torch.equal(y[torch.arange(9) != 4], clean[torch.arange(9) != 4])


@pytest.mark.usefixtures("_without_instructions")
@pytest.mark.parametrize("rows", [1, 7, 8, 33])
def test_bfloat16_is_rounded_once(rows: int) -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(rows, 300).bfloat16(), torch.randn(40, 300).bfloat16()
    exact = x.double() @ weight.double().T
    for given in (weight, weight.T.contiguous().T):
        y = linear_cpu.linear(x, given)
        assert y.dtype is torch.bfloat16
        # half a step of bfloat16, and what float32 sums of 300 lose where they cancel
        assert ((y.double() - exact).abs() <= exact.abs() * 2**-8 * 1.001 + 1e-4).all()


@pytest.mark.usefixtures("_without_instructions")
def test_gradients_flow() -> None:
    torch.manual_seed(4)
    x = torch.randn(16, 64).bfloat16().requires_grad_()
    weight = torch.randn(96, 64).bfloat16()
    linear_cpu.linear(x, weight).float().sum().backward()
    assert x.grad is not None
    assert error_ratio(x.grad, weight.double().sum(0).expand(16, 64)) < 2**-7


def test_other_dtypes_and_few_rows_are_torchs_own() -> None:
    x, weight = torch.randn(16, 64), torch.randn(32, 64)
    assert torch.equal(linear_cpu.linear(x, weight), functional.linear(x, weight))
    few, narrow = x[:4].bfloat16(), weight.bfloat16()
    assert torch.equal(linear_cpu.linear(few, narrow), functional.linear(few, narrow))


def test_what_a_processor_has_is_what_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, object] = {"architecture": "x86_64", "avx2": True, "avx512_vnni": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    assert not linear_cpu.has_int8_product.__wrapped__()
    assert not linear_cpu.has_bfloat16_product.__wrapped__()
    found["avx512_f"] = True
    assert linear_cpu.has_bfloat16_product.__wrapped__()
    assert not linear_cpu.has_int8_product.__wrapped__()
    found["avx_vnni"] = True
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: (a.int() @ b.int()).clamp(-32768, 32767))
    assert not linear_cpu.has_int8_product.__wrapped__()  # it saturates
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: a.int() @ b.int())
    assert linear_cpu.has_int8_product.__wrapped__()
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # torch 2.11
    assert linear_cpu.has_bfloat16_product.__wrapped__()
