"""A pair of keys, made anew for every test that signs or trusts."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from qinfer.evals.signature import Signer


class KeyFiles(NamedTuple):
    """A private key and its public one, as files in PEM."""

    private: Path
    public: Path


def write_keys(folder: Path, name: str = "key") -> KeyFiles:
    """A new pair of keys as `openssl genpkey -algorithm ed25519` and `openssl pkey -pubout` write them."""
    key = Ed25519PrivateKey.generate()
    files = KeyFiles(folder / f"{name}.pem", folder / f"{name}.pub")
    files.private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    files.public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return files


@pytest.fixture
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyFiles:
    return write_keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture
def signer(keys: KeyFiles) -> Signer:
    return Signer.load(keys.private)
