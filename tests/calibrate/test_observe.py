"""Statistics are exact over every token, whatever batches they arrive in."""

import torch

from qinfer.calibrate.observe import GroupStats, LayerTap


def _stats(parts):
    stats = GroupStats()
    for part in parts:
        stats.update(part)
    return stats


def test_statistics_equal_float64_over_all_tokens():
    x = torch.randn(100, 16) * torch.logspace(-2, 3, 16)
    stats = _stats([x])
    assert stats.num_tokens == 100
    assert torch.equal(stats.absmax, x.abs().amax(0))
    torch.testing.assert_close(stats.mean.double(), x.double().abs().mean(0), rtol=1e-6, atol=0)


def test_c05_batches_do_not_matter():
    sequences = [torch.randn(5, 8) for _ in range(8)]
    alone = _stats(sequences)
    for size in (2, 8):
        batched = _stats([torch.cat(sequences[i : i + size]) for i in range(0, 8, size)])
        assert torch.equal(batched.absmax, alone.absmax)
        torch.testing.assert_close(batched.mean, alone.mean, rtol=1e-5, atol=0)


def test_c06_uneven_lengths_are_all_counted_in_any_order():
    long, short = torch.randn(423, 8), torch.randn(36, 8)
    long[17, 3] = 999.0
    for order in ([long, short], [short, long]):
        stats = _stats(order)
        assert stats.num_tokens == 459
        assert stats.absmax[3] == 999.0
        torch.testing.assert_close(stats.mean, torch.cat([long, short]).abs().mean(0), rtol=1e-5, atol=0)


def test_sum_of_half_precision_magnitudes_does_not_saturate():
    x = torch.ones(5000, 4, dtype=torch.bfloat16)
    torch.testing.assert_close(_stats([x] * 3).mean, torch.ones(4))


def test_tap_keeps_inputs_only_where_asked():
    tap = LayerTap()
    first, second = torch.randn(3, 4), torch.randn(2, 4)
    tap("o", first)
    tap.keep = True
    tap("o", second)
    second.fill_(float("nan"))  # the layer may reuse its buffer
    assert tap.stats["o"].num_tokens == 5
    assert len(tap.inputs["o"]) == 1
    assert torch.isfinite(tap.inputs["o"][0]).all()
