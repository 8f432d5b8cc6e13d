"""`qinfer eval` on tiny models: tasks, a budget, several candidates, one model alone, reports."""

import json
import math
import shlex
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from qinfer import choice, env, jobs
from qinfer.evals import rules, tasks_by_rule, thresholds
from qinfer.evals.tasks_by_rule import RuleTask
from qinfer.testing import tiny_model


def favourite(draw):
    """A question whose answer a tiny random model finds likelier than what is never said."""
    return rules.Question(f"{draw.number(0, 9)}", "a", ("\x00\x01\x02\x03",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("eval")


@pytest.fixture(scope="module")
def source(folder):
    return tiny_model("llama", folder / "source", dtype="bfloat16")


@pytest.fixture(scope="module")
def candidates(source, folder):
    for scheme in ("w8a16-int8", "w8a8-fp8"):
        jobs.quantize(str(source), folder / scheme, scheme=scheme, gate=False, progress=False)
    return folder / "w8a16-int8", folder / "w8a8-fp8"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Little text, limits for a random model, a task that one can answer, and little to be timed."""
    monkeypatch.setitem(thresholds.PROFILES, "quick", thresholds.Profile(2048, 3.0))
    easy = RuleTask("builtin_easy", "choice", 200, favourite)
    monkeypatch.setattr(tasks_by_rule, "_TASKS", (easy, *tasks_by_rule._TASKS))
    monkeypatch.setattr(tasks_by_rule, "NAMES", ("builtin_easy", *tasks_by_rule.NAMES))
    monkeypatch.setattr(choice, "TOKENS", 4)


def measures(document):
    return {measure["name"]: measure for measure in document["measures"]}


def test_tasks_are_judged_beside_the_text_and_the_command_says_how(qinfer, source, candidates, tmp_path):
    model = candidates[0]
    command = ("eval", model, "--against", source, "--profile", "quick", "--tasks", "builtin_easy")
    code, text, err = qinfer(*command, "--limit", 192, "--report", tmp_path / "report", "--json")
    document = json.loads(text)
    assert code == 0, (text, err)
    recovery = measures(document)["recovery on tasks"]
    assert (recovery["verdict"], recovery["bound"]) == ("PASS", "at least")
    assert recovery["limit"] == pytest.approx(0.85)  # three times what the class may lose
    (task,) = document["evidence"]["tasks"]
    assert (task["task"], task["items"], task["chance"]) == ("builtin_easy", 192, 0.5)
    assert task["source"] > 0.9
    assert [one["done"] for one in document["evidence"]["spent"]][1] == 192
    assert sorted(path.suffix for path in tmp_path.glob("report.*")) == [".html", ".json", ".md"]
    assert "moved" in json.loads((tmp_path / "report.json").read_text())["examples"]
    assert (model / "qinfer_gate.html").read_text().startswith("<!doctype html>")

    again = shlex.split(document["settings"]["command"])[1:]
    assert again[again.index("--tasks") + 1] == "builtin_easy"
    repeated = json.loads(qinfer(*again, "--json").stdout)
    assert repeated["measures"] == document["measures"]


def test_a_task_that_says_nothing_is_no_pass(qinfer, source, candidates):
    command = ("eval", candidates[0], "--against", source, "--profile", "quick")
    code, text, _ = qinfer(*command, "--tasks", "builtin_copying", "--limit", 32)
    assert code == 1
    assert text.startswith("UNDECIDED")
    assert "tasks: 32 of 32 questions; the source is no better than chance on any of them" in text
    assert qinfer(*command, "--tasks", "none").code == 0


def test_a_budget_ends_early_where_all_is_decided(qinfer, source, candidates, monkeypatch):
    monkeypatch.setitem(thresholds.PROFILES, "quick", thresholds.Profile(6144, 3.0))
    command = ("eval", candidates[0], "--against", source, "--profile", "quick", "--tasks", "builtin_easy")
    code, text, _ = qinfer(*command, "--budget", "10m", "--json")
    document = json.loads(text)
    text_spent, tasks_spent = document["evidence"]["spent"]
    assert code == 0
    assert document["verdict"] == "PASS"
    assert text_spent["done"] < text_spent["size"]
    assert text_spent["confidence"] == measures(document)["mean KL"]["confidence"] == 0.99
    assert 0 < tasks_spent["done"] <= tasks_spent["size"] == 200
    assert document["settings"]["command"].endswith("--budget 600s")

    short = json.loads(qinfer(*command, "--budget", "0.001s", "--fresh", "--json").stdout)
    assert short["verdict"] == "UNDECIDED"
    assert any(line.startswith("tasks: 0 of 200 questions") for line in short["reasons"])


def test_several_are_put_side_by_side_and_one_that_fails_makes_1(qinfer, source, candidates, tmp_path):
    command = (
        "eval",
        *candidates,
        "--against",
        source,
        "--profile",
        "quick",
        "--report",
        tmp_path / "choice",
    )
    code, text, err = qinfer(*command, "--json")
    assert code == 0, err
    document = json.loads(text)
    assert document["quality"] == "top-1 agreement"
    assert [option["name"] for option in document["options"]] == [str(path) for path in candidates]
    assert all(option["tokens_per_second"] > 0 for option in document["options"])
    sizes = [option["bytes"] for option in document["options"]]
    assert max(sizes) < document["source"]["bytes"]
    assert any(option["worth_choosing"] for option in document["options"])
    assert sorted(path.suffix for path in tmp_path.glob("choice.*")) == [".html", ".json", ".md"]
    assert all((path / "qinfer_gate.json").exists() for path in candidates)

    other = tiny_model("llama", tmp_path / "other", dtype="bfloat16", seed=1)
    code, text, _ = qinfer("eval", candidates[0], other, "--against", source, "--profile", "quick")
    assert code == 1
    lines = text.splitlines()
    assert [line.split()[-1] for line in lines[2:4]] == ["PASS", "FAIL"]
    assert lines[-1] == f"worth choosing: {candidates[0]}"


def with_nan(model, folder):
    """A copy with one weight that is no number."""
    copy = Path(shutil.copytree(model, folder))
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"][3] = math.nan
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_e10_what_is_no_number_or_nothing_at_all_never_makes_0(qinfer, source, candidates, tmp_path):
    model, options = candidates[0], ("--profile", "quick")
    for candidate, against in (
        (with_nan(model, tmp_path / "candidate"), source),
        (model, with_nan(source, tmp_path / "source")),
    ):
        code, text, err = qinfer("eval", candidate, "--against", against, *options)
        assert (code, text) == (2, "")
        assert "model.layers.1.input_layernorm.weight" in err.splitlines()[-1]
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    code, text, _ = qinfer("eval", model, "--against", source, *options, "--text", empty)
    assert code == 1
    assert text.startswith("UNDECIDED")


def test_e10_a_kept_baseline_with_a_nan_fails(qinfer, source, candidates):
    command = ("eval", candidates[0], "--against", source, "--profile", "quick", "--json")
    assert qinfer(*command).code == 0
    spoiled = 0
    for entry in env.results_dir().glob("??/*"):
        tensors = load_file(entry)
        if "hidden" not in tensors:  # the candidate's scores, which would not be made again
            entry.unlink()
            continue
        tensors["hidden"][-1, 0] = math.nan
        save_file(tensors, entry)
        spoiled += 1
    assert spoiled
    code, text, _ = qinfer(*command)
    document = json.loads(text)
    assert (code, document["verdict"]) == (1, "FAIL")
    assert document["reasons"][0].startswith("positions without a number")


def test_one_model_alone_on_tasks(qinfer, source, tmp_path):
    rows = [{"query": f"{i} and", "choices": ["x", "y"], "gold": 0} for i in range(5)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = f"builtin_easy,{tmp_path / 'own.jsonl'}"
    code, text, err = qinfer("eval", source, "--tasks", tasks, "--limit", 4, "--json")
    assert code == 0, err
    scores = {(one["task"], one["metric"]): one for one in json.loads(text)["scores"]}
    assert set(scores) == {("builtin_easy", "acc"), ("own", "acc"), ("own", "acc_norm")}
    assert scores["own", "acc"]["items"] == scores["builtin_easy", "acc"]["items"] == 4
    assert scores["own", "acc"]["value"] in (0, 0.25, 0.5, 0.75, 1)
    code, text, _ = qinfer("eval", source, "--tasks", "builtin_easy", "--limit", 4)
    assert text.splitlines()[0].split() == ["task", "items", "shots", "metric", "value"]
    assert text.splitlines()[1].split()[:4] == ["builtin_easy", "4", "0", "acc"]


@pytest.mark.parametrize("against", [(), ("--against", "nowhere/at-all")])
def test_a_broken_task_file_is_told_before_a_model_is_looked_for(qinfer, tmp_path, against):
    broken = tmp_path / "own.jsonl"
    broken.write_text('{"query": "a", "choices": ["x", "y"], "gold": 0}\n{"query": "a", "choi\n')
    code, text, err = qinfer("eval", "nowhere/at-all", *against, "--tasks", broken)
    assert (code, text, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"qinfer: {broken}, line 2 is no JSON: Unterminated string")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("{source}", "{source}"), "several models are compared with their source"),
        (("{source}", "{source}", "--against", "{source}"), "two or more different models"),
        (("{source}", "--against", "{source}", "--budget", "soon"), "a budget is a time such as 90s"),
        (("{source}", "--against", "{source}", "--limit", "3"), "limit is for tasks"),
        (("{source}", "--against", "{source}", "--tasks", "builtin", "--limit", "0"), "limit"),
        (("{source}", "--tasks", "nowhere.jsonl"), "there is no task file nowhere.jsonl"),
        (("{source}", "--tasks", "none"), "name the tasks to ask"),
        (("{source}", "--perplexity", "x", "--tasks", "builtin"), "--perplexity is of one model alone"),
    ],
)
def test_what_does_not_go_together_is_one_line(qinfer, source, options, said):
    code, text, err = qinfer("eval", *(option.format(source=source) for option in options))
    assert (code, text) == (2, "")
    assert said in err
    assert err.count("\n") == 1
