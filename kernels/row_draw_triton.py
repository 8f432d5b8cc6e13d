# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The last kernel of sampling: each row's exact limit, and the draw. The whole is in `row_search_triton`."""

import triton
import triton.language as tl
from triton.language.extra import cuda

from qinfer.kernels.row_search_triton import COUNT, INF, LOG2E, MASS, NONE, _request, _whole_row, exp2


@triton.jit
def _flip(bits):
    """Bits of a float32 as an int32 of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    return _flip(key.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _weight(x, top, slope, counting):
    return tl.where(counting, 1.0, exp2((x - top) * slope))


@triton.jit
def _search(x, at, length, lo, hi, base, target, top, slope, counting, BLOCK: tl.constexpr):
    """The largest t in [lo, hi) with base + W(t) >= target; lo if none is.

    W is that of x, or where x is None of `length` logits at `at`, read again in every step.
    """
    a = _flip(lo.to(tl.int32, bitcast=True)).to(tl.int64)
    b = _flip(hi.to(tl.int32, bitcast=True)).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    if x is not None:
        w = _weight(x, top, slope, counting)
    while b - a > 1:
        step = tl.maximum((b - a) // 4, 1)
        t1, t2, t3 = _value(a + step), _value(a + 2 * step), _value(a + 3 * step)
        if x is not None:
            s1, s2, s3 = tl.where(x >= t1, w, 0.0), tl.where(x >= t2, w, 0.0), tl.where(x >= t3, w, 0.0)
        else:
            s1 = tl.zeros((BLOCK,), tl.float32)
            s2 = tl.zeros((BLOCK,), tl.float32)
            s3 = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, length, BLOCK):
                y = tl.load(at + start + lane, mask=start + lane < length, other=-INF).to(tl.float32)
                v = _weight(y, top, slope, counting)
                s1 += tl.where(y >= t1, v, 0.0)
                s2 += tl.where(y >= t2, v, 0.0)
                s3 += tl.where(y >= t3, v, 0.0)
        w1, w2, w3 = tl.reduce((s1, s2, s3), 0, _add3)
        reached = (base + w1 >= target).to(tl.int64) + (base + w2 >= target) + (base + w3 >= target)
        b = tl.minimum(b, tl.where(reached < 3, a + (reached + 1) * step, b))
        a = a + reached * step
    return _value(a)


@triton.jit
def _limit(x, at, length, lo, hi, base, target, kind, p, top, slope, BLOCK: tl.constexpr):
    """What top_k and then top_p keep begins here; x, at and length are those of `_search`."""
    limit = lo
    if kind != NONE:
        limit = _search(x, at, length, lo, hi, base, target, top, slope, kind == COUNT, BLOCK)
    if (kind == COUNT) & (p < 1):
        if x is not None:
            mass = tl.where(x >= limit, exp2((x - top) * slope), 0.0)
        else:
            lane = tl.arange(0, BLOCK)
            mass = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, length, BLOCK):
                y = tl.load(at + start + lane, mask=start + lane < length, other=-INF).to(tl.float32)
                mass += tl.where(y >= limit, exp2((y - top) * slope), 0.0)
        target = tl.maximum(p * tl.sum(mass, 0), 1e-30)
        limit = _search(x, at, length, limit, hi, 0.0, target, top, slope, False, BLOCK)
    return limit


@triton.jit
def _masses(row_at, num_tokens, limit, top, slope, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """The kept mass of each piece of a row [CHUNKS], from the whole row."""
    each = tl.arange(0, CHUNKS)
    lane = tl.arange(0, CHUNK)
    masses = tl.zeros((CHUNKS,), tl.float32)
    for start in range(0, num_tokens, CHUNK):
        x = tl.load(row_at + start + lane, mask=start + lane < num_tokens, other=-INF).to(tl.float32)
        mass = tl.sum(tl.where(x >= limit, exp2((x - top) * slope), 0.0), 0)
        masses = tl.where(each == start // CHUNK, mass, masses)
    return masses


@triton.jit
def _drawn(row_at, masses, uniform, limit, top, slope, num_tokens, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """The token where the cumulative mass passes `uniform` of the whole; -1 if the whole is no number."""
    lane = tl.arange(0, CHUNK)
    each = tl.arange(0, CHUNKS)
    ends = tl.cumsum(masses.to(tl.float64), 0)
    total = tl.max(ends, 0)
    goal = uniform * total
    chunk = tl.minimum(tl.sum((ends <= goal).to(tl.int32), 0), tl.max(tl.where(masses > 0, each, 0), 0))
    goal -= tl.max(tl.where(each < chunk, ends, 0.0), 0)
    token = chunk * CHUNK + lane
    x = tl.load(row_at + token, mask=token < num_tokens, other=-INF).to(tl.float32)
    w = tl.where(x >= limit, exp2((x - top) * slope), 0.0)
    sums = tl.cumsum(w.to(tl.float64), 0)
    # sums may end a rounding below the piece's mass: then its last kept token
    place = tl.minimum(tl.sum((sums <= goal).to(tl.int32), 0), tl.max(tl.where(w > 0, lane, 0), 0))
    return tl.where(total > 0, chunk * CHUNK + place, -1)


@triton.jit
def finish(logits, uniform, temperature, top_k, top_p, min_p, maxima, sums, minima, places, targets, kept,
           counts, above_counts, above_masses, brackets, ids, limits, num_tokens, stride, num_chunks,
           FILTER: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ROOM: tl.constexpr,
           EARLY: tl.constexpr):  # fmt: skip
    """Grid (rows,): the row's token, and its limit where `limits` is wanted. FILTER: some limit is on."""
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    t, _, p, _, kind, greedy = _request(row, temperature, top_k, top_p, min_p, num_tokens)
    slope = LOG2E / t
    top, _, _ = _whole_row(row, maxima, sums, minima, num_chunks, slope, CHUNKS)
    each = tl.arange(0, CHUNKS)
    at = row * num_chunks + each
    real = each < num_chunks
    largest = tl.load(maxima + at, mask=real, other=-INF)
    broken = tl.max((largest != largest).to(tl.int32), 0) > 0
    if uniform is None:
        greedy = t > 0  # whatever was asked for: there is nothing to draw by
    if ids is not None and (greedy | broken):
        place = tl.min(tl.where(largest == top, tl.load(places + at, mask=real, other=0), num_tokens - 1), 0)
        tl.store(ids + row, tl.where(broken, -1, place).to(tl.int64))
        return
    row_at = logits + row * stride
    limit = -INF
    if FILTER:
        lo = tl.load(brackets + row * 2)
        hi = tl.load(brackets + row * 2 + 1)
        masses = tl.load(above_masses + at, mask=real, other=0.0)
        target = tl.load(targets + row, mask=kind != NONE, other=0.0)
        count = tl.load(counts + at, mask=real, other=0)
        if tl.max(count, 0) <= ROOM:
            above = tl.sum(tl.load(above_counts + at, mask=real, other=0), 0).to(tl.float32)
            base = tl.where(kind == MASS, tl.sum(masses, 0), above)
            spot = tl.arange(0, CHUNKS * ROOM)
            first = kept + row * num_chunks * ROOM
            inside = tl.load(first + spot, mask=spot < num_chunks * ROOM, other=-INF)
            limit = _limit(inside, first, 0, lo, hi, base, target, kind, p, top, slope, CHUNK)
            mass = tl.where(inside >= limit, exp2((inside - top) * slope), 0.0)
            masses += tl.sum(tl.reshape(mass, (CHUNKS, ROOM)), 1)
        else:
            limit = _limit(None, row_at, num_tokens, lo, hi, 0.0, target, kind, p, top, slope, CHUNK)
            masses = _masses(row_at, num_tokens, limit, top, slope, CHUNK, CHUNKS)
    else:
        masses = tl.load(sums + at, mask=real, other=0.0) * exp2((largest - top) * slope)
    if limits is not None:
        tl.store(limits + row, limit)
    if uniform is not None:
        token = _drawn(row_at, masses, tl.load(uniform + row), limit, top, slope, num_tokens, CHUNK, CHUNKS)
        tl.store(ids + row, token.to(tl.int64))
