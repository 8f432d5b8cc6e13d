"""`qinfer gate` says whether a checkpoint would be served now, and its exit code is what CI obeys."""

import copy
import json

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from qinfer.cli import gate
from qinfer.evals import certificate, thresholds
from qinfer.evals.coverage import Use
from qinfer.testing import tiny_model


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("gate") / "source", dtype="bfloat16")


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """A pair of files as `ssh-keygen -t ed25519` leaves them."""
    folder = tmp_path_factory.mktemp("keys")
    private, public = folder / "key", folder / "key.pub"
    key = Ed25519PrivateKey.generate()
    forms = (serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, *forms))
    form = serialization.PublicFormat.OpenSSH
    public.write_bytes(key.public_key().public_bytes(serialization.Encoding.OpenSSH, form))
    return private, public


@pytest.fixture(autouse=True)
def quick_profile(monkeypatch):
    monkeypatch.setitem(thresholds.PROFILES, "quick", thresholds.Profile(2048, 3.0))


def test_a_signed_verdict_from_measuring_to_serving(qinfer, source, keys, tmp_path):
    private, public = keys
    out = tmp_path / "small"
    quantize = ("quantize", source, "--scheme", "w8a16-int8", "--out", out, "--profile", "quick")
    assert qinfer(*quantize, "--sign", private, "--valid-days", 90).code == 0

    code, text, _ = qinfer("gate", out, "--trust", public)
    assert code == 0
    assert text.startswith("served: gate passed: mean KL")
    assert "verdict PASS, given 20" in text
    assert f"against: {source}" in text
    assert "void: a KV cache riskier than bfloat16" in text
    assert "void: after 20" in text
    assert "\nsigned by SHA256:" in text

    generated = qinfer("generate", out, "-p", "hi", "--max-tokens", 2, "--trust", public, "--json")
    assert json.loads(generated.stdout)["gate"]["state"] == "passed"

    riskier = qinfer("gate", out, "--kv-cache-dtype", "int8", "--json")
    document = json.loads(riskier.stdout)
    assert (riskier.code, document["state"]) == (1, "refused")
    assert "does not cover int8" in document["line"]
    assert document["certificate"]["verdict"] == "PASS"
    assert "hashes" not in document["certificate"]

    with (out / "config.json").open("a") as file:
        file.write("\n")
    code, text, _ = qinfer("gate", out)
    assert code == 1
    assert text.startswith(f"refused: the verdict on {out} is stale: config.json changed")
    code, text, err = qinfer("gate", out, "--sign", private)
    assert (code, text) == (1, "")
    assert "what has changed since is not signed" in err


def test_a_verdict_can_be_signed_later(qinfer, source, keys, tmp_path):
    private, public = keys
    out = tmp_path / "small"
    qinfer("quantize", source, "--scheme", "w8a16-int8", "--out", out, "--profile", "quick")
    refused = qinfer("gate", out, "--trust", public)
    assert refused.code == 1
    assert "it is not signed, and only what SHA256:" in refused.stdout
    code, text, err = qinfer("generate", out, "-p", "hi", "--trust", public)
    assert (code, text) == (1, "")
    assert "is not to be trusted" in err
    code, text, err = qinfer("serve", out, "--port", 0, "--trust", public)
    assert (code, text, err.count("\n")) == (1, "", 1)
    assert "is not to be trusted" in err
    assert qinfer("gate", out, "--sign", private, "--trust", public).code == 0
    assert qinfer("generate", out, "-p", "hi", "--max-tokens", 2, "--trust", public).code == 0


def test_a_dense_model_needs_none_and_a_quantized_one_does(qinfer, source, tmp_path):
    code, text, _ = qinfer("gate", source)
    assert (code, text) == (0, "served: dense weights: no verdict needed\n")
    out = tmp_path / "small"
    qinfer("quantize", source, "--scheme", "w8a16-int8", "--out", out, "--no-gate")
    code, text, _ = qinfer("gate", out)
    assert code == 1
    assert "has no verdict of the gate; get a verdict with `qinfer eval" in text
    assert text.count("\n") == 1


def test_what_cannot_be_asked_is_one_line(qinfer, source, keys, tmp_path):
    _, public = keys
    code, _, err = qinfer("gate", tmp_path / "nowhere")
    assert (code, err.count("\n")) == (2, 1)
    assert "is no folder" in err
    code, _, err = qinfer("eval", source, "--against", source, "--sign", public)
    assert (code, err.count("\n")) == (2, 1)
    assert "no private Ed25519 key" in err
    assert qinfer("gate", source, "--kv-cache-dtype", "int4").code == 2


def test_whatever_a_certificate_says_it_is_shown_or_refused_in_lines_of_print(qinfer, source, tmp_path):
    """Anybody may have written it: each part in turn is taken out, or is of another kind."""
    out = tmp_path / "small"
    qinfer("quantize", source, "--scheme", "w8a16-int8", "--out", out, "--profile", "quick")
    whole = certificate.read(out)
    whole["blame"] = {"line": "layer 1 is to blame", "culprit": "layer 1", "parts": []}
    whole["signature"] = {"algorithm": "ed25519", "key": "SHA256:x", "value": "eA=="}
    parts = [(name,) for name in whole]
    for name in ("settings", "expires", "blame", "signature", "hashes"):
        parts += [(name, key) for key in whole[name]]
    shown = 0
    for *path, last in parts:
        for value in (None, 1, "\x1b[31mred\nline", ["\x1b\r"], {}):
            document = copy.deepcopy(whole)
            part = document
            for name in path:
                part = part[name]
            part[last] = value
            (out / certificate.CERTIFICATE_NAME).write_text(json.dumps(document))
            told = gate.told(out, Use(), is_quantized=True)
            assert told["line"].isprintable()
            assert all(line.isprintable() for line in gate._text(told).split("\n"))
            shown += bool(told["certificate"])
    assert shown > 50
