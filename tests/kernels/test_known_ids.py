"""What goes into a step and comes of it: meanings by hand, and their twins (without a GPU: interpreted)."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from qinfer.kernels import arrivals
from qinfer.kernels import arrivals_triton as arrivals_twin
from qinfer.kernels import known_ids as meaning
from qinfer.kernels import known_ids_triton as twin

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_an_unknown_token_is_the_last_of_its_lane() -> None:
    last = torch.tensor([50, -1, 70, 80])
    token_ids, lanes = torch.tensor([-1, 7, -1, 0, -1]), torch.tensor([2, 2, 1, 0, 3])
    meaning.put_known_ids(token_ids, last, lanes)
    assert token_ids.tolist() == [70, 7, 0, 0, 80]


@pytest.mark.parametrize("count", [1, 2, 255, 257, 1000])
def test_twin(count: int) -> None:
    last = torch.randint(-1, 1 << 40, (513,), device=DEVICE)
    lanes = torch.randint(0, 513, (count,), device=DEVICE)
    token_ids = torch.randint(0, 1 << 40, (count + 5,), device=DEVICE)
    token_ids[torch.rand(count + 5, device=DEVICE) < 0.5] = -1  # five of them nobody asks about
    expected = token_ids.clone()
    meaning.put_known_ids(expected[:count], last, lanes)
    twin.put_known_ids(token_ids[:count], last, lanes)
    assert torch.equal(token_ids, expected)


def test_tokens_are_kept_for_their_lanes_and_told_to_the_host() -> None:
    last, host = torch.tensor([1, 2, 3, 4]), torch.full((2,), -7)
    meaning.keep_ids(torch.tensor([50, -1, 70]), torch.tensor([2, 0, 3]), last, host)
    assert last.tolist() == [-1, 2, 50, 70]
    assert host.tolist() == [50, -1]


@pytest.mark.parametrize(("count", "told"), [(1, 1), (8, 3), (256, 255), (1000, 1000), (0, 0)])
def test_twin_that_keeps(count: int, told: int) -> None:
    """Beyond the ids, and of the host beyond those that are told, nothing is written."""
    ids = torch.randint(-1, 1 << 40, (count + 3,), device=DEVICE)[:count]
    lanes = torch.randperm(1025, device=DEVICE)[:count]
    last = torch.randint(-1, 1 << 40, (1025,), device=DEVICE)
    host = torch.full((told + 300,), -7, pin_memory=DEVICE == "cuda")
    expected, expected_host = last.clone(), host.clone()
    meaning.keep_ids(ids, lanes, expected, expected_host[:told])
    twin.keep_ids(ids, lanes, last, host[:told])
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(last, expected)
    assert torch.equal(host, expected_host)


@pytest.mark.parametrize(
    ("rows", "width", "columns", "rest"), [(4, 10, 1, 7), (4, 64, 64, 0), (4, 1024, 320, 999), (1, 2, 2, 1)]
)
def test_twin_that_brings(rows: int, width: int, columns: int, rest: int) -> None:
    size = rows * width + rest
    numbers = torch.randint(-1, 1 << 40, (size,), pin_memory=DEVICE == "cuda")
    before = torch.full((size + 300,), -7, device=DEVICE)
    target = before.clone()
    arrivals_twin.bring(numbers, target, rows, width, columns)
    matrix, wanted = target[: rows * width].view(rows, width), numbers[: rows * width].view(rows, width)
    assert matrix[:, :columns].tolist() == wanted[:, :columns].tolist()
    assert (matrix[:, columns:] == -7).all()
    assert target[rows * width : size].tolist() == numbers[rows * width :].tolist()
    assert (target[size:] == -7).all()
    arrivals.bring(numbers, before, rows, width, columns)
    assert torch.equal(before, target)
