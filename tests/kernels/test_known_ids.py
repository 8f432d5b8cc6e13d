"""Tokens that only the device knows: the meaning by hand, and its twin (without a GPU: interpreted)."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

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
