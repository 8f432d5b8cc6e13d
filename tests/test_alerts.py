"""deploy/alerts.yml: each alert fires on what it is about and is silent on a server that does well."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

RULES = Path(__file__).resolve().parents[1] / "deploy" / "alerts.yml"


def first_tokens(*, slow: bool) -> dict[str, str]:
    """Twelve requests a minute; the slow half of them waits between 5 and 10 seconds."""
    counts = {"5.0": "0+6x30" if slow else "0+12x30", "10.0": "0+12x30", "+Inf": "0+12x30"}
    name = "qinfer_time_to_first_token_seconds_bucket"
    return {f'{name}{{le="{bound}"}}': values for bound, values in counts.items()}


# alert: (series of a server that does badly, of one that does well, the labels that it fires with)
ALERTS: dict[str, tuple[dict[str, str], dict[str, str], dict[str, str]]] = {
    "QinferDown": ({'up{job="qinfer"}': "0x20"}, {'up{job="qinfer"}': "1x20"}, {"job": "qinfer"}),
    "QinferNotReady": ({"qinfer_engine_ready": "0x20"}, {"qinfer_engine_ready": "1x20"}, {}),
    "QinferErrors": (
        {'qinfer_requests_finished_total{reason="error"}': "0+6x20"},
        {'qinfer_requests_finished_total{reason="error"}': "0x20"},
        {},
    ),
    "QinferRefuses": (
        {'qinfer_requests_rejected_total{reason="queue_full"}': "0+6x20"},
        {'qinfer_requests_rejected_total{reason="draining"}': "0+6x20"},
        {"reason": "queue_full"},
    ),
    "QinferSlowFirstToken": (first_tokens(slow=True), first_tokens(slow=False), {}),
    "QinferPreempts": (
        {"qinfer_preemptions_total": "0+12x30"},
        {"qinfer_preemptions_total": "0+3x30"},
        {},
    ),
    "QinferUngated": (
        {'qinfer_gate_state{state="failed"}': "1x20"},
        {'qinfer_gate_state{state="ungated"}': "0x20", 'qinfer_gate_state{state="passed"}': "1x20"},
        {"state": "failed"},
    ),
    "QinferSlowKernels": (
        {'qinfer_kernel_fallbacks_total{op="rms_norm",reason="odd"}': "0+1x30"},
        {'qinfer_kernel_fallbacks_total{op="rms_norm",reason="odd"}': "7x30"},
        {"op": "rms_norm", "reason": "odd"},
    ),
}


def with_instance(series: dict[str, str]) -> list[dict[str, str]]:
    found = []
    for name, values in series.items():
        metric, _, labels = name.partition("{")
        found.append({"series": f'{metric}{{instance="a:8000",{labels or "}"}', "values": values})
    return found


def scenario(alert: str, series: dict[str, str], labels: dict[str, str] | None) -> dict[str, Any]:
    """A unit test in promtool's form: after 19 minutes the alert fires with these labels, or not (None)."""
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    (rule,) = [rule for rule in group["rules"] if rule["alert"] == alert]
    firing = []
    if labels is not None:
        told = labels | {"instance": "a:8000"}
        summary = rule["annotations"]["summary"]
        for name, value in told.items():
            summary = summary.replace(f"{{{{ $labels.{name} }}}}", value)
        firing = [{"exp_labels": told | rule["labels"], "exp_annotations": {"summary": summary}}]
    test = {"eval_time": "19m", "alertname": alert, "exp_alerts": firing}
    return {"interval": "1m", "input_series": with_instance(series), "alert_rule_test": [test]}


def test_there_is_a_test_of_every_alert() -> None:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    assert [rule["alert"] for rule in group["rules"]] == list(ALERTS)


@pytest.mark.parametrize("alert", ALERTS)
def test_it_fires_when_it_should_and_only_then(alert: str, tmp_path: Path) -> None:
    bad, good, labels = ALERTS[alert]
    tests = [scenario(alert, bad, labels), scenario(alert, good, None)]
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    run = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr
