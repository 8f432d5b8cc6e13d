"""deploy/grafana/qinfer.json: a real Prometheus scrapes a real server, and every query returns data."""

from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "qinfer.json").read_text())
PATIENCE = 120.0  # seconds
# what vLLM 0.33's dashboards ask for
VLLM_QUERIES = (
    *(
        f"histogram_quantile(0.9, sum by (le) (rate(vllm:{name}_bucket{{model_name='tiny'}}[20s])))"
        for name in (
            *("e2e_request_latency_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds"),
            *("request_time_per_output_token_seconds", "request_prompt_tokens", "request_generation_tokens"),
        )
    ),
    *(
        f"rate(vllm:{name}[20s])"
        for name in (
            *("request_queue_time_seconds_sum", "request_prefill_time_seconds_sum"),
            *("request_decode_time_seconds_sum", "request_max_num_generation_tokens_sum"),
            *("iteration_tokens_total_count", "prompt_tokens_total", "generation_tokens_total"),
        )
    ),
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    "sum by (finished_reason) (increase(vllm:request_success_total[20s]))",
    "vllm:cache_config_info",
    "sum by (reason) (vllm:num_requests_waiting_by_reason)",
    "rate(vllm:prefix_cache_hits_total[20s]) / rate(vllm:prefix_cache_queries_total[20s])",
    "sum by (source) (rate(vllm:prompt_tokens_by_source_total[20s]))",
    "rate(vllm:num_preemptions_total[20s])",
    "sum by (status) (rate(http_requests_total{handler='/v1/completions'}[20s]))",
    "histogram_quantile(0.9, sum by (le) (rate(http_request_duration_seconds_bucket[20s])))",
)


def queries() -> list[str]:
    """Of all panels, with the dashboard's variables as they are when it is opened."""
    chosen = {"model_name": ".*", "instance": ".*", "__rate_interval": "20s"}
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "custom":
            chosen[variable["name"]] = variable["current"]["value"]
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    return [re.sub(r"\$(\w+)", lambda name: chosen[name[1]], expression) for expression in found]


class Prometheus:
    """A running one, asked over HTTP."""

    def __init__(self, url: str) -> None:
        self.client = httpx.Client(base_url=url, timeout=30)

    def ask(self, query: str) -> list[float]:
        """The numbers of an instant query; NaN is no number."""
        answer = self.client.get("/api/v1/query", params={"query": query}).json()
        assert answer["status"] == "success", (query, answer)
        result = answer["data"]["result"]
        pairs = [result] if answer["data"]["resultType"] == "scalar" else [one["value"] for one in result]
        return [number for _, text in pairs if not math.isnan(number := float(text))]

    def wait(self, query: str, is_right: Callable[[list[float]], bool] = bool) -> list[float]:
        """The numbers, once they are right."""
        end = time.monotonic() + PATIENCE
        while not is_right(found := self.ask(query)):
            assert time.monotonic() < end, f"{query}: {found}"
            time.sleep(0.2)
        return found


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[str]:
    """`qinfer serve`: a process for the clients, a child of it for the engine."""
    command = [sys.executable, "-m", "qinfer", "serve", str(model_dir), "--served-model-name", "tiny"]
    command += ["--port", "0", "--memory", "1GiB", "--max-num-seqs", "4", "--json"]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline()]
            while lines[-1] not in ("}\n", ""):  # "": it ended
                lines.append(process.stdout.readline())
            yield str(json.loads("".join(lines))["url"])
        finally:
            process.terminate()
        assert process.wait(PATIENCE) == 0


@pytest.fixture(scope="module")
def prometheus(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """deploy/prometheus.yml, but for the target and how often it is scraped."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(DEPLOY / name) for name in config["rule_files"]]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [server.removeprefix("http://")]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    process = subprocess.Popen(
        ["prometheus", *options, f"--web.listen-address={address}", "--log.level=warn"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + PATIENCE
        while not _is_ready(f"http://{address}"):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait(60)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready").status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def traffic(url: str) -> Iterator[None]:
    """Inside, completions, streams and mistakes go on and on."""
    over = threading.Event()

    def send() -> None:
        with httpx.Client(base_url=url, timeout=PATIENCE) as client:
            while not over.wait(0.05):
                body = {"prompt": "The same beginning of every prompt", "max_tokens": 8, "ignore_eos": True}
                for more in ({}, {"n": 2}, {"stream": True}, {"max_tokens": -1}):
                    client.post("/v1/completions", json=body | more)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_every_query_returns_data(server: str, prometheus: Prometheus) -> None:
    assert len(queries()) > 50
    with traffic(server):
        prometheus.wait("qinfer_engine_steps_total", lambda found: sum(found) > 0)
        for query in (*queries(), *VLLM_QUERIES):
            prometheus.wait(query)
    tokens = httpx.get(f"{server}/qinfer/stats").json()["tokens"]
    for kind in ("prompt", "generation"):
        for name in (f"qinfer_{kind}_tokens_total", f"vllm:{kind}_tokens_total"):
            assert prometheus.wait(name, lambda found, kind=kind: found == [tokens[kind]])
    assert prometheus.ask("qinfer_requests_running") == [0]


def test_the_variables_find_the_server(server: str, prometheus: Prometheus) -> None:
    wanted = {"model_name": "tiny", "instance": server.removeprefix("http://")}
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()
            prometheus.wait(metric)
            answer = prometheus.client.get(f"/api/v1/label/{label}/values", params={"match[]": metric}).json()
            assert answer["data"] == [wanted.pop(variable["name"])]
    assert not wanted


def test_the_alerts_are_loaded_and_all_is_well(prometheus: Prometheus) -> None:
    prometheus.wait("up")
    (group,) = prometheus.client.get("/api/v1/rules").json()["data"]["groups"]
    names = {rule["name"]: rule["health"] for rule in group["rules"]}
    assert len(names) == 8
    end = time.monotonic() + PATIENCE
    while "unknown" in names.values():  # not evaluated yet
        assert time.monotonic() < end
        (group,) = prometheus.client.get("/api/v1/rules").json()["data"]["groups"]
        names = {rule["name"]: rule["health"] for rule in group["rules"]}
    assert set(names.values()) == {"ok"}


def test_the_limits_of_the_dashboard_are_bounds(server: str) -> None:
    bounds = {
        "slo_first_token": "time_to_first_token_seconds",
        "slo_per_token": "time_per_output_token_seconds",
    }
    text = httpx.get(f"{server}/metrics").text
    for variable in DASHBOARD["templating"]["list"]:
        if variable["name"] in bounds:
            for option in variable["options"]:
                name = bounds[variable["name"]]
                assert f'qinfer_{name}_bucket{{le="{option["value"]}",model_name="tiny"}}' in text


def test_every_panel_is_told_apart_and_explained() -> None:
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    for key in ("id", "title", "description"):
        assert len({panel[key] for panel in panels}) == len(panels)
    places = [tuple(panel["gridPos"][side] for side in "xywh") for panel in DASHBOARD["panels"]]
    cells = [(i, j) for x, y, w, h in places for i in range(x, x + w) for j in range(y, y + h)]
    assert len(cells) == len(set(cells))
    assert max(i for i, _ in cells) == 23
