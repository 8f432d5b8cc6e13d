"""The whole loop by command line on a tiny model: quantize, inspect, generate; fail the gate, be refused."""

import json

import pytest

from qinfer.evals import thresholds
from qinfer.testing import tiny_model


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("loop") / "source", dtype="bfloat16")


@pytest.fixture(autouse=True)
def quick_profile(monkeypatch):
    """An eighth of the text, and limits for a random model, whose two best tokens are always close."""
    monkeypatch.setitem(thresholds.PROFILES, "quick", thresholds.Profile(2048, 3.0))


def test_quantize_judge_inspect_generate_and_refuse(qinfer, source):
    out = source.parent / "small"
    arguments = ("quantize", source, "--scheme", "w8a8-fp8", "--out", out, "--profile", "quick")
    code, text, err = qinfer(*arguments, "--json")
    assert code == 0, err
    document = json.loads(text)
    assert document["out"] == str(out)
    assert document["gate"]["verdict"] == "PASS"
    assert document["report"]["scheme"] == "w8a8-fp8"
    assert "candidate:" in err  # progress is on stderr

    gated = json.loads(qinfer("inspect", out, "--json").stdout)["gate"]
    assert (gated["state"], gated["verdict"]) == ("passed", "PASS")
    assert json.loads(qinfer("generate", out, "-p", "hi", "--json").stdout)["gate"]["state"] == "passed"

    # a second run does not write over the first unless it is told to
    code, text, err = qinfer(*arguments)
    assert (code, text) == (2, "")
    assert "not empty" in err

    # judged against another model it fails, and the failure is what serving then finds
    other = tiny_model("llama", source.parent / "other", dtype="bfloat16", seed=1)
    code, text, _ = qinfer("eval", out, "--against", other, "--profile", "quick")
    assert code == 1
    assert "FAIL" in text
    code, text, err = qinfer("generate", out, "-p", "hi")
    assert (code, text) == (1, "")
    assert "is FAIL (mean KL" in err
    assert "qinfer eval" not in err  # which would find the same
    assert err.count("\n") == 1
    code, text, _ = qinfer("generate", out, "-p", "hi", "--allow-ungated", "--json")
    assert (code, json.loads(text)["gate"]["state"]) == (0, "failed")

    # and a verdict against its own source lets it through again
    code, text, _ = qinfer("eval", out, "--against", source, "--profile", "quick", "--json")
    assert (code, json.loads(text)["verdict"]) == (0, "PASS")
    assert qinfer("generate", out, "-p", "hi").code == 0


def test_quantize_without_the_gate_leaves_no_verdict(qinfer, source):
    out = source.parent / "ungated"
    options = ("--scheme", "w4a16", "--method", "rtn", "--group-size", 32, "--sym", "--no-gate")
    code, text, _ = qinfer("quantize", source, "--out", out, *options)
    assert code == 0
    assert "not judged" in text
    document = json.loads(qinfer("inspect", out, "--json").stdout)
    assert {row["scheme"] for row in document["groups"][:-1]} == {"w4a16 g32 sym"}
    assert document["gate"]["state"] == "refused"
    assert qinfer("generate", out, "-p", "hi").code == 1


def test_serving_without_a_verdict_is_told_once(qinfer, source, tmp_path, caplog):
    """By the log's warning alone; a verdict that is none to warn of is told by the command itself."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "hi", "max_tokens": 1}\n')
    files = ("-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "--overwrite")
    generate, batch = ("generate", "-p", "hi", "--max-tokens", 1), ("batch", *files)
    out = tmp_path / "ungated"
    assert qinfer("quantize", source, "--out", out, "--scheme", "w8a16-int8", "--no-gate").code == 0
    for command, *options in (generate, batch):
        caplog.clear()
        code, _, err = qinfer(command, out, *options, "--allow-ungated")
        assert code == 0
        assert (caplog.text + err).count("served without a valid verdict of the gate") == 1
        code, _, err = qinfer(command, source, *options)
        assert (code, err.count("dense weights: no verdict needed")) == (0, 1)


def test_perplexity_of_one_model(qinfer, source, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 30)
    options = ("--perplexity", text, "--window", 64, "--windows", 3, "--json")
    code, out, _ = qinfer("eval", source, *options)
    assert code == 0
    document = json.loads(out)
    assert document["settings"]["windows"] == 3
    assert document["settings"]["window"] == 64


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("quantize", "{source}", "--out", "{new}", "--scheme", "w3a3"), "w3a3"),
        (("quantize", "{source}", "--out", "{new}", "--scheme", "int8", "--group-size", 64), "group_size"),
        (("quantize", "{source}", "--out", "{source}", "--scheme", "fp8"), "source itself"),
        (("quantize", "{source}", "--out", "{new}", "--profile", "easy"), "unknown profile 'easy'"),
        (("quantize", "{source}", "--out", "{new}", "--calibration", "absent.txt"), "absent.txt"),
        (
            ("quantize", "{source}", "--out", "{new}", "--scheme", "fp8", "--calibration", "/absent.txt"),
            "cannot read the calibration file '/absent.txt': No such file",
        ),
        (("quantize", "no/such/model", "--out", "{new}", "--calibration", "/absent.txt"), "/absent.txt"),
        (("quantize", "no/such/model", "--out", "{new}"), "there is no folder"),
        (("quantize", "", "--out", "{new}"), "model must be a name, not ''"),
        (("quantize", "{source}", "--out", ""), "out must name a folder to write, not ''"),
        (
            ("quantize", "{source}", "--out", "/proc/x"),
            "/proc/x cannot be written (No such file or directory)",
        ),
        (("quantize", "{source}", "--out", "/dev/null"), "/dev/null is a file"),
        (
            ("quantize", "{source}", "--out", "/dev/null/x/y"),
            "/dev/null/x/y cannot be written (Not a directory)",
        ),
        (("quantize", "{source}", "--out", "{new}" + "x" * 300), "(File name too long): choose another"),
        (("quantize", "{source}", "--out", "{new}/deep", "--calibration", "absent.txt"), "absent.txt"),
        (("eval", "{source}"), "--against REF"),
        (("eval", "{source}", "--against", "{source}", "--perplexity", "x"), "--against REF"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(qinfer, source, tmp_path, arguments, said):
    new = tmp_path / "new"
    code, out, err = qinfer(*(str(a).format(source=source, new=new) for a in arguments))
    assert (code, out) == (2, "")
    assert said in err.splitlines()[-1]
    assert not new.exists()
    assert not new.with_name("new.partial").exists()
