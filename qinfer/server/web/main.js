"use strict";
/* Which view is shown, and who answers. */
(() => {
  const { byId, problem } = Dom;
  const views = { "#chat": byId("chat-view"), "#live": byId("live-view") };

  function route() {
    const wanted = location.hash || "#chat";
    if (!(wanted in views)) return; // the skip link's
    for (const [hash, view] of Object.entries(views)) view.hidden = hash !== wanted;
    for (const link of document.querySelectorAll("nav a")) {
      if (link.hash === wanted) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    document.title = wanted === "#live" ? "Live – qinfer" : "Chat – qinfer";
  }

  let refused = false;

  async function greet() {
    try {
      const health = await Api.get("/health");
      byId("served-model").textContent = health.model;
      const badge = byId("gate-badge");
      badge.textContent = `gate: ${health.gate.state}`;
      badge.title = health.gate.line;
      badge.classList.add(health.gate.state);
      badge.hidden = false;
      const { data } = await Api.get("/v1/models");
      Settings.offer(data.map(({ id }) => id));
      if (refused) problem(byId("problem"), ""); // but not what a question has met meanwhile
      refused = false;
    } catch (error) {
      refused = true;
      const key = error.status === 401;
      problem(byId("problem"), key ? "This server wants an API key: type it under Settings." : `The server does not answer: ${error.message}.`);
      if (key) byId("settings").open = true;
    }
  }

  const wide = window.matchMedia("(min-width: 64.01rem)");
  function unfold() {
    for (const id of ["conversations", "settings"]) byId(id).open = wide.matches;
  }

  wide.addEventListener("change", unfold);
  unfold();
  window.addEventListener("hashchange", route);
  route();
  Settings.start();
  byId("set-key").addEventListener("change", greet);
  Chat.start();
  Live.start();
  greet();
})();
