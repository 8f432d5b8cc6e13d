"""Who vouches for a certificate: an Ed25519 signature (RFC 8032) of the document, and keys to trust.

Hashes bind a verdict to bytes; they do not say who gave it, and whoever can write the folder can write a
verdict. With a signature, a server can demand one that was given by the holder of a key.

Keys are files that everybody's tools make: PEM (`openssl genpkey -algorithm ed25519`) or OpenSSH
(`ssh-keygen -t ed25519`), private to sign and public to trust. What is signed is the document without its
`signature`, as JSON with sorted keys, no spaces, and ASCII only. The key's fingerprint is OpenSSH's
(`ssh-keygen -l`): SHA-256 of the public key in OpenSSH's wire form.

Needs the package `cryptography` (extra `sign`), and only where something is signed or a signature demanded.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from qinfer.errors import GateError, UserError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_KEYS = "cryptography.hazmat.primitives.asymmetric.ed25519"
_LOADERS = "cryptography.hazmat.primitives.serialization"
_T = TypeVar("_T")


class Signer:
    """A private key, read before anything is measured, so that a wrong file costs no waiting."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def load(cls, path: Path) -> Signer:
        """Reads a private key without a password; raises UserError for anything else."""
        loaders = _cryptography(_LOADERS)
        kinds = (
            lambda data: loaders.load_pem_private_key(data, password=None),
            lambda data: loaders.load_ssh_private_key(data, password=None),
        )
        return cls(_load(path, kinds, _cryptography(_KEYS).Ed25519PrivateKey, "private", "sign"))

    def sign(self, document: Mapping[str, Any]) -> dict[str, str]:
        """The value of the document's `signature`."""
        raw = self._key.public_key().public_bytes_raw()
        return {
            "algorithm": "ed25519",
            "key": fingerprint(raw),
            "value": base64.b64encode(self._key.sign(_signed(document))).decode(),
        }


def check(document: Mapping[str, Any], trusted: Sequence[Path]) -> str:
    """Fingerprint of the trusted key that signed the document.

    Raises GateError where none of them did, UserError for a file that is no public key.
    """
    keys = {fingerprint(key.public_bytes_raw()): key for key in map(_public_key, trusted)}
    signature = document.get("signature")
    if not isinstance(signature, Mapping):
        raise GateError(f"it is not signed, and only what {_names(keys)} signed is trusted")
    signer = signature.get("key")
    if signature.get("algorithm") != "ed25519" or not isinstance(signer, str) or signer not in keys:
        raise GateError(f"it is signed by {signer}, and only what {_names(keys)} signed is trusted")
    invalid = _cryptography("cryptography.exceptions").InvalidSignature
    try:
        value = base64.b64decode(str(signature.get("value")), validate=True)
        keys[signer].verify(value, _signed(document))
    except (invalid, ValueError):  # no base64, or no ASCII
        raise GateError(f"its signature by {signer} does not hold: it was changed after signing") from None
    return signer


def signed_by(document: Mapping[str, Any]) -> str | None:
    """The key that a document says signed it, unchecked; None where it has no signature."""
    signature = document.get("signature")
    return str(signature.get("key")) if isinstance(signature, Mapping) else None


def fingerprint(raw: bytes) -> str:
    """OpenSSH's fingerprint of a raw public key (32 bytes)."""
    wire = b"".join(len(part).to_bytes(4, "big") + part for part in (b"ssh-ed25519", raw))
    return "SHA256:" + base64.b64encode(hashlib.sha256(wire).digest()).decode().rstrip("=")


def _signed(document: Mapping[str, Any]) -> bytes:
    bare = {key: value for key, value in document.items() if key != "signature"}
    return json.dumps(bare, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _public_key(path: Path) -> Ed25519PublicKey:
    loaders = _cryptography(_LOADERS)
    kinds = (loaders.load_pem_public_key, loaders.load_ssh_public_key)
    key: Ed25519PublicKey = _load(path, kinds, _cryptography(_KEYS).Ed25519PublicKey, "public", "trust")
    return key


def _load(
    path: Path, kinds: Sequence[Callable[[bytes], Any]], wanted: type[_T], sort: str, option: str
) -> _T:
    """The first of several readings of a file that gives a key of the wanted type."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"the key {path} cannot be read: {error.strerror}", option) from error
    unsupported = _cryptography("cryptography.exceptions").UnsupportedAlgorithm
    for read in kinds:
        try:
            key = read(data)
        except (ValueError, TypeError, unsupported):  # another kind of file, or one that wants a password
            continue
        if isinstance(key, wanted):
            return key
    raise UserError(
        f"{path} holds no {sort} Ed25519 key without a password: make a pair with `openssl genpkey "
        "-algorithm ed25519 -out key.pem` and `openssl pkey -in key.pem -pubout -out key.pub`",
        option,
    )


def _names(keys: Mapping[str, object]) -> str:
    return " or ".join(keys)


def _cryptography(module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise UserError("signatures need the package cryptography: pip install 'qinfer[sign]'") from error
