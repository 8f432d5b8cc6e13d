"""The tables of tiles: which row a shape takes, and what is said where there is none."""

import json
import logging
from pathlib import Path

import pytest

from qinfer.kernels import tiles


@pytest.fixture
def table(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    rows = {"64x128": [[16, {"BLOCK_M": 16}], [64, {"BLOCK_M": 64}], [None, {"BLOCK_M": 128}]]}
    (tmp_path / "configs" / "some-gpu.json").write_text(
        json.dumps(
            {
                "ops": {
                    "w8": rows,
                    "w8 in parts": {"64x128": [[1, {"BLOCK_M": 8}]]},
                    "norm": {"*": [[None, {"WARPS": 4}]]},
                }
            }
        )
    )
    monkeypatch.setattr(tiles, "__file__", str(tmp_path / "tiles.py"))
    tiles._table.cache_clear()
    tiles._say_once.cache_clear()
    yield
    tiles._table.cache_clear()
    tiles._say_once.cache_clear()


def formula(m: int, n: int, k: int) -> tiles.Tile:
    return {"formula": (m, n, k)}


@pytest.mark.parametrize(("m", "block"), [(0, 16), (16, 16), (17, 64), (64, 64), (65, 128), (10**6, 128)])
def test_the_first_row_that_holds_m_is_taken(table, m, block):
    assert tiles.tile("w8", "some-gpu", formula, m, 64, 128) == {"BLOCK_M": block}


@pytest.mark.parametrize(
    ("m", "in_parts", "block"), [(1, True, 8), (1, False, 16), (2, True, 16), (65, True, 128)]
)
def test_rows_of_products_in_parts_go_first_where_they_hold_m(table, m, in_parts, block):
    assert tiles.tile("w8", "some-gpu", formula, m, 64, 128, in_parts=in_parts) == {"BLOCK_M": block}
    assert tiles.tile("norm", "some-gpu", formula, m, in_parts=in_parts) == {"WARPS": 4}


def test_ops_without_a_weight_have_one_key(table):
    assert tiles.tile("norm", "some-gpu", formula, 7) == {"WARPS": 4}


def test_an_unknown_shape_or_gpu_falls_to_the_formula_and_says_so_once(table, caplog):
    with caplog.at_level(logging.INFO, logger="qinfer.kernels.tiles"):
        for _ in range(2):
            assert tiles.tile("w8", "some-gpu", formula, 3, 64, 256) == {"formula": (3, 64, 256)}
            assert tiles.tile("w8", "other-gpu", formula, 3, 64, 128) == {"formula": (3, 64, 128)}
    assert [record.getMessage() for record in caplog.records] == [
        "w8: no measured tile on some-gpu for a weight of 64x256; a formula chooses",
        "w8: no measured tile on other-gpu for a weight of 64x128; a formula chooses",
    ]


def test_gpu_names_become_file_names():
    assert tiles.gpu_key("NVIDIA H200") == "nvidia-h200"
    assert tiles.gpu_key("NVIDIA GeForce RTX 4090") == "nvidia-geforce-rtx-4090"


def test_rows_of_the_committed_tables_hold_every_m():
    for path in (Path(tiles.__file__).parent / "configs").glob("*.json"):
        ops = json.loads(path.read_text())["ops"]
        for op, keys in ops.items():
            for key, rows in keys.items():
                uppers = [upper for upper, _ in rows]
                if op.endswith(" in parts"):
                    assert key in ops[op.removesuffix(" in parts")]
                else:
                    assert uppers.pop() is None, (op, key)
                assert None not in uppers, (op, key)
                assert uppers == sorted(set(uppers)), (op, key)
