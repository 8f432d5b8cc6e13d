"use strict";
/* Elements, and numbers as people read them. Text becomes text nodes only: nothing of a model is ever markup. */
const Dom = (() => {
  const byId = (id) => document.getElementById(id);

  /* make("button", {class: "x", onclick: act}, "Do") : attributes by name, "on…" are listeners, null is left out. */
  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === null || value === undefined) continue;
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  }

  const SVG = "http://www.w3.org/2000/svg";
  function shape(tag, attributes, ...children) {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  function problem(element, message) {
    element.textContent = message;
    element.hidden = !message;
  }

  function seconds(value) {
    if (value === null || value === undefined) return "–";
    if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
    return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`;
  }

  function bytes(value) {
    for (const unit of ["B", "KiB", "MiB", "GiB"]) {
      if (value < 1024 || unit === "GiB") return `${value.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
      value /= 1024;
    }
  }

  const rate = (value) => (value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en"));
  const whole = (value) => Math.round(value).toLocaleString("en");
  const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

  return { byId, make, shape, problem, seconds, bytes, rate, whole, percent };
})();
