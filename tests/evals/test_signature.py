"""A signature holds for the document it was made of, by the key that made it, and for nothing else."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from qinfer.errors import GateError, UserError
from qinfer.evals import signature
from qinfer.evals.signature import Signer

DOCUMENT = {"verdict": "PASS", "measures": [{"value": 0.1 + 0.2, "low": None}], "text": "Ünïcode", "n": 3}

# RFC 8032, section 7.1, test 2: a key whose signature is known
SECRET = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
FINGERPRINT = "SHA256:F34nin7tcaYH6WR5LSWSfj6weFBPfBpuyUUoPFP9YjA"
PUBLIC = bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")


def test_a_signed_document_is_trusted_after_any_way_through_json(keys, signer: Signer) -> None:
    signed = {**DOCUMENT, "signature": signer.sign(DOCUMENT)}
    for text in (json.dumps(signed), json.dumps(signed, indent=3, sort_keys=True, ensure_ascii=False)):
        assert signature.check(json.loads(text), [keys.public]) == signed["signature"]["key"]


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "FAIL"},
        {"n": 4},
        {"more": 1},
        {"measures": [{"value": 0.3, "low": None}]},
    ],
)
def test_any_change_breaks_it(keys, signer: Signer, change: dict[str, object]) -> None:
    signed = {**DOCUMENT, "signature": signer.sign(DOCUMENT), **change}
    with pytest.raises(GateError, match="does not hold: it was changed after signing"):
        signature.check(signed, [keys.public])


def test_only_trusted_keys_count(keys, signer: Signer, tmp_path: Path) -> None:
    other = Ed25519PrivateKey.generate().public_key()
    file = tmp_path / "other.pub"
    form = (serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    file.write_bytes(other.public_bytes(*form) + b" builds@example.org\n")
    signed = {**DOCUMENT, "signature": signer.sign(DOCUMENT)}
    with pytest.raises(GateError, match=r"it is signed by SHA256:.*only what SHA256:.* signed is trusted"):
        signature.check(signed, [file])
    assert signature.check(signed, [file, keys.public]) == signed["signature"]["key"]
    with pytest.raises(GateError, match="it is not signed, and only what"):
        signature.check(DOCUMENT, [keys.public])


@pytest.mark.parametrize("value", ["", "not base64!", "é", base64.b64encode(bytes(64)).decode(), None])
def test_a_made_up_signature_is_refused(keys, signer: Signer, value: object) -> None:
    made_up = {**signer.sign(DOCUMENT), "value": value}
    with pytest.raises(GateError, match="does not hold"):
        signature.check({**DOCUMENT, "signature": made_up}, [keys.public])
    for block in ({"algorithm": "ed25519"}, {**made_up, "algorithm": "none"}, [], "yes"):
        with pytest.raises(GateError, match="signed"):
            signature.check({**DOCUMENT, "signature": block}, [keys.public])


def test_keys_are_those_of_openssl_and_openssh(tmp_path: Path) -> None:
    """RFC 8032's key in every form, and OpenSSH's name for it (from `ssh-keygen -l`)."""
    key = Ed25519PrivateKey.from_private_bytes(SECRET)
    assert (
        key.sign(b"\x72").hex().startswith("92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da")
    )
    plain = serialization.NoEncryption()
    pem, ssh = serialization.Encoding.PEM, serialization.Encoding.OpenSSH
    privates = (
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain),
        key.private_bytes(pem, serialization.PrivateFormat.OpenSSH, plain),
    )
    publics = (
        key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo),
        key.public_key().public_bytes(ssh, serialization.PublicFormat.OpenSSH),
    )
    for private in privates:
        for public in publics:
            (tmp_path / "private").write_bytes(private)
            (tmp_path / "public").write_bytes(public)
            signed = {**DOCUMENT, "signature": Signer.load(tmp_path / "private").sign(DOCUMENT)}
            assert signature.check(signed, [tmp_path / "public"]) == signature.fingerprint(PUBLIC)
    assert signature.fingerprint(PUBLIC) == FINGERPRINT


def test_what_is_no_key_is_one_line(keys, tmp_path: Path) -> None:
    curve = generate_private_key(SECP256R1())
    file = tmp_path / "key"
    locked = serialization.BestAvailableEncryption(b"secret")
    pkcs8 = serialization.PrivateFormat.PKCS8
    bad = (
        b"",
        b"hello",
        keys.public.read_bytes(),
        curve.private_bytes(serialization.Encoding.PEM, pkcs8, serialization.NoEncryption()),
        Ed25519PrivateKey.generate().private_bytes(serialization.Encoding.PEM, pkcs8, locked),
    )
    for data in bad:
        file.write_bytes(data)
        with pytest.raises(UserError, match="no private Ed25519 key without a password: make a pair"):
            Signer.load(file)
    with pytest.raises(UserError, match="no public Ed25519 key"):
        signature.check({}, [keys.private])
    with pytest.raises(UserError, match="cannot be read: No such file"):
        Signer.load(tmp_path / "missing")


def test_the_missing_package_is_named(keys, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(signature, "import_module", missing)
    with pytest.raises(UserError, match=r"pip install 'qinfer\[sign\]'"):
        Signer.load(keys.private)
