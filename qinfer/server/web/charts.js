"use strict";
/* Pictures of numbers: lines over time, one bar of parts, a map of pages. What they show is also said in words. */
const Charts = (() => {
  const { byId, shape, whole } = Dom;

  /* Lines over the last `span` seconds in `holder`; each of `lines` is {name, paint, points: [[seconds ago, value]]}. */
  function lines(holder, all, span, label) {
    const top = nice(Math.max(1, ...all.flatMap(({ points }) => points.map(([, value]) => value))));
    const y = (value) => 4 + 92 * (1 - value / top);
    const x = (ago) => 600 * (1 - ago / span);
    const plot = shape("svg", { viewBox: "0 0 600 100", preserveAspectRatio: "none", role: "img", "aria-label": label });
    for (const value of [0, top / 2, top]) {
      plot.append(shape("line", { class: "grid", x1: 0, x2: 600, y1: y(value), y2: y(value) }));
    }
    for (const { paint, points } of all) {
      const path = points.map(([ago, value]) => `${x(ago).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
      plot.append(shape("polyline", { class: `line paint-${paint}`, points: path }));
    }
    const newest = all.map(({ name, points }) => `${name} ${whole(points.at(-1)?.[1] ?? 0)}`).join(", ");
    holder.replaceChildren(plot, Dom.make("div", { class: "hint" }, `now ${newest}; top line ${whole(top)}`));
  }

  /* The next of 1, 2, 5, 10, 20 … */
  function nice(value) {
    const power = 10 ** Math.floor(Math.log10(value));
    return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
  }

  /* One bar in `holder`; each of `parts` is {paint, size}. */
  function bar(holder, parts) {
    const total = parts.reduce((sum, { size }) => sum + size, 0) || 1;
    const plot = shape("svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none" });
    let at = 0;
    for (const { paint, size } of parts) {
      const width = (1000 * size) / total;
      plot.append(shape("rect", { class: `fill-${paint}`, x: at, y: 0, width: Math.max(0, width - 2), height: 10 }));
      at += width;
    }
    holder.replaceChildren(plot);
  }

  /* Pages as cells, row by row; a cell of several pages is painted in the shares of their kinds. */
  function pages(canvas, map) {
    const box = canvas.getBoundingClientRect();
    const scale = window.devicePixelRatio || 1;
    canvas.width = Math.round(box.width * scale);
    canvas.height = Math.round(box.height * scale);
    const paint = canvas.getContext("2d");
    const colors = getComputedStyle(canvas);
    const count = map.held.length;
    const columns = Math.max(1, Math.ceil(Math.sqrt((count * box.width) / Math.max(1, box.height))));
    const rows = Math.ceil(count / columns);
    const [width, height] = [canvas.width / columns, canvas.height / rows];
    const gap = Math.min(width, height) > 4 * scale ? scale : 0;
    for (let cell = 0; cell < count; cell++) {
      const size = Math.min(map.pages_per_cell, map.num_pages - cell * map.pages_per_cell);
      const used = map.held[cell] + map.cached[cell];
      const kinds = { held: map.held[cell] - map.shared[cell], shared: map.shared[cell], cached: map.cached[cell], free: size - used };
      let x = (cell % columns) * width;
      const y = Math.floor(cell / columns) * height;
      for (const [kind, pages] of Object.entries(kinds)) {
        const part = ((width - gap) * pages) / size;
        paint.fillStyle = colors.getPropertyValue(`--${kind}`);
        paint.fillRect(x, y, part, height - gap);
        x += part;
      }
    }
  }

  return { lines, bar, pages };
})();
