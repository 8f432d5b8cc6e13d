"use strict";
/* The live view: asks for /qinfer/stats once a second while it is looked at, and draws what it says. */
const Live = (() => {
  const { byId, make, problem, seconds, bytes, rate, whole, percent } = Dom;
  const SPAN = 120; // seconds of history
  const history = []; // {time, generation, prompt, running, waiting}
  let timer = null;

  function start() {
    document.addEventListener("visibilitychange", watch);
    window.addEventListener("hashchange", watch);
    watch();
  }

  const looked = () => !byId("live-view").hidden && document.visibilityState === "visible";

  function watch() {
    if (looked() && timer === null) tick();
  }

  async function tick() {
    timer = setTimeout(() => {}, 0);
    try {
      const stats = await Api.get("/qinfer/stats");
      remember(stats);
      show(stats);
      problem(byId("live-problem"), stats.state === "ready" ? "" : `The engine is ${stats.state}.`);
    } catch (error) {
      const key = error.status === 401 ? " Type the API key under Chat, Settings." : "";
      problem(byId("live-problem"), `No numbers from the server: ${error.message}.${key}`);
    }
    timer = looked() ? setTimeout(tick, 1000) : null;
  }

  function remember({ time, tokens, requests }) {
    if (history.at(-1)?.generation > tokens.generation) history.length = 0; // another server has taken its place
    history.push({ time, generation: tokens.generation, prompt: tokens.prompt, running: requests.running, waiting: requests.waiting });
    while (history[0].time < time - SPAN) history.shift();
  }

  /* Tokens a second between the newest moment and the one `window` seconds before it. */
  function speed(kind, window) {
    const newest = history.at(-1);
    const before = history.findLast((one) => one.time <= newest.time - window) ?? history[0];
    return newest.time > before.time ? (newest[kind] - before[kind]) / (newest.time - before.time) : 0;
  }

  function show(stats) {
    const { requests, kv, latency, model } = stats;
    tiles({
      Running: whole(requests.running),
      Waiting: whole(requests.waiting),
      "Output tokens/s": rate(speed("generation", 3)),
      "Prompt tokens/s": rate(speed("prompt", 3)),
      "First token, p50": seconds(latency.first_token.p50),
      "Per token, p50": seconds(latency.per_token.p50),
      "KV pages in use": percent(kv.usage),
      Finished: whole(Object.values(requests.finished).reduce((sum, count) => sum + count, 0)),
    });
    charts(stats.time);
    latencies(latency, stats.latency_requests);
    gate(model);
    pages(kv.pages);
    ledger(stats.ledger);
    byId("recent").replaceChildren(...stats.recent.map(recent));
  }

  function tiles(values) {
    const all = Object.entries(values).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
    byId("tiles").replaceChildren(...all);
  }

  function charts(now) {
    const speeds = history.slice(1).map((one, i) => {
      const before = history[i];
      return [now - one.time, (one.generation - before.generation) / Math.max(0.001, one.time - before.time)];
    });
    Charts.lines(byId("chart-speed"), [{ name: "tokens/s", paint: "held", points: speeds }], SPAN, "Output tokens per second");
    const of = (kind) => history.map((one) => [now - one.time, one[kind]]);
    const both = [
      { name: "running", paint: "held", points: of("running") },
      { name: "waiting", paint: "shared", points: of("waiting") },
    ];
    Charts.lines(byId("chart-requests"), both, SPAN, "Requests running and waiting");
  }

  function latencies(found, count) {
    const names = { first_token: "first token", per_token: "per token", request: "whole request" };
    const rows = Object.entries(names).map(([key, name]) =>
      make("tr", {}, make("th", { scope: "row" }, name), ...["p50", "p90", "p99"].map((q) => make("td", {}, seconds(found[key][q])))),
    );
    byId("latencies").replaceChildren(...rows);
    byId("latency-caption").textContent = count === 1 ? "of one request" : `of the last ${whole(count)} requests`;
  }

  function gate({ gate, facts, max_model_len: length }) {
    byId("gate-state").textContent = gate.state;
    byId("gate-state").className = `badge ${gate.state}`;
    byId("gate-line").textContent = gate.line;
    const named = { ...facts, "context": `${whole(length)} tokens` };
    const rows = Object.entries(named).filter(([, value]) => value);
    byId("facts").replaceChildren(...rows.flatMap(([name, value]) => [make("dt", {}, name.replaceAll("_", " ")), make("dd", {}, value)]));
  }

  const legend = (paint, text) => make("li", {}, make("span", { class: `swatch fill-${paint}` }), text);

  function pages(map) {
    if (!map) return;
    Charts.pages(byId("page-map"), map);
    const sum = (counts) => counts.reduce((total, count) => total + count, 0);
    const [held, shared, cached] = [sum(map.held), sum(map.shared), sum(map.cached)];
    byId("page-legend").replaceChildren(
      legend("held", `${whole(held)} of ${whole(map.num_pages)} pages held`),
      legend("shared", `${whole(shared)} of them by several sequences`),
      legend("cached", `${whole(cached)} free, with a known prefix`),
      legend("free", `${whole(map.num_pages - held - cached)} blank`),
    );
  }

  function ledger(sums) {
    const paints = { kv_pool: "held", weights: "shared", activations: "cached", graphs: "line", reserve: "free" };
    const names = { kv_pool: "KV pool", weights: "weights", activations: "activations", graphs: "graphs", reserve: "reserve" };
    const rows = Object.entries(names).map(([key, name]) =>
      make("tr", {}, make("th", { scope: "row" }, make("span", { class: `swatch fill-${paints[key]}` }), name), make("td", {}, bytes(sums[key]))),
    );
    byId("ledger").replaceChildren(...rows);
    Charts.bar(byId("ledger-bar"), Object.entries(paints).map(([key, paint]) => ({ paint, size: sums[key] })));
    const gain = sums.ratio ? `; against ${sums.unquantized.label} ${sums.ratio.toFixed(2)}×` : "";
    const many = sums.sequences === 1 ? "one sequence" : `${whole(sums.sequences)} sequences`;
    const room = `${whole(sums.tokens)} tokens, ${many} of ${whole(sums.max_model_len)}`;
    byId("ledger-line").textContent = `${sums.label} in ${bytes(sums.budget)}: room for ${room}${gain}`;
  }

  function recent(one) {
    const cells = [
      whole(one.prompt_tokens),
      whole(one.generation_tokens),
      seconds(one.first_token),
      one.per_token ? rate(1 / one.per_token) : "–",
      seconds(one.latency),
      one.reason,
    ];
    return make("tr", {}, make("th", { scope: "row" }, one.request_id.slice(-16)), ...cells.map((cell) => make("td", {}, cell)));
  }

  return { start };
})();
