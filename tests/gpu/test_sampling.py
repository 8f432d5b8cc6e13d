"""Sampling on a GPU against float64, at vocabularies of published models and on logits of every kind."""

import math

import pytest
import torch
from torch import Tensor

from qinfer.kernels import fused_sampling, fused_sampling_triton, sampling, sampling_triton
from qinfer.kernels.fused_sampling_triton import CHUNK, Limits

pytestmark = pytest.mark.gpu

ROWS = 17
VOCABS = (1000, CHUNK, 50_257, 128_256, 262_144)
KINDS = ("normal", "wide", "text", "text by id", "bfloat16", "equal", "mostly -inf")
REQUESTS = {  # temperature, top_k, top_p, min_p
    "plain": (0.7, 0, 1.0, 0.0),
    "top_p": (1.0, 0, 0.9, 0.0),
    "top_k": (1.0, 40, 1.0, 0.0),
    "top_k 1": (1.0, 1, 1.0, 0.0),
    "min_p": (1.5, 0, 1.0, 0.05),
    "all": (0.8, 50, 0.95, 0.01),
    "wide": (1.3, 900, 0.8, 0.0),
    "all but one": (1.0, 999, 1.0, 1e-6),
    "sharp": (1.0, 0, 1e-6, 0.0),
    "nearly off": (1.0, 0, 1 - 2**-24, 0.0),
}


def logits_of(kind: str, vocab: int) -> Tensor:
    noise = torch.randn(ROWS, vocab, device="cuda")
    if kind == "wide":
        return noise * 3
    if kind == "text":
        return 15 - 1.3 * (torch.rand_like(noise).argsort(1) + 1).log() + 0.5 * noise
    if kind == "text by id":
        return 1.5 * noise - 1.2 * torch.arange(1, vocab + 1, device="cuda").log()
    if kind == "bfloat16":
        return (2 * noise - 8).bfloat16().float()
    if kind == "equal":
        return torch.ones_like(noise)
    if kind == "mostly -inf":
        return noise.masked_fill(torch.rand_like(noise) < 0.99, -math.inf)
    return noise


def exact_limit(logits: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The least logit [R, 1] that is kept, by sorting in float64."""
    values = logits.double().sort(dim=1, descending=True).values
    limit = torch.full_like(values[:, :1], -math.inf)
    if min_p > 0:  # as float32 has it, which is what the op is given
        limit = values[:, :1] + torch.tensor(min_p).double().log().item()
    if top_k:
        limit = torch.maximum(limit, values[:, top_k - 1 : top_k])
    if top_p < 1:
        mass = (values - values[:, :1]).exp() * (values >= limit)
        sums = mass.cumsum(1)
        count = ((sums - mass) < top_p * sums[:, -1:]).sum(1, keepdim=True)
        count = torch.minimum(count, (mass > 0).sum(1, keepdim=True))
        limit = torch.maximum(limit, values.gather(1, count - 1))
    return limit


def test_min_p_keeps_to_the_last_bit() -> None:
    """The logits are the float32 numbers around the limit, which no sum of float32 numbers would hit."""
    torch.manual_seed(0)
    min_p = torch.rand(512, device="cuda").clamp_min(1e-6)
    top = 30 * torch.rand(512, device="cuda").double()
    near = (top.float().double() + min_p.double().log()).float().unsqueeze(1)
    steps = torch.arange(-20, 20, device="cuda", dtype=torch.int32)
    logits = (near.view(torch.int32) + steps).view(torch.float32)
    logits = torch.cat((logits, top.float().unsqueeze(1)), 1)
    off = torch.zeros(512, device="cuda", dtype=torch.int64)
    expected = logits.double() >= logits.double().amax(1, keepdim=True) + min_p.double().log().unsqueeze(1)
    for module in (sampling_triton, sampling):
        out = module.filter_logits(logits, off, torch.ones_like(min_p), min_p)
        assert torch.equal(out.isfinite(), expected)


@pytest.mark.parametrize("vocab", VOCABS)
def test_limits_and_draws(vocab: int) -> None:
    torch.manual_seed(vocab)
    for kind in KINDS:
        logits = logits_of(kind, vocab)
        uniform = torch.rand(ROWS, device="cuda", dtype=torch.float64)
        for name, request in REQUESTS.items():
            check(logits, uniform, request, f"{kind}, {name}")


def check(logits: Tensor, uniform: Tensor, request: tuple[float, int, float, float], what: str) -> None:
    """The kept set is float64's up to rounding of sums; tokens lie where the uniform numbers point."""
    temperature, top_k, top_p, min_p = request
    scaled = logits / temperature
    limits = Limits(
        None,
        torch.full((ROWS,), top_k, device="cuda"),
        torch.full((ROWS,), top_p, device="cuda"),
        torch.full((ROWS,), min_p, device="cuda"),
    )
    least = torch.full((ROWS,), math.nan, device="cuda")
    ids = torch.full((ROWS,), -7, device="cuda")
    fused_sampling_triton.run(scaled, uniform, limits, ids=ids, least=least)
    wide = scaled.double()
    probs = wide.softmax(1)
    kept = wide >= least.unsqueeze(1)
    wrong = kept != (wide >= exact_limit(scaled, top_k, top_p, min_p))
    if top_p < 1:  # float32 sums: the set may end some millionths of the mass earlier or later
        assert float((probs * wrong).sum(1).max()) < 3e-6 * float((probs * kept).sum(1).max()), what
    else:
        assert not bool((wrong & wide.isfinite()).any()), what
    mass = probs * kept
    ends = mass.cumsum(1) / mass.sum(1, keepdim=True)
    end = ends.gather(1, ids.unsqueeze(1)).squeeze(1)
    share = (mass / mass.sum(1, keepdim=True)).gather(1, ids.unsqueeze(1)).squeeze(1)
    assert bool((share > 0).all()), what
    assert bool((uniform < end + 1e-6).all()), what
    assert bool((uniform >= end - share - 1e-6).all()), what


def test_a_row_is_drawn_as_if_alone_and_always_the_same() -> None:
    torch.manual_seed(0)
    logits = logits_of("wide", 128_256)
    uniform = torch.rand(ROWS, device="cuda", dtype=torch.float64)
    limits = (
        torch.linspace(0, 1.5, ROWS, device="cuda"),
        torch.arange(ROWS, device="cuda") * 7 % 60,
        torch.linspace(0.5, 1, ROWS, device="cuda"),
        torch.linspace(0, 0.1, ROWS, device="cuda"),
    )
    ids = fused_sampling_triton.sample(logits, uniform, *limits)
    assert torch.equal(ids, fused_sampling_triton.sample(logits, uniform, *limits))
    assert torch.equal(ids, fused_sampling.sample(logits, uniform, *limits))
    for i in range(ROWS):
        row = slice(i, i + 1)
        alone = fused_sampling_triton.sample(logits[row], uniform[row], *(x[row] for x in limits))
        assert torch.equal(alone, ids[row])


def test_a_captured_chain_follows_its_inputs() -> None:
    logits = torch.empty(ROWS, 32_000, device="cuda")
    uniform = torch.empty(ROWS, device="cuda", dtype=torch.float64)
    temperature, top_p = torch.ones(ROWS, device="cuda"), torch.empty(ROWS, device="cuda")
    top_k = torch.zeros(ROWS, device="cuda", dtype=torch.int64)

    def fill() -> None:
        logits.normal_()
        uniform.uniform_()
        top_p.uniform_()
        temperature[0], top_k[1] = 0.0, 50
        logits[2, 5] = math.nan

    fill()
    fused_sampling_triton.sample(logits, uniform, temperature, top_k, top_p)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = fused_sampling_triton.sample(logits, uniform, temperature, top_k, top_p)
    for _ in range(3):
        fill()
        graph.replay()
        assert torch.equal(ids, fused_sampling_triton.sample(logits, uniform, temperature, top_k, top_p))
        assert ids[0] == logits[0].argmax()
        assert ids[2] == -1


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.randn(ROWS, 128_256, device="cuda").round()
    ids = fused_sampling_triton.greedy(logits)
    first = (logits == logits.amax(1, keepdim=True)).int().argmax(1)
    assert torch.equal(ids, first)


def test_steps_equal_their_meanings() -> None:
    torch.manual_seed(1)
    logits = logits_of("wide", 50_257)
    ids = torch.randint(0, 50_257, (ROWS,), device="cuda")
    ours, theirs = sampling_triton.token_logprobs(logits, ids, 20), sampling.token_logprobs(logits, ids, 20)
    torch.testing.assert_close(ours[0], theirs[0], atol=1e-5, rtol=0)
    assert int((ours[1] - theirs[1]).abs().max()) <= 20  # equal after the log-softmax, not before
    torch.testing.assert_close(ours[2], theirs[2], atol=1e-5, rtol=0)
    assert torch.equal(ours[3], theirs[3])
    counts = torch.randint(0, 3, logits.shape, device="cuda").float()
    penalties = (1 + torch.rand(ROWS, device="cuda"), *torch.rand(2, ROWS, device="cuda").unbind(0))
    arguments = logits, counts > 0, counts, *penalties
    torch.testing.assert_close(
        sampling_triton.apply_penalties(*arguments), sampling.apply_penalties(*arguments), atol=1e-5, rtol=0
    )


@pytest.mark.large_gpu_memory
def test_offsets_past_two_to_the_31() -> None:
    rows, vocab = 17_000, 128_256
    logits = torch.zeros(rows, vocab, device="cuda", dtype=torch.float16)
    logits[-1] = torch.randn(vocab, device="cuda").half()
    ids = fused_sampling_triton.greedy(logits)
    assert int(ids[:-1].max()) == 0
    assert ids[-1] == logits[-1].argmax()
    uniform = torch.full((rows,), 0.5, device="cuda", dtype=torch.float64)
    top_p = torch.full((rows,), 0.5, device="cuda")
    temperature = torch.ones(rows, device="cuda")
    last = slice(rows - 1, rows)
    ids = fused_sampling_triton.sample(logits, uniform, temperature, top_p=top_p)
    alone = fused_sampling_triton.sample(logits[last], uniform[last], temperature[last], top_p=top_p[last])
    assert torch.equal(ids[last], alone)
