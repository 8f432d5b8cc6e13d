"""Which twin runs, with made-up ops on the CPU: the settings, declining, checking, and compiling ahead."""

import inspect
import logging
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from qinfer import backend, env, ops
from qinfer.engine.options import StepLimits
from qinfer.engine.warmup import plans, sizes
from qinfer.errors import UserError
from qinfer.kernels import w4a16
from qinfer.kernels.ahead_triton import compiled_ahead
from qinfer.kernels.tiles import Declined
from qinfer.ops import attending, eight_bit, elementwise, norms, sampling, weight_only

Op = Callable[..., Any]
X = torch.tensor([1.0, 2.0])


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Sets the environment's wishes for this test."""

    def chosen(backend_name: str | None = None, check: str | None = None) -> None:
        for name, value in (("QINFER_BACKEND", backend_name), ("QINFER_CHECK", check)):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        backend.settings.cache_clear()

    chosen()
    yield chosen
    monkeypatch.undo()
    backend.fallbacks.clear()
    backend._twin.cache_clear()
    backend.settings.cache_clear()


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> Callable[[Op, Op], Op]:
    """Puts a meaning and its twin where the dispatch looks for them; returns the meaning."""

    def made(meaning: Op, twin: Op) -> Op:
        name = f"made_up_{id(meaning)}"
        module = types.ModuleType(f"{name}_triton")
        vars(module)["double"] = twin
        monkeypatch.setitem(sys.modules, f"{name}_triton", module)
        meaning.__module__, meaning.__name__ = name, "double"
        return meaning

    return made


def plain(x: Tensor) -> Tensor:
    return 2 * x


def never(*args: Any) -> Tensor:
    raise AssertionError("must not be called")


def test_auto_takes_the_twin_and_torch_the_meaning(choose: Any, op: Any) -> None:
    assert backend.run(op(never, lambda x: 3 * x), X).tolist() == [3.0, 6.0]
    choose("triton")
    assert backend.run(op(never, lambda x: 3 * x), X).tolist() == [3.0, 6.0]
    choose("torch")
    assert backend.run(op(lambda x: 2 * x, never), X).tolist() == [2.0, 4.0]


def declining(x: Tensor) -> Tensor:
    raise Declined("numbers are odd")


def test_declining_runs_the_meaning_and_is_said_once(
    choose: Any, op: Any, caplog: pytest.LogCaptureFixture
) -> None:
    meaning = op(lambda x: 2 * x, declining)
    for length in (2, 3):
        assert backend.run(meaning, torch.ones(length)).tolist() == [2.0] * length
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "double runs in plain torch, which is slow, for float32[2]: numbers are odd"
    assert backend.fallbacks == {("double", "numbers are odd"): 2}
    choose("auto", "1")  # there is nothing to compare
    assert backend.run(op(lambda x: 2 * x, declining), X).tolist() == [2.0, 4.0]


def test_another_gpu_than_hopper_runs_in_plain_torch(
    choose: Any, op: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A10")
    assert backend.run(op(lambda x: 2 * x, never), X).tolist() == [2.0, 4.0]
    assert "made for Hopper GPUs, not for NVIDIA A10" in caplog.text


def test_declining_is_an_error_where_torch_is_ruled_out(choose: Any, op: Any) -> None:
    choose("triton")
    with pytest.raises(UserError, match=r"double has no kernel for float32\[2\]: numbers are odd"):
        backend.run(op(never, declining), X)


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [("QINFER_BACKEND", "cuda", "auto, torch, triton"), ("QINFER_CHECK", "yes", "0 or 1")],
)
def test_a_senseless_setting_is_the_users_error(
    variable: str, value: str, allowed: str, choose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match=rf"{variable} must be .*{allowed}, not '{value}'"):
        backend.model_device()


def test_settings_default_to_auto_without_check(choose: Any) -> None:
    assert backend.settings() == ("auto", False)
    choose("", "")
    assert (env.backend(), env.check()) == ("auto", False)


def test_without_a_gpu_models_run_on_the_cpu_and_triton_is_refused(
    choose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert backend.model_device() == torch.device("cpu")
    choose("triton")
    with pytest.raises(UserError, match="needs an NVIDIA GPU"):
        backend.model_device()


def test_a_check_passes_what_differs_by_rounding(choose: Any, op: Any) -> None:
    choose("auto", "1")
    result = backend.run(op(lambda x: 2 * x, lambda x: 2.01 * x), X)
    assert result.tolist() == pytest.approx([2.01, 4.02])


@pytest.mark.parametrize(
    "twin",
    [
        lambda x: (x, 2.1 * x),
        lambda x: (x, torch.tensor([2.0, float("nan")])),
        lambda x: (x, torch.tensor([2.0])),
        lambda x: (x, (2 * x).double()),
        lambda x: (x + 1, 2 * x),
    ],
    ids=["error", "nan", "shape", "dtype", "first"],
)
def test_a_check_stops_at_the_first_difference(twin: Op, choose: Any, op: Any) -> None:
    choose("auto", "1")
    with pytest.raises(RuntimeError, match=r"QINFER_CHECK: double on float32\[2\]: .* differs from"):
        backend.run(op(lambda x: (x, 2 * x), twin), X)


@pytest.mark.parametrize("to", [torch.int8, torch.float8_e4m3fn], ids=["int8", "e4m3"])
def test_a_check_lets_some_codes_be_the_next_ones(to: torch.dtype, choose: Any, op: Any) -> None:
    """As rounding to bfloat16 before makes them; one of ten with another sign is an error."""
    choose("auto", "1")
    quantize = ops.int8_per_token if to is torch.int8 else ops.fp8_per_token
    for seed in range(20):
        x = torch.randn(1, 64, generator=torch.Generator().manual_seed(seed))
        backend.run(op(lambda x, y: quantize(x), lambda x, y: quantize(y)), x, x.bfloat16())
        wrong = x * torch.where(torch.arange(64) % 10 == 3, -1.0, 1.0)
        with pytest.raises(RuntimeError, match="QINFER_CHECK"):
            backend.run(op(lambda x, y: quantize(x), lambda x, y: quantize(y)), x, wrong)


def test_a_check_says_how_large_the_error_is(choose: Any, op: Any) -> None:
    choose("auto", "1")
    with pytest.raises(RuntimeError, match=r"by 5\.00e-01"):
        backend.run(op(lambda x: 2 * x, lambda x: 3 * x), X)


def test_a_product_in_parts_is_compared_by_their_sum(choose: Any, op: Any) -> None:
    choose("auto", "1")
    x = torch.arange(12).view(3, 4).bfloat16()  # exact in halves and quarters
    parts = torch.stack((x.float() / 4, 3 * x.float() / 4))
    assert torch.equal(backend.run(op(lambda x: x.clone(), lambda _: parts), x), parts)
    with pytest.raises(RuntimeError, match=r"differs from the meaning's bfloat16\[3, 4\] by 5\.00e-01"):
        backend.run(op(lambda x: x.clone(), lambda _: parts.repeat(2, 1, 1) * 0.75), x)


def test_ids_must_be_the_same(choose: Any, op: Any) -> None:
    choose("auto", "1")
    with pytest.raises(RuntimeError, match="differs"):
        backend.run(op(lambda x: torch.tensor([100000]), lambda x: torch.tensor([100001])), X)


def test_infinities_belong_where_the_meaning_has_them() -> None:
    masked = torch.tensor([1.0, float("-inf")])
    assert backend.difference(masked.clone(), masked) == 0.0
    assert backend.difference(torch.tensor([1.0, 0.0]), masked) == float("inf")


class Box(NamedTuple):
    content: Tensor
    other: Tensor | None = None


def rehearsed(x: Tensor, box: Box) -> backend.Rehearsal:
    copy = Box(box.content.clone())
    return backend.Rehearsal((x, copy), copy, lambda: box)


def test_an_op_that_writes_is_compared_by_what_it_wrote(choose: Any, op: Any) -> None:
    def writes(x: Tensor, box: Box) -> None:
        box.content.add_(x)

    def wrong(x: Tensor, box: Box) -> None:
        box.content.sub_(x)

    box = Box(torch.ones(2))
    backend.run_in_place(rehearsed, op(lambda x, b: writes(x, b), writes), X, box)
    assert box.content.tolist() == [2.0, 3.0]
    choose("auto", "1")
    backend.run_in_place(rehearsed, op(lambda x, b: writes(x, b), writes), X, box)
    assert box.content.tolist() == [3.0, 5.0]  # once
    with pytest.raises(RuntimeError, match="differs"):
        backend.run_in_place(rehearsed, op(lambda x, b: writes(x, b), wrong), X, box)


@pytest.mark.parametrize("kv", [torch.float32, torch.int8, torch.float8_e4m3fn])
def test_the_check_of_a_write_copies_the_touched_pages_alone(kv: torch.dtype) -> None:
    shape = (6, 2, 4, 8)  # pages of 4 tokens
    k, v = (torch.randint(0, 100, shape).to(kv) for _ in range(2))
    scales = [torch.rand(shape[:3]), torch.rand(shape[:3])] if kv is torch.int8 else [None, None]
    pages = ops.KVPages(k, v, *scales, k_scale=0.5)
    slots = torch.tensor([21, 9, 20, -1])
    rehearsal = attending._few_pages("data", pages, slots)
    data, copy, places = rehearsal.args
    assert data == "data"
    assert copy.k_scale == 0.5
    assert len(copy.k) == 3  # pages 0, 2 and 5
    assert places.tolist() == [9, 5, 8, 0]
    for ours, theirs in zip(copy[:4], pages[:4], strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert torch.equal(ours.float(), theirs.float()[[0, 2, 5]])
    pages.k.view(torch.uint8)[5] = 1
    assert not torch.equal(rehearsal.actual().k.float(), copy.k.float())


def test_what_a_gpu_would_run_is_told_in_words(choose: Any) -> None:
    assert backend.describe("NVIDIA H200", 9) == "Triton kernels, tiles measured for nvidia-h200"
    assert backend.describe("NVIDIA GH200", 9) == "Triton kernels, tiles by formula"
    assert backend.describe("NVIDIA A10", 8).endswith("the kernels are made for Hopper GPUs")
    choose("auto", "1")
    assert "compared" in backend.describe("NVIDIA H200", 9)
    choose("torch")
    assert backend.describe("NVIDIA H200", 9).startswith("plain torch, as QINFER_BACKEND asks")


def test_every_op_that_asks_here_has_a_twin_of_the_same_signature() -> None:
    asks = re.compile(r"backend\.run\w*\(\s*(?:_few_pages,\s*)?(_\w+)\.(\w+)")
    meanings = [
        getattr(getattr(module, kernel), name)
        for module in (attending, eight_bit, elementwise, norms, sampling, weight_only)
        for kernel, name in asks.findall(inspect.getsource(module))
    ]
    assert len(meanings) >= 20
    meanings += [*norms._NORM_TO.values(), *norms._ADD_NORM_TO.values(), *elementwise._GATED_TO.values()]
    for meaning in meanings:
        if meaning is w4a16.w4a16:  # with float32 scales, which `pack_w4a16` leaves in rows
            with pytest.raises(Declined, match="no kernel"):
                backend._twin(meaning)
            continue
        twin = backend._twin(meaning)
        assert twin.__name__ == meaning.__name__
        assert list(inspect.signature(twin).parameters) == list(inspect.signature(meaning).parameters)
    assert backend._twin(attending._attend_by_plan).__module__ == "qinfer.kernels.paged_attention_triton"


def test_sizes_are_powers_of_two_and_those_between() -> None:
    assert list(sizes(1)) == [1]
    assert list(sizes(2)) == [1, 2]
    assert list(sizes(24)) == [1, 2, 3, 4, 6, 8, 12, 16, 24]
    assert list(sizes(100)) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 100]


def test_the_steps_to_compile_for_stay_within_the_limits() -> None:
    steps = list(plans(StepLimits(10, 3, 25, 4)))
    assert [[c.stop for c in step.chunks] for step in steps] == [
        *([1], [1, 1], [1, 1, 1]),
        *([2], [3], [4], [6], [8], [10, 2], [10, 6], [10, 10, 4], [10, 10, 5]),
    ]
    for step in steps:
        assert sorted(step.pages) == sorted({c.lane for c in step.chunks})
        assert all(len(step.pages[c.lane]) * 4 >= c.stop for c in step.chunks)
        assert all(set(pages) == {1} for pages in step.pages.values())
    assert [c.stop for c in list(plans(StepLimits(1, 2, 2, 4)))[-1].chunks] == [1, 1]


def test_compiling_ahead_takes_launches_over_for_its_time_only() -> None:
    before = JITFunction.run
    with compiled_ahead(2) as futures:
        assert JITFunction.run is not before
        assert futures == []
    assert JITFunction.run is before
    with pytest.raises(KeyError), compiled_ahead(2):
        raise KeyError
    assert JITFunction.run is before
