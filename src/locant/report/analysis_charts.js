"use strict";
// Maps and line charts: numbers in, elements out. Nothing here knows what is drawn.
const SVG = (() => {
  const box = document.createElement("div");
  box.innerHTML = "<svg></svg>";
  return box.firstChild.namespaceURI;
})();

function make(tag, attributes = {}, ...children) {
  const drawn = ["svg", "path", "line", "text", "g", "circle"].includes(tag);
  const element = drawn ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function text(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "undefined";
  if (Number.isInteger(value)) return String(value).replace("-", "−");
  const size = Math.abs(value);
  const plain = size >= 10 ** -digits && size < 1e5;
  return (plain ? value.toFixed(size >= 100 ? 1 : digits) : value.toExponential(1)).replace(/-/g, "−");
}

function nearest(list, value) { // index
  return list.reduce((best, other, at) => (Math.abs(other - value) < Math.abs(list[best] - value) ? at : best), 0);
}

// --- maps ------------------------------------------------------------------------------------------------------------

const unpacked = new WeakMap();

function cells(packed, index) {
  if (!unpacked.has(packed)) {
    const raw = atob(packed.bytes);
    unpacked.set(packed, Uint8Array.from(raw, (letter) => letter.charCodeAt(0)));
  }
  const size = packed.side * packed.side;
  const bytes = unpacked.get(packed).subarray(index * size, (index + 1) * size);
  const low = packed.low[index], spread = packed.high[index] - low;
  return Float64Array.from(bytes, (byte) => low + spread * (byte / 255) ** (1 / packed.power));
}

function inks(names) {
  const style = getComputedStyle(document.documentElement);
  return names.map((name) => {
    const color = style.getPropertyValue(name).trim();
    return [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  });
}

function shade(stops, share) { // share 0 .. 1 over three stops
  const at = Math.min(Math.max(share, 0), 1) * 2, first = at < 1 ? 0 : 1, part = at - first;
  return stops[first].map((value, channel) => value + part * (stops[first + 1][channel] - value));
}

// spec: packed, index, n (positions along a side), signed, bounds (of shared scales), offset (a diagonal), name
function drawMap(box, spec) {
  const { packed, index } = spec, side = packed.side, values = cells(packed, index);
  const canvas = make("canvas", { width: side, height: side, tabindex: 0, role: "img" });
  const read = make("p", { class: "read", "aria-live": "polite" });
  const { low, high, mean } = spec.bounds || { low: packed.low[index], high: packed.high[index], mean: packed.mean[index] };
  const reach = Math.max(high - mean, mean - low) || 1, spread = high - low || 1;
  const share = spec.signed
    ? (value) => 0.5 + (value - mean) / (2 * reach)
    : (value) => ((value - low) / spread) ** packed.power;
  const stops = inks(spec.signed ? ["--map-minus", "--map-zero", "--map-plus"] : ["--map-low", "--map-middle", "--map-high"]);
  const picture = new ImageData(side, side);
  values.forEach((value, at) => picture.data.set([...shade(stops, share(value)), 255], 4 * at));
  canvas.getContext("2d").putImageData(picture, 0, 0);
  canvas.setAttribute("aria-label", `${spec.name}: ${side} by ${side} cells from ${text(low)} to ${text(high)}; arrow keys read cells`);

  const ends = spec.signed ? [mean - reach, mean + reach] : [low, high];
  const ramp = spec.signed ? "--map-minus), var(--map-zero), var(--map-plus" : "--map-low), var(--map-middle), var(--map-high";
  const scale = make("div", { class: "scale", style: `--ramp: linear-gradient(90deg, var(${ramp}))` }, text(ends[0]), make("i"), text(ends[1]));
  const frame = make("div", { class: "map" }, canvas);
  if (spec.offset !== undefined) frame.append(diagonal(spec.offset * side / spec.n, side));
  const whole = spec.n === side, about = whole ? "" : "about ";
  const tell = (row, column) => {
    const place = (cell) => Math.min(spec.n - 1, whole ? cell : Math.round(((cell + 0.5) * spec.n) / side - 0.5));
    const i = place(row), j = place(column);
    read.textContent = `query ${about}${i}, key ${about}${j} (k = ${text(j - i)}): ${text(values[row * side + column], 4)}`;
  };
  canvas.addEventListener("pointermove", (event) => {
    const edge = canvas.getBoundingClientRect();
    const cell = (share) => Math.min(side - 1, Math.max(0, Math.floor(share * side)));
    tell(cell((event.clientY - edge.top) / edge.height), cell((event.clientX - edge.left) / edge.width));
  });
  const at = { row: side >> 1, column: side >> 1 };
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    at.row = Math.min(side - 1, Math.max(0, at.row + step[0]));
    at.column = Math.min(side - 1, Math.max(0, at.column + step[1]));
    tell(at.row, at.column);
  });
  box.replaceChildren(frame, scale, read);
}

function diagonal(k, side) {
  const [x1, y1] = [Math.max(0, k), Math.max(0, -k)], length = side - Math.abs(k);
  const line = make("line", { x1, y1, x2: x1 + Math.max(0, length), y2: y1 + Math.max(0, length), "vector-effect": "non-scaling-stroke" });
  return make("svg", { class: "diagonal", viewBox: `0 0 ${side} ${side}`, "aria-hidden": "true" }, line);
}

// --- line charts -----------------------------------------------------------------------------------------------------

function ticks(low, high, count, whole) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9; tick += step) found.push(tick);
  return { step, found: found.map((tick) => (Math.abs(tick) < step * 1e-9 ? 0 : tick)) };
}

function extent(lists) {
  const known = lists.flat().filter((value) => value !== null && value !== undefined);
  let low = Math.min(...known), high = Math.max(...known);
  if (!known.length) [low, high] = [0, 1];
  const pad = (high - low) * 0.06 || Math.abs(high) * 0.05 || 0.5;
  return [low - pad, high + pad];
}

const drawn = new Map(); // box -> spec, to draw again at another width
const watcher = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const spec = drawn.get(entry.target);
    if (spec && Math.abs(entry.contentRect.width - spec.width) > 1) drawChart(entry.target, spec);
  }
});

function clear(box) { // forgets the charts in it, whose elements are about to go
  for (const one of [box, ...box.querySelectorAll(".chart")]) {
    drawn.delete(one);
    watcher.unobserve(one);
  }
}

// spec: x, series [{name, y, color, dash, faint}], flats [{name, y}], cursor (a value of x), xlabel, ylabel, range, name
function drawChart(box, spec) {
  const width = Math.max(220, box.clientWidth), height = Math.round(Math.min(290, Math.max(190, width * 0.55)));
  const x = spec.x, flats = spec.flats || [], shown = spec.series.filter((one) => !one.faint);
  const [low, high] = spec.range || extent([...spec.series.map((one) => one.y), flats.map((one) => one.y)]);
  const left = 50, right = 12, top = 20, bottom = 38;
  const first = x[0], last = x[x.length - 1];
  const px = (value) => left + ((value - first) / (last - first || 1)) * (width - left - right);
  const py = (value) => top + ((high - value) / (high - low || 1)) * (height - top - bottom);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": spec.name });
  const rows = ticks(low, high, 4), columns = ticks(first, last, Math.max(4, width / 90), true);
  const places = Math.max(0, -Math.floor(Math.log10(rows.step) + 1e-9));
  const mark = (value) => (Math.abs(high) < 1e5 && places < 5 ? value.toFixed(places) : value.toExponential(1)).replace(/-/g, "−");
  for (const tick of rows.found) {
    svg.append(make("line", { class: "axis", x1: left, x2: width - right, y1: py(tick), y2: py(tick) }));
    svg.append(make("text", { x: left - 6, y: py(tick) + 4, "text-anchor": "end" }, mark(tick)));
  }
  for (const tick of columns.found) svg.append(make("text", { x: px(tick), y: height - bottom + 16, "text-anchor": "middle" }, text(tick)));
  svg.append(make("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, spec.xlabel));
  svg.append(make("text", { x: 0, y: 11 }, spec.ylabel));
  for (const flat of flats) svg.append(line("flat", left, width - right, py(flat.y), flat.color));
  for (const one of spec.series) {
    let path = "", open = false;
    one.y.forEach((value, at) => {
      if (value === null || value === undefined) { open = false; return; }
      path += `${open ? "L" : "M"}${px(x[at]).toFixed(1)} ${py(value).toFixed(1)}`;
      open = true;
    });
    svg.append(make("path", { d: path, style: `stroke: ${one.color}${one.faint ? "; opacity: 0.25; stroke-width: 1.2" : ""}`, "stroke-dasharray": one.dash || null }));
  }
  const cursor = make("line", { class: "cursor", y1: top, y2: height - bottom });
  const dots = shown.map((one) => make("circle", { r: 3.5, style: `fill: ${one.color}` }));
  svg.append(cursor, ...dots);

  const legend = make("p", { class: "legend" });
  const keys = shown.map((one) => legendKey(legend, one.name, one.color, one.dash ? (/^[12] /.test(one.dash) ? "dotted" : "dashed") : ""));
  for (const flat of flats) legendKey(legend, flat.name, flat.color || "var(--soft)", "dotted")(flat.y);
  const point = (value) => {
    const known = value !== null && value !== undefined;
    const at = known ? nearest(x, value) : 0;
    cursor.style.display = known ? "" : "none";
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, px(x[at]));
    shown.forEach((one, k) => {
      const here = known ? one.y[at] : null, visible = here !== null && here !== undefined;
      dots[k].style.display = visible ? "" : "none";
      if (visible) { dots[k].setAttribute("cx", px(x[at])); dots[k].setAttribute("cy", py(here)); }
      keys[k](known ? here : undefined, spec.xname && known ? `${spec.xname} ${text(x[at])}` : "");
    });
  };
  point(spec.cursor);
  svg.addEventListener("pointermove", (event) => {
    const edge = svg.getBoundingClientRect(), inside = ((event.clientX - edge.left) / edge.width) * width;
    point(first + ((inside - left) / (width - left - right)) * (last - first));
  });
  svg.addEventListener("pointerleave", () => point(spec.cursor));
  box.classList.add("chart");
  box.replaceChildren(svg, legend);
  spec.width = box.clientWidth;
  drawn.set(box, spec);
  watcher.observe(box);
}

function line(kind, x1, x2, y, color) {
  return make("line", { class: kind, x1, x2, y1: y, y2: y, style: `stroke: ${color || "var(--soft)"}; stroke-width: 1.4; stroke-dasharray: 2 3` });
}

function legendKey(legend, name, color, kind) {
  const value = make("span");
  legend.append(make("span", {}, make("i", { class: `line ${kind}`, style: `--key: ${color}` }), name, " ", value));
  return (number) => { value.textContent = number === undefined ? "" : text(number, 4); };
}
