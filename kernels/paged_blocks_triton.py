# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Which rows are a program's next: the blocks of `paged_prefill_warps_triton`, in Gluon.

The order is that of `paged_prefill_triton`: the latest, heaviest blocks first, and there and back again over
the programs. Each of a program's tasks asks for itself, so that they need not tell each other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def num_blocks_of(header, most_pages, ROWS: gl.constexpr):
    """(prefill sequences, blocks of ROWS rows that they may need) of a step, none if it has more pages."""
    num_prefill = gl.load(header + 1)
    num_blocks = (gl.load(header + 2) + num_prefill * (ROWS - 1)) // ROWS
    return num_prefill, gl.where(gl.load(header + 3) > most_pages, 0, num_blocks)


@gluon.jit
def block_at(turn, num_prefill, num_blocks, num_seqs, num_kv_heads, prefill, query_starts, seq_lens,
             ROWS: gl.constexpr, TILE: gl.constexpr):  # fmt: skip
    """(KV head, sequence, its first row of the step, its rows, its length, the block's first row, its tiles).

    The block is this program's in its turn; it has no tiles where there is none, or no row in it.
    """
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    work = turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)
    is_work = work < num_blocks * num_kv_heads
    kv_head = work % num_kv_heads
    block = gl.maximum(num_blocks - 1 - work // num_kv_heads, 0)
    starts = prefill + num_seqs + 1
    low = 0
    high = num_prefill
    while high - low > 1:
        middle = (low + high) // 2
        begins = (gl.load(starts + middle) + middle * (ROWS - 1)) // ROWS <= block
        low = gl.where(begins, middle, low)
        high = gl.where(begins, high, middle)
    seq = gl.load(prefill + low)
    first_row = (block - (gl.load(starts + low) + low * (ROWS - 1)) // ROWS) * ROWS
    start = gl.load(query_starts + seq).to(gl.int32)
    rows = gl.load(query_starts + seq + 1).to(gl.int32) - start
    length = gl.load(seq_lens + seq).to(gl.int32)
    end = gl.minimum(length - rows + first_row + ROWS, length)  # past the block's last position
    tiles = gl.where(is_work & (first_row < rows), gl.cdiv(end, TILE), 0)
    return kv_head, seq, start, rows, length, first_row, tiles
