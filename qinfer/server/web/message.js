"use strict";
/* One message of a conversation on the page. */
const Message = (() => {
  const { make, seconds, rate } = Dom;
  const ENDS = { length: "cut at the longest answer", full: "cut: no more room", stopped: "stopped", failed: "broken off" };

  /* Its element; `acts` are the buttons under it, by label. */
  function element(message, acts = {}) {
    const who = message.role === "user" ? "You" : "Model";
    const body = make("div", { class: "body" });
    const buttons = Object.entries(acts).map(([label, onclick]) => make("button", { type: "button", onclick }, label));
    const under = make("div", { class: "under" }, make("span", { class: "note" }), ...buttons);
    const found = make("article", { class: `message ${message.role}`, "aria-label": who }, make("h3", {}, who), body, under);
    update(found, message);
    return found;
  }

  function update(found, message) {
    const body = found.querySelector(".body");
    if (message.role === "user") body.textContent = message.content;
    else body.replaceChildren(Markdown.render(message.content));
    found.querySelector(".note").textContent = note(message.note);
  }

  /* "42 tokens · 31 tokens/s · first token after 180 ms" */
  function note(measured) {
    if (!measured) return "";
    const parts = [];
    if (measured.tokens) parts.push(`${measured.tokens} ${measured.tokens === 1 ? "token" : "tokens"}`);
    if (measured.speed) parts.push(`${rate(measured.speed)} tokens/s`);
    if (measured.first) parts.push(`first token after ${seconds(measured.first)}`);
    if (ENDS[measured.end]) parts.push(ENDS[measured.end]);
    return parts.join(" · ");
  }

  /* The message's text in a field in its place; `save` gets the new text, `cancel` nothing. */
  function edit(found, message, save, cancel) {
    const field = make("textarea", { rows: 3, "aria-label": "Your message" });
    field.value = message.content;
    const keys = (event) => {
      if (event.key === "Escape") cancel();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        save(field.value);
      }
    };
    field.addEventListener("keydown", keys);
    const buttons = [
      make("button", { type: "button", class: "primary", onclick: () => save(field.value) }, "Send again"),
      make("button", { type: "button", onclick: cancel }, "Cancel"),
    ];
    found.querySelector(".body").replaceChildren(field);
    found.querySelector(".under").replaceChildren(...buttons);
    field.focus();
  }

  return { element, update, edit };
})();
