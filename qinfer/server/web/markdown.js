"use strict";
/* Markdown as models write it, into DOM nodes: headings, lists, quotes, tables, code, emphasis, links.
   What is not understood stays as it was written; half-finished text, as it streams in, is no error. */
const Markdown = (() => {
  const { make } = Dom;
  const MAX_DEPTH = 8;
  const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
  const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
  const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
  const QUOTE = /^ {0,3}> ?/;
  const ITEM = /^( *)([-*+]|\d{1,9}[.)])(\s+|$)(.*)$/;
  const DELIMITER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
  const INLINE = new RegExp(
    [
      "\\\\([\\\\`*_{}\\[\\]()#+.!|~<>-])", // 1: an escaped character
      "(`+)([^`](?:[\\s\\S]*?[^`])?)\\2(?!`)", // 3: code
      "\\*\\*(?=\\S)([^*]+(?:\\*(?!\\*)[^*]+)*)\\*\\*", // 4: strong
      "\\*(?=[^\\s*])([^*]+)\\*", // 5: emphasis
      "(?<!\\w)_(?=[^\\s_])([^_]+)_(?!\\w)", // 6: emphasis
      "~~([^~]+)~~", // 7: deleted
      "\\[([^\\[\\]]+)\\]\\((https?:[^\\s()]+|mailto:[^\\s()]+)\\)", // 8, 9: a link
      "(https?:\\/\\/[^\\s<>()]*[^\\s<>().,;:!?'\"])", // 10: an address
    ].join("|"),
    "g",
  );

  function render(text) {
    const fragment = document.createDocumentFragment();
    fragment.append(...blocks(text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"), 0));
    return fragment;
  }

  function blocks(lines, depth) {
    const found = [];
    let at = 0;
    while (at < lines.length) {
      const [node, next] = block(lines, at, depth);
      if (node) found.push(node);
      at = next;
    }
    return found;
  }

  /* The block that begins in line `at`, or null for a blank line, and where the next begins. */
  function block(lines, at, depth) {
    const line = lines[at];
    if (!line.trim()) return [null, at + 1];
    let match;
    if ((match = FENCE.exec(line))) return fence(lines, at, match);
    if ((match = HEADING.exec(line))) {
      return [make(`h${Math.min(6, match[1].length + 3)}`, {}, ...inline(match[2])), at + 1];
    }
    if (RULE.test(line)) return [make("hr"), at + 1];
    if (depth < MAX_DEPTH && QUOTE.test(line)) return quote(lines, at, depth);
    if (depth < MAX_DEPTH && ITEM.test(line)) return list(lines, at, depth);
    if (line.includes("|") && DELIMITER.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")) return table(lines, at);
    return paragraph(lines, at);
  }

  function fence(lines, at, [, mark, language]) {
    let end = at + 1;
    while (end < lines.length && !(lines[end].trim().startsWith(mark) && !lines[end].trim().slice(mark.length).trim())) end++;
    const code = lines.slice(at + 1, end).join("\n");
    const copy = make("button", { type: "button", onclick: () => navigator.clipboard.writeText(code) }, "Copy code");
    const bar = make("div", { class: "bar" }, make("span", {}, language), copy);
    return [make("div", { class: "code" }, bar, make("pre", { tabindex: "0" }, make("code", {}, code))), end + 1];
  }

  function quote(lines, at, depth) {
    let end = at;
    while (end < lines.length && QUOTE.test(lines[end])) end++;
    const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
    return [make("blockquote", {}, ...blocks(inner, depth + 1)), end];
  }

  function list(lines, at, depth) {
    const [, indent, first] = ITEM.exec(lines[at]);
    const ordered = /\d/.test(first);
    const start = ordered && parseInt(first, 10) !== 1 ? parseInt(first, 10) : null;
    const element = make(ordered ? "ol" : "ul", { start });
    while (at < lines.length) {
      const match = ITEM.exec(lines[at]);
      if (!match || match[1].length !== indent.length || /\d/.test(match[2]) !== ordered) break;
      const width = match[1].length + match[2].length + 1;
      const inner = [match[4]];
      at++;
      while (at < lines.length && belongs(lines, at, indent.length)) {
        const line = lines[at++];
        inner.push(line.search(/\S/) >= width ? line.slice(width) : line.trimStart());
      }
      const parts = blocks(inner, depth + 1);
      if (parts[0]?.tagName === "P") parts.splice(0, 1, ...parts[0].childNodes);
      element.append(make("li", {}, ...parts));
      while (at + 1 < lines.length && !lines[at].trim() && ITEM.exec(lines[at + 1])?.[1].length === indent.length) at++;
    }
    return [element, at];
  }

  /* Whether line `at` goes on with the item above it: indented, or text that no other block begins with. */
  function belongs(lines, at, indent) {
    const line = lines[at];
    if (!line.trim()) return /^ {2,}\S/.test(lines[at + 1] ?? "") && lines[at + 1].search(/\S/) > indent;
    if (line.search(/\S/) > indent) return true;
    return !!lines[at - 1].trim() && ![FENCE, HEADING, RULE, QUOTE, ITEM].some((start) => start.test(line));
  }

  function table(lines, at) {
    const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => inline(cell.trim()));
    const head = make("tr", {}, ...cells(lines[at]).map((cell) => make("th", { scope: "col" }, ...cell)));
    const body = make("tbody");
    for (at += 2; at < lines.length && lines[at].includes("|"); at++) {
      body.append(make("tr", {}, ...cells(lines[at]).map((cell) => make("td", {}, ...cell))));
    }
    return [make("div", { class: "scroll" }, make("table", {}, make("thead", {}, head), body)), at];
  }

  function paragraph(lines, at) {
    let end = at + 1;
    while (end < lines.length && lines[end].trim() && ![FENCE, HEADING, RULE, QUOTE, ITEM].some((start) => start.test(lines[end]))) end++;
    return [make("p", {}, ...inline(lines.slice(at, end).map((line) => line.trimStart()).join("\n"))), end];
  }

  function inline(text, depth = 0) {
    const nodes = [];
    let last = 0;
    for (const found of depth < MAX_DEPTH ? text.matchAll(INLINE) : []) {
      nodes.push(...broken(text.slice(last, found.index)), span(found, depth));
      last = found.index + found[0].length;
    }
    nodes.push(...broken(text.slice(last)));
    return nodes;
  }

  function span(found, depth) {
    const [, escaped, , code, strong, star, under, deleted, label, target, address] = found;
    if (escaped) return document.createTextNode(escaped);
    if (code) return make("code", {}, code.trim());
    if (strong) return make("strong", {}, ...inline(strong, depth + 1));
    if (star || under) return make("em", {}, ...inline(star || under, depth + 1));
    if (deleted) return make("del", {}, ...inline(deleted, depth + 1));
    const link = { href: target ?? address, rel: "noopener noreferrer", target: "_blank" };
    return make("a", link, ...(label ? inline(label, depth + 1) : [address]));
  }

  /* Two spaces at the end of a line break it. */
  function broken(text) {
    return text.split(/ {2,}\n/).flatMap((part, i) => (i ? [make("br"), part] : part ? [part] : []));
  }

  return { render };
})();
