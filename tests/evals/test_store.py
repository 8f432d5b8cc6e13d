"""What was put is found again under the same key, whole or not at all, within the bound."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest
import torch

from qinfer.evals.store import Store, code_digest, key_of


def test_a_key_is_decided_by_every_part_and_by_no_order() -> None:
    key = key_of(model="a", ids=[1, 2], kv="int8")
    assert len(key) == 64
    assert key == key_of(kv="int8", ids=(1, 2), model="a")
    others = [key_of(model="a", ids=[1, 2]), key_of(model="a", ids=[12], kv="int8"), key_of(model="a\udcff")]
    assert len({key, *others}) == 4


def test_what_was_put_is_found_by_another_store_of_the_same_folder(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "later"
    assert Store(folder).get(key_of(a=1)) is None
    assert not folder.exists()
    tensors = {"hidden": torch.randn(7, 3).bfloat16(), "ids": torch.arange(4).view(2, 2).T}
    Store(folder).put_tensors(key_of(a=1), tensors)
    found = Store(folder).tensors(key_of(a=1))
    assert found is not None
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert Store(folder).get(key_of(a=2)) is None
    assert not list(folder.rglob("*.partial"))


def test_a_damaged_entry_counts_as_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, key = Store(tmp_path), key_of(a=1)
    store.put_tensors(key, {"x": torch.ones(100)})
    (path,) = tmp_path.glob("??/*")
    path.write_bytes(path.read_bytes()[:50])
    assert store.tensors(key) is None
    assert "made again" in caplog.text


def test_those_used_longest_ago_go_when_there_are_too_many(tmp_path: Path) -> None:
    store = Store(tmp_path, max_bytes=1000)
    keys = [key_of(i=i) for i in range(12)]
    for age, key in enumerate(keys[:9]):
        store.put(key, bytes(100))
        (path,) = tmp_path.glob(f"??/{key}")
        os.utime(path, (1000 + age, 1000 + age))
    assert store.get(keys[0]) == bytes(100)  # which makes it the youngest
    for key in keys[9:]:
        store.put(key, bytes(100))
    left = {key for key in keys if store.get(key) is not None}
    assert left == set(keys) - {keys[1], keys[2]}


def test_a_folder_that_cannot_be_written_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    store = Store(tmp_path / "file" / "store")
    with caplog.at_level(logging.WARNING):
        store.put(key_of(a=1), b"x")
        store.put(key_of(a=2), b"x")
    assert caplog.text.count("results are not kept") == 1
    assert store.get(key_of(a=1)) is None


def test_entries_are_for_their_owner_to_read(tmp_path: Path) -> None:
    Store(tmp_path / "store").put(key_of(a=1), b"prompts of somebody's own text")
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700


def test_the_code_has_a_digest() -> None:
    assert len(code_digest()) == 64
    assert code_digest() == code_digest()
