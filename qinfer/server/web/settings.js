"use strict";
/* The settings' form: what is empty is not sent, so that the server's defaults hold. */
const Settings = (() => {
  const { byId, make } = Dom;
  /* name in the API: what a person calls it, and the input's bounds */
  const SAMPLING = {
    temperature: ["Temperature", { min: 0, max: 2, step: 0.05 }],
    top_p: ["Top p", { min: 0.01, max: 1, step: 0.01 }],
    top_k: ["Top k", { min: 0, step: 1 }],
    min_p: ["Min p", { min: 0, max: 1, step: 0.01 }],
    max_completion_tokens: ["Longest answer", { min: 1, step: 1 }],
    seed: ["Seed", { min: 0, step: 1 }],
    repetition_penalty: ["Repetition", { min: 0.05, step: 0.05 }],
    frequency_penalty: ["Frequency", { min: -2, max: 2, step: 0.1 }],
    presence_penalty: ["Presence", { min: -2, max: 2, step: 0.1 }],
  };
  const form = byId("settings-form");

  function start() {
    for (const [name, [label, bounds]] of Object.entries(SAMPLING)) {
      const input = make("input", { id: `set-${name}`, name, type: "number", ...bounds });
      byId("sampling").append(make("div", {}, make("label", { for: input.id }, label), input));
    }
    fill(Store.settings());
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", save);
    byId("set-key").value = Store.key();
    byId("set-key").addEventListener("change", (event) => Store.saveKey(event.target.value));
    byId("reset-settings").addEventListener("click", () => {
      fill({});
      save();
    });
  }

  function fill(values) {
    for (const field of form.elements) {
      if (field.name && field.name !== "model") field.value = values[field.name] ?? "";
    }
  }

  function save() {
    const named = [...form.elements].filter((field) => field.name && field.value !== "");
    Store.saveSettings(Object.fromEntries(named.map((field) => [field.name, field.value])));
  }

  /* The models that the server has, the chosen one again where it is still there. */
  function offer(names) {
    const select = byId("set-model");
    const chosen = Store.settings().model;
    select.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
    if (names.includes(chosen)) select.value = chosen;
  }

  /* Which field is out of bounds, in words, or "". */
  function complaint() {
    const wrong = [...form.elements].find((field) => field.willValidate && !field.checkValidity());
    return wrong ? `${SAMPLING[wrong.name][0]}: ${wrong.validationMessage}` : "";
  }

  /* The fields of a request, but for its messages. */
  function request() {
    const body = {};
    for (const name of Object.keys(SAMPLING)) {
      const { value } = form.elements[name];
      if (value !== "") body[name] = Number(value);
    }
    const stop = form.elements.stop.value.split("\n").filter((text) => text);
    if (stop.length) body.stop = stop;
    if (form.elements.model.value) body.model = form.elements.model.value;
    return body;
  }

  const system = () => form.elements.system.value.trim();

  return { start, offer, complaint, request, system };
})();
