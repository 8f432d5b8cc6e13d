# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment, var-annotated"
"""The kernels of sampling: which logits a row keeps, and which of them is drawn, without sorting anything.

What top_k and top_p keep is everything from some logit on. With w = 1 or w = exp(logit - largest) and
W(t) = the sum of w over logits >= t, both limits are the largest t with W(t) >= target. So they are found by
narrowing a bracket [lo, hi) with W(hi) < target <= W(lo):

    survey   each piece of a row: largest, least, sum of exponentials
    narrow   W at evenly spaced pivots, piece by piece; the bracket shrinks to what lies between two of them
    gather   what is still in the bracket, collected; above it only the sum is needed
    finish   the limit among the collected, by search over the bits of a float; then the draw

A row is cut into pieces of equal length, so a batch of one fills a GPU as well. All sums are made in a fixed
order that depends on the vocabulary alone: a row's token depends on no other row and on no chance. Pieces
whose largest logit lies below the bracket are not read again. Where more is left in the bracket than fits
(many equal logits), the last kernel searches the whole row instead: slow, and right.

The draw inverts the cumulative distribution, which runs in the order of token ids: first by pieces, then
inside one.

EARLY: a kernel is launched before the one before it has ended, and waits at its start. Each waits, also where
it has nothing to do, so that the end of one means the end of all before it.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

from qinfer.kernels.rows_triton import ASM

LOG2E = tl.constexpr(1.4426950408889634)
NONE, COUNT, MASS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # what is searched for in a row
INF = tl.constexpr(float("inf"))


@triton.jit
def exp2(x):
    """2^x; 0 where that is below the normal numbers."""
    if ASM:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def _request(row, temperature, top_k, top_p, min_p, num_tokens):
    """A row's (temperature, k, p, min_p, kind of search, whether it is greedy)."""
    t, k, p, least = 1.0, 0, 1.0, 0.0
    if temperature is not None:
        t = tl.load(temperature + row)
    if top_k is not None:
        k = tl.load(top_k + row).to(tl.int32)
    if top_p is not None:
        p = tl.load(top_p + row)
    if min_p is not None:
        least = tl.load(min_p + row)
    greedy = t <= 0
    kind = tl.where((k > 0) & (k < num_tokens), COUNT, tl.where(p < 1, MASS, NONE))
    return tl.where(greedy, 1.0, t), k, p, least, tl.where(greedy, NONE, kind), greedy


@triton.jit
def _whole_row(row, maxima, sums, minima, num_chunks, slope, CHUNKS: tl.constexpr):
    """(largest logit, sum of exponentials relative to it, least finite logit), from the pieces' own."""
    chunk = tl.arange(0, CHUNKS)
    real = chunk < num_chunks
    at = row * num_chunks + chunk
    largest = tl.load(maxima + at, mask=real, other=-INF)
    top = tl.max(largest, 0)
    mass = tl.load(sums + at, mask=real, other=0.0) * exp2((largest - top) * slope)
    return top, tl.sum(mass, 0), tl.min(tl.load(minima + at, mask=real, other=INF), 0)


@triton.jit
def _floor(top, t, min_p):
    """The least float32 that min_p keeps: the first at or above top + t log(min_p), which float64 tells."""
    floor = -INF
    if min_p > 0:
        exact = top.to(tl.float64) + t.to(tl.float64) * tl.log(min_p.to(tl.float64))
        floor = exact.to(tl.float32)
        bits = floor.to(tl.int32, bitcast=True)
        above = tl.where(floor < 0, bits - 1, bits + 1).to(tl.float32, bitcast=True)
        floor = tl.where(floor.to(tl.float64) < exact, above, floor)
    return floor


@triton.jit
def _bracket(row, chunk, kind, k, p, min_p, mass, pivots, weights, targets, num_chunks,
             AFTER_FIRST: tl.constexpr, CHUNKS: tl.constexpr, PIVOTS: tl.constexpr):  # fmt: skip
    """(lo, hi) between neighbouring pivots of the round before."""
    each = tl.arange(0, CHUNKS)
    pivot = tl.arange(0, PIVOTS)
    at = weights + (row * num_chunks + each[:, None]) * PIVOTS + pivot[None, :]
    weight = tl.sum(tl.load(at, mask=(each < num_chunks)[:, None], other=0.0), 0)
    if AFTER_FIRST:
        # with min_p, the first pivot is its floor
        whole = tl.where(min_p > 0, tl.sum(tl.where(pivot == 0, weight, 0.0), 0), mass)
        target = tl.where(kind == COUNT, k.to(tl.float32), tl.maximum(p * whole, 1e-30))
        if chunk == 0:
            tl.store(targets + row, target)
    else:
        target = tl.load(targets + row)
    reached = tl.sum((weight >= target).to(tl.int32), 0)
    reached = tl.where(kind == MASS, tl.maximum(reached, 1), reached)  # else: fewer than k finite logits
    pivots += row * (PIVOTS + 1) + reached
    return tl.where(reached > 0, tl.load(pivots - 1, mask=reached > 0, other=0.0), -INF), tl.load(pivots)


@triton.jit
def survey(
    logits, temperature, maxima, sums, minima, places, num_tokens, stride, num_chunks, CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (pieces, rows). A piece that holds NaN has it for its largest."""
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, CHUNK)
    token = chunk * CHUNK + lane
    x = tl.load(logits + row * stride + token, mask=token < num_tokens, other=-INF).to(tl.float32)
    largest = tl.max(x, 0)
    at = row * num_chunks + chunk
    tl.store(places + at, chunk * CHUNK + tl.min(tl.where(x == largest, lane, CHUNK - 1), 0))
    t = 1.0
    if temperature is not None:
        t = tl.load(temperature + row)
    slope = LOG2E / tl.where(t > 0, t, 1.0)
    base = tl.where(largest == -INF, 0.0, largest)
    tl.store(sums + at, tl.sum(exp2((x - base) * slope), 0))
    tl.store(minima + at, tl.min(tl.where(x > -INF, x, INF), 0))
    tl.store(maxima + at, tl.where(tl.max((x != x).to(tl.int32), 0) > 0, float("nan"), largest))


@triton.jit
def _add_from(total, x, w, limit):
    """total + (w where x >= limit), in two instructions."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ge.f32 p, $2, $4; mov.f32 $0, $1; @p add.f32 $0, $0, $3; }",
            "=f,f,f,f,f",
            [total, x, w, limit],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return total + tl.where(x >= limit, w, 0.0)


@triton.jit
def _joined(sums, THREADS: tl.constexpr, PIVOTS: tl.constexpr):
    """The sums [PIVOTS] of PIVOTS tensors [THREADS], a power of two of them."""
    for level in tl.static_range(1, 6):
        if PIVOTS >> level > 0:
            pairs = ()
            for j in tl.static_range(PIVOTS >> level):
                pairs += (tl.join(sums[j], sums[j + (PIVOTS >> level)]),)
            sums = pairs
    return tl.sum(tl.reshape(sums[0], (THREADS, PIVOTS)), 0)


@triton.jit
def narrow(logits, temperature, top_k, top_p, min_p, maxima, sums, minima, old_pivots, old_weights, pivots,
           weights, targets, num_tokens, stride, num_chunks, FIRST: tl.constexpr, SECOND: tl.constexpr,
           CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PIVOTS: tl.constexpr, THREADS: tl.constexpr,
           EARLY: tl.constexpr):  # fmt: skip
    """Grid (pieces, rows): this piece's W at the pivots of the row's bracket."""
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    t, k, p, least, kind, _ = _request(row, temperature, top_k, top_p, min_p, num_tokens)
    if kind == NONE:
        return
    slope = LOG2E / t
    top, mass, bottom = _whole_row(row, maxima, sums, minima, num_chunks, slope, CHUNKS)
    if FIRST:
        # all V logits below this would together weigh less than what top_p may leave out
        reach = t * (tl.log(num_tokens.to(tl.float32)) - tl.log((1 - p) * mass) + 0.01)
        lo = tl.where(least > 0, _floor(top, t, least), tl.maximum(top - reach, bottom))
        lo = tl.where(kind == COUNT, bottom, lo)
        hi = INF
    else:
        lo, hi = _bracket(row, chunk, kind, k, p, least, mass, old_pivots, old_weights, targets, num_chunks,
                          SECOND, CHUNKS, PIVOTS)  # fmt: skip
    step = tl.where(lo > -INF, (tl.minimum(hi, top) - lo) / PIVOTS, 0.0)
    pivots += row * (PIVOTS + 1)
    each = tl.arange(0, PIVOTS)
    at = row * num_chunks + chunk
    weights += at * PIVOTS + each
    if chunk == 0:
        for j in tl.static_range(PIVOTS):
            tl.store(pivots + j, lo + step * j)
        tl.store(pivots + PIVOTS, hi)
    if tl.load(maxima + at) < lo:
        tl.store(weights, tl.zeros((PIVOTS,), tl.float32))
        return
    token = chunk * CHUNK + tl.arange(0, THREADS)
    logits += row * stride + token
    loaded = ()
    totals = ()
    for i in tl.static_range(0, CHUNK, THREADS):
        loaded += (tl.load(logits + i, mask=token + i < num_tokens, other=-INF),)
    for _ in tl.static_range(PIVOTS):
        totals += (tl.zeros((THREADS,), tl.float32),)
    for i in tl.static_range(CHUNK // THREADS):
        x = loaded[i].to(tl.float32)
        w = tl.where(kind == COUNT, 1.0, exp2((x - top) * slope))
        new = ()
        for j in tl.static_range(PIVOTS):
            new += (_add_from(totals[j], x, w, lo + step * j),)
        totals = new
    tl.store(weights, _joined(totals, THREADS, PIVOTS))


@triton.jit
def gather(logits, temperature, top_k, top_p, min_p, maxima, sums, minima, pivots, weights, targets, kept,
           counts, above_counts, above_masses, brackets, num_tokens, stride, num_chunks, CHUNK: tl.constexpr,
           CHUNKS: tl.constexpr, PIVOTS: tl.constexpr, SECOND: tl.constexpr, ROOM: tl.constexpr,
           THREADS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Grid (pieces, rows): this piece's logits inside the row's bracket, and count and mass above it.

    A thread puts its own side by side: whoever reads them adds them all.
    """
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    t, k, p, least, kind, _ = _request(row, temperature, top_k, top_p, min_p, num_tokens)
    slope = LOG2E / t
    top, mass, _ = _whole_row(row, maxima, sums, minima, num_chunks, slope, CHUNKS)
    floor = _floor(top, t, least)
    lo, hi = floor, floor
    if kind != NONE:
        lo, hi = _bracket(row, chunk, kind, k, p, least, mass, pivots, weights, targets, num_chunks, SECOND,
                          CHUNKS, PIVOTS)  # fmt: skip
        # top_p looks at all that top_k kept
        hi = tl.where((kind == COUNT) & (p < 1), INF, hi)
        lo, hi = tl.maximum(lo, floor), tl.maximum(hi, floor)
    if chunk == 0:
        tl.store(brackets + row * 2, lo)
        tl.store(brackets + row * 2 + 1, hi)
    at = row * num_chunks + chunk
    largest = tl.load(maxima + at)
    count, above_count = 0, 0
    above_mass = 0.0
    if hi == -INF:  # everything is kept
        above_mass = tl.load(sums + at) * exp2((largest - top) * slope)
    elif largest >= lo:
        token = chunk * CHUNK + tl.arange(0, THREADS)
        source = logits + row * stride + token
        loaded = ()
        for i in tl.static_range(0, CHUNK, THREADS):
            loaded += (tl.load(source + i, mask=token + i < num_tokens, other=-INF),)
        mass_above = tl.zeros((THREADS,), tl.float32)
        found = tl.zeros((THREADS,), tl.int32)  # inside, and 2^16 times above
        for i in tl.static_range(CHUNK // THREADS):
            x = loaded[i].to(tl.float32)
            mass_above = _add_from(mass_above, x, exp2((x - top) * slope), hi)
            found += tl.where(x >= hi, 1 << 16, ((x >= lo) & (x > -INF)).to(tl.int32))
        above_mass = tl.sum(mass_above, 0)
        both = tl.sum(found, 0)
        count, above_count = both & 0xFFFF, both >> 16
        if count > 0:
            found = found & 0xFFFF
            place = tl.cumsum(found, 0) - found
            for i in tl.static_range(CHUNK // THREADS):
                x = loaded[i].to(tl.float32)
                inside = (x >= lo) & (x < hi) & (x > -INF)
                tl.store(kept + at * ROOM + place, x, mask=inside & (place < ROOM))
                place += inside.to(tl.int32)
    spot = tl.arange(0, ROOM)
    tl.store(kept + at * ROOM + spot, tl.full((ROOM,), -INF, tl.float32), mask=spot >= count)
    tl.store(counts + at, count)
    tl.store(above_counts + at, above_count)
    tl.store(above_masses + at, above_mass)
