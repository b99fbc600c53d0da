// The page: what is chosen, and what each panel draws of it.
const models = JSON.parse(document.getElementById("data").textContent);
const SEEN = ["layernorm_bias", "terms", "raw_bias"]; // of these, a model shows the one it has
const PATTERNS = {
  previous: ["P", "--c-3072bf"], next: ["N", "--c-b26112"], whole: ["W", "--c-6b7280"], local: ["L", "--c-01744f"],
  broad: ["B", "--c-83235e"], other: ["O", "--c-694707"],
};
const TINTS = {
  pattern: "pattern", far: "mean distance", r2: "R² of the offset", spread: "standard deviation of its logits",
  previous: "weight on the previous position", next: "weight on the next position", self: "weight on itself",
  entropy: "entropy", near: "weight nearby",
};
const FOUR = {
  word_word: "words → words", word_position: "words → positions", position_word: "positions → words",
  position_position: "positions → positions",
};
const HUES = ["--c-3072bf", "--c-b26112", "--c-01744f", "--c-83235e"].map((name) => `var(${name})`);
const chosen = { view: "attention", tint: "pattern", layer: 0, head: 0, offset: -1, treatment: "", expansion: "", shift: 0, probed: 0, step: 0 };
const byId = (id) => document.getElementById(id);
const unique = (list) => [...new Map(list.map((one) => [one.id, one])).values()];

function viewOf(model) {
  const ids = SEEN.includes(chosen.view) ? [chosen.view, ...SEEN] : [chosen.view];
  return ids.map((id) => model.views.find((view) => view.id === id)).find(Boolean);
}
function layerOf(model) {
  const view = viewOf(model);
  return view && view.layers[chosen.layer];
}
const headOf = (list) => (list ? list[chosen.head] : undefined);
const hasHead = (model) => chosen.head < model.num_heads;

// --- panels: each fills a box and says the number to cite, or says why it cannot --------------------------------------

function missingHead(model) {
  const view = viewOf(model);
  if (!view) return "This model has no such logits.";
  if (!hasHead(model)) return `This model has ${model.num_heads} heads.`;
  if (chosen.layer >= model.num_layers) return `This model has ${model.num_layers} layers.`;
  return layerOf(model) ? "" : `Layer ${chosen.layer} adds nothing of its own here; choose layer ${Object.keys(view.layers)[0]}.`;
}
const skipped = (model, protocol) => `Not run: ${(model.skipped[protocol] || "left out by --only").replace(/^analysis: /, "")}.`;

const panels = {
  map(model, box) {
    const missing = missingHead(model), layer = layerOf(model);
    if (missing || !layer.maps) return { missing: missing || skipped(model, "distance") };
    const view = viewOf(model), attention = view.id === "attention";
    drawMap(box, { packed: layer.maps, index: chosen.head, n: view.n, signed: !attention, offset: chosen.offset, name: `${view.title}, layer ${chosen.layer}, head ${chosen.head}` });
    return attention ? cite("mean distance", headOf(layer.far), `equal weights ${text(model.even.distance, 1)}`, 1)
      : cite("R²", headOf(layer.r2), `positions shuffled ${text(headOf(layer.null))}, n = ${view.n}`);
  },
  curve(model, box) {
    const missing = missingHead(model), layer = layerOf(model);
    if (missing || !layer.curve) return { missing: missing || skipped(model, "distance") };
    const view = viewOf(model), attention = view.id === "attention", series = [];
    const x = view.offsets, last = model.causal && attention ? x.indexOf(0) + 1 : x.length;
    const y = headOf(layer.curve).slice(0, last);
    series.push({ name: attention ? "attention" : "f(k)", y, color: HUES[0] });
    if (layer.fit) series.push({ name: "5 kernels", y: headOf(layer.fit), color: HUES[1], dash: "5 4" });
    const flats = attention ? [{ name: "equal weights, about", y: model.even.weight }] : [];
    drawChart(box, { x: x.slice(0, last), series, flats, cursor: chosen.offset, xlabel: "offset k = key − query", ylabel: attention ? "attention per pair" : "logit", name: `curve by offset of layer ${chosen.layer}, head ${chosen.head}` });
    const at = y[x.indexOf(chosen.offset)];
    if (attention) return cite(`k = ${text(chosen.offset)}`, at, `equal weights about ${text(flats[0].y)}`, 4);
    const needed = layer.needed ? `; kernels for 95 %: ${headOf(layer.needed) ?? "more than 5"} (5 explain ${text(headOf(layer.explained)[4])})` : "";
    return cite("R²", headOf(layer.r2), `positions shuffled ${text(headOf(layer.null))}; f(${text(chosen.offset)}) = ${text(at, 4)}${needed}`);
  },
  pattern(model, box) {
    const missing = missingHead(model), pattern = missing ? null : headOf(layerOf(model).patterns);
    if (!pattern) return { missing: missing || (model.skipped.patterns ? skipped(model, "patterns") : "No pattern is told for this kind of logits; choose what attention sees, or measured attention.") };
    const rows = [["on the previous position, a(−1)", "previous"], ["on the next position, a(1)", "next"], ["on itself, a(0)", "self"],
      ["entropy E (1: even)", "entropy"], ["nearby, up to 5 positions", "near"], ["within a quarter of the window", "wide"], ["the same of equal weights", "wide_uniform"]];
    const body = rows.map(([name, key]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, text(pattern[key]))));
    box.replaceChildren(make("table", { class: "seven" }, make("tbody", {}, ...body)));
    return cite("pattern", pattern.label || "too short to tell", `near ${text(pattern.near)}, entropy ${text(pattern.entropy)}`);
  },
  companions(model, box) {
    const here = (model.companions || []).filter((one) => one.layer <= chosen.layer);
    const layer = Math.max(...here.map((one) => one.layer)), list = here.filter((one) => one.layer === layer);
    if (!list.length || !hasHead(model)) return { missing: hasHead(model) ? "This model’s positions hold nothing for an offset alone." : `This model has ${model.num_heads} heads.` };
    const series = list.map((one, k) => ({ name: `${one.name} (${one.kind})`, y: one.values[Math.min(chosen.head, one.values.length - 1)], color: HUES[k % 4] }));
    drawChart(box, { x: list[0].offsets, series, cursor: chosen.offset, xlabel: "offset k = key − query", ylabel: "value", name: `what the terms hold, head ${chosen.head}` });
    return cite(`${list[0].name} at k = ${text(chosen.offset)}`, series[0].y[list[0].offsets.indexOf(chosen.offset)], layer < chosen.layer ? `shared from layer ${layer}` : `layer ${layer}`);
  },
  similarity(model, box) {
    const one = treatmentOf(model);
    if (!one) return { missing: noTable(model) };
    drawMap(box, { packed: one.map, index: 0, n: one.n, signed: true, name: `products of position vectors, ${one.title}` });
    return cite("R²", one.r2, `random rows ${text(one.null)}, shuffled ${text(one.null_shuffled)}; without the diagonal ${text(one.r2_off_diagonal)} (random ${text(one.null_off_diagonal)}); n = ${one.n}`);
  },
  profile(model, box) {
    const one = treatmentOf(model);
    if (!one) return { missing: noTable(model) };
    drawChart(box, { x: one.offsets, series: [{ name: "mean product", y: one.curve, color: HUES[0] }], cursor: chosen.offset, xlabel: "offset k", ylabel: "product", name: `mean product by offset, ${one.title}` });
    const first = one.first === null ? "" : `, first 128 rows ${text(one.first)}`;
    return cite("R²", one.r2, `centered ${text(one.centered)}, cosine ${text(one.cosine)}${first}`);
  },
  axes(model, box) {
    const rows = model.rows;
    if (!rows) return { missing: noTable(model) };
    const series = rows.axes.map((y, k) => ({ name: `axis ${k + 1}`, y, color: HUES[k], dash: ["", "6 3", "2 3"][k] }));
    drawChart(box, { x: rows.axes[0].map((_, at) => at), series, cursor: null, xlabel: "position", ylabel: "coordinate", name: "rows of the table on three axes" });
    return cite("linear map to the position, error", rows.regression.error, `always the mean ${text(rows.regression.training_mean_error, 1)}; order told wrong ${text(rows.order.error)} (same answer ${text(rows.order.majority)}); ${rows.rank_99} of ${rows.rank} directions hold 99 %`, 2);
  },
  correlations(model, box) {
    const found = model.correlations, four = found && found.kinds[chosen.expansion];
    if (!four) return { missing: found ? "The way into this model’s first attention is not known exactly; choose raw." : skipped(model, "correlations") };
    const list = Object.values(four).map((one) => one.map), all = (key) => list.map((one) => one[key][0]);
    const bounds = { low: Math.min(...all("low")), high: Math.max(...all("high")), mean: all("mean").reduce((a, b) => a + b) / 4 };
    const boxes = Object.entries(FOUR).map(([key, name]) => {
      const inner = make("div");
      drawMap(inner, { packed: four[key].map, index: 0, n: found.length, signed: true, bounds, name });
      return make("div", {}, make("h4", {}, name), inner);
    });
    box.replaceChildren(make("div", { class: "four" }, ...boxes));
    return cite("shares of variance", Object.entries(FOUR).map(([key, name]) => `${name} ${text(four[key].share)}`).join(", "), `${found.sentences} sentences; R² of positions → positions ${text(four.position_position.r2)}`);
  },
  drift(model, box) {
    const found = model.shift;
    if (!found) return { missing: skipped(model, "phase_shift") };
    if (found.shifts.length < 2) return { missing: unmoved(model) };
    const at = shiftOf(found), faint = found.cosine.map((y) => ({ y, color: HUES[0], faint: true }));
    const range = extent([...models.map((one) => (one.shift ? one.shift.cosine : [])).flat(), [1]]);
    drawChart(box, { x: found.cosine[0].map((_, k) => k), series: [...faint, { name: `shift ${found.shifts[at]}`, y: found.cosine[at], color: HUES[0] }], flats: [{ name: "no change", y: 1 }], cursor: found.cosine[0].length - 1, range: range[1] - range[0] < 1e-3 ? [0.9, 1.01] : range, xlabel: "layer (0: embeddings)", ylabel: "cosine with shift 0", name: `drift by layer at shift ${found.shifts[at]}` });
    const control = found.relative ? (found.control ? "a relative encoding: must be 1, and is" : "a relative encoding: must be 1, and is not") : `shift 0: 1; ${found.how}`;
    return cite(`last layer at shift ${found.shifts[at]}`, found.cosine[at].at(-1), control, 4);
  },
  scores(model, box) {
    const found = model.shift, score = found && Object.values(found.scores)[0];
    if (score && found.shifts.length < 2) return { missing: unmoved(model), ...cite(`${score.title} where it is`, score.y[0], "no shift to hold it against") };
    if (!score) return { missing: found ? "This model has no language-model head: hidden states alone." : skipped(model, "phase_shift") };
    const at = shiftOf(found), entries = Object.values(found.scores);
    const charts = entries.map(() => make("div"));
    clear(box);
    box.replaceChildren(...charts);
    entries.forEach((one, k) => drawChart(charts[k], { x: found.shifts, series: [{ name: one.title, y: one.y, color: HUES[k] }], flats: [{ name: "at shift 0", y: one.y[0] }], range: steady(one.y), cursor: found.shifts[at], xlabel: "shift", ylabel: one.title, name: `${one.title} by shift` }));
    return cite(score.title, score.y[at], `shift 0: ${text(score.y[0])}${entries[1] ? `; ${entries[1].title} ${text(entries[1].y[at])} (shift 0: ${text(entries[1].y[0])})` : ""}`);
  },
  repeated(model, box) {
    const found = model.locality;
    if (!found) return { missing: skipped(model, "locality") };
    drawMap(box, { packed: found.map, index: 0, n: found.length, signed: false, name: "attention on one repeated word" });
    return cite("R² of the offset", found.r2, `monotonicity ${text(found.monotonicity)}; ${found.words} words, n = ${found.length}`);
  },
  layers(model, box) {
    const found = model.locality;
    if (!found) return { missing: skipped(model, "locality") };
    const names = { locality: "locality", symmetry: "symmetry, published", symmetry_raw: "symmetry, stable" };
    const series = Object.entries(names).map(([key, name], k) => ({ name, y: found.layers.map((one) => one[key]), color: HUES[k], dash: ["", "6 3", "2 3"][k] }));
    const even = model.even.locality;
    drawChart(box, { x: found.layers.map((_, k) => k), series, flats: [{ name: "locality of equal weights", y: even }], cursor: found.layers.length - 1, range: [0, 1.02], xlabel: "layer", ylabel: "0 to 1", name: "locality and symmetry by layer" });
    return cite("locality", found.locality, `equal weights ${text(even)}; symmetry ${text(found.symmetry)} (stable ${text(found.symmetry_raw)}), equal weights 1; all layers`);
  },
  probe(model, box) {
    const found = model.probe;
    if (!found) return { missing: skipped(model, "probe") };
    const range = extent([...models.filter((one) => one.probe).map((one) => [...one.probe.distance, ...one.probe.linear_distance, one.probe.chance]), [0]]);
    drawChart(box, { x: found.distance.map((_, k) => k), series: [{ name: "probe", y: found.distance, color: HUES[0] }, { name: "linear", y: found.linear_distance, color: HUES[1], dash: "5 4" }], flats: [{ name: "chance", y: found.chance }], cursor: probedOf(found), range, xlabel: "layer (0: embeddings)", ylabel: "distance, tokens", name: "error of the probe by layer" });
    return cite("last layer", found.distance.at(-1), `chance ${text(found.chance, 1)}; embeddings ${text(found.distance[0], 2)}; exact on the last ${text(found.accuracy.at(-1))}`, 2);
  },
  answers(model, box) {
    const found = model.probe;
    if (!found) return { missing: skipped(model, "probe") };
    const at = probedOf(found), mean = found.mean_prediction[at], spread = found.spread[at], places = mean.map((_, k) => k);
    const edge = (sign) => mean.map((value, k) => value + sign * (spread[k] || 0));
    drawChart(box, { x: places, series: [{ y: edge(1), color: HUES[0], faint: true }, { y: edge(-1), color: HUES[0], faint: true }, { name: "truth", y: places, color: "var(--soft)", dash: "2 3" }, { name: "answer", y: mean, color: HUES[0] }], cursor: null, range: [-0.06 * places.length, 1.06 * places.length], xlabel: "true position", ylabel: "answer", name: `answers of the probe on layer ${at}` });
    return cite(`layer ${at}`, found.distance[at], `chance ${text(found.chance, 1)}; exact ${text(found.accuracy[at])}`, 2);
  },
  course(model, box) {
    const found = model.course;
    if (!found) return { missing: noCourse };
    if (!found.measures.length) return { missing: "Nothing in this model depends on positions at any checkpoint." };
    const series = found.measures.map((one, k) => ({ name: one.title, y: one.y, color: HUES[k % 4], dash: ["", "6 3", "2 3", "8 2 2 2", "1 2"][k] }));
    const at = stepOf(found), main = found.measures.at(-1);
    drawChart(box, { x: found.steps, series, cursor: found.steps[at], range: [-0.02, 1.04], xlabel: "step", ylabel: "R² of the offset", name: "R² of the offset over training" });
    const nulls = [["position-only logits", found.nulls.heads_null], ["repeated word", found.nulls.words_null]].filter(([, y]) => y[at] !== null).map(([name, y]) => `, ${name} shuffled ${text(y[at])}`).join("");
    return cite(`${main.title}, step ${found.steps[at]}`, main.y[at], `step ${found.steps[0]}: ${text(main.y[0])}${nulls}; Spearman with the loss ${text(main.spearman)} over ${main.n} checkpoints`);
  },
  losses(model, box) {
    const found = model.course;
    if (!found || !found.loss) return { missing: noCourse };
    const at = stepOf(found);
    drawChart(box, { x: found.steps, series: [{ name: "loss", y: found.loss, color: HUES[0] }], cursor: found.steps[at], xlabel: "step", ylabel: "loss, nats", name: "loss over training" });
    return cite(`step ${found.steps[at]}`, found.loss[at], `step ${found.steps[0]}: ${text(found.loss[0])}`);
  },
  kinds(model, box) {
    const found = model.course;
    if (!found || !Object.keys(found.patterns).length) return { missing: found ? "Windows this short have no patterns." : noCourse };
    const at = stepOf(found), names = Object.keys(PATTERNS).filter((name) => found.patterns[name]);
    const series = names.map((name) => ({ name, y: found.patterns[name], color: `var(${PATTERNS[name][1]})` }));
    drawChart(box, { x: found.steps, series, cursor: found.steps[at], range: [-0.03 * found.heads, 1.03 * found.heads], xlabel: "step", ylabel: "heads", name: "heads by pattern over training" });
    return cite(`step ${found.steps[at]}`, names.map((name) => `${found.patterns[name][at]} ${name}`).join(", "), `by ${found.by}; ${found.heads} heads`);
  },
  grid(model, box, panel) { drawGrid(model, panel); },
};

// The range of a chart whose values differ by rounding alone, which is no change.
const steady = (y) => (Math.max(...y) - Math.min(...y) < 0.01 * Math.abs(y[0]) ? [0.97 * y[0], 1.03 * y[0]] : undefined);
const cite = (name, value, control, digits = 3) => ({ name, value: typeof value === "string" ? value : text(value, digits), control });
const treatmentOf = (model) => (model.table || []).find((one) => one.id === chosen.treatment);
const noTable = (model) => (model.table ? "This model has no LayerNorm before its first attention; choose raw." : skipped(model, "translation_invariance").replace("left out by --only", "it has no table of positions"));
const shifts = [...new Set(models.flatMap((model) => (model.shift ? model.shift.shifts : [])))].sort((one, other) => one - other);
const shiftOf = (found) => nearest(found.shifts, shifts[chosen.shift]);
const unmoved = (model) => `Windows of ${model.length} tokens fill the table of this model, so no shift fits; analyze shorter windows (--length).`;
const noCourse = "Not a run with checkpoints: give the folder of one.";
const steps = [...new Set(models.flatMap((model) => (model.course ? model.course.steps : [])))].sort((one, other) => one - other);
const stepOf = (found) => nearest(found.steps, steps[chosen.step]);
const probedOf = (found) => Math.min(chosen.probed, found.distance.length - 1);

// --- the grid of heads -------------------------------------------------------------------------------------------------

function measureOf(layer, head, tint) {
  if (!layer) return undefined;
  if (layer[tint]) return layer[tint][head];
  const pattern = layer.patterns && layer.patterns[head];
  return pattern ? pattern[tint === "pattern" ? "label" : tint] : undefined;
}
function hasTint(tint) {
  return models.some((model) => Object.values((viewOf(model) || { layers: {} }).layers).some((layer) => measureOf(layer, 0, tint) !== undefined));
}

function drawGrid(model, panel) {
  const grid = panel.querySelector("[data-grid]"), legend = panel.querySelector("[data-legend]"), view = viewOf(model);
  const focused = grid.contains(document.activeElement), number = chosen.tint !== "pattern";
  const known = [];
  for (const other of models) {
    for (const layer of Object.values((viewOf(other) || { layers: {} }).layers)) {
      for (let head = 0; head < other.num_heads; head += 1) known.push(measureOf(layer, head, chosen.tint));
    }
  }
  const numbers = known.filter((value) => typeof value === "number"), low = Math.min(...numbers), high = Math.max(...numbers);
  grid.style.gridTemplateColumns = `auto repeat(${model.num_heads}, max-content)`;
  const parts = [make("span")];
  for (let head = 0; head < model.num_heads; head += 1) parts.push(make("span", { class: "column", "aria-hidden": "true" }, String(head)));
  for (let layer = 0; layer < model.num_layers; layer += 1) {
    parts.push(make("span", { "aria-hidden": "true" }, String(layer)));
    for (let head = 0; head < model.num_heads; head += 1) parts.push(cell(model, view, layer, head, { number, low, high }));
  }
  grid.replaceChildren(...parts);
  if (focused) grid.querySelector('[tabindex="0"]')?.focus();
  legend.replaceChildren();
  if (number) {
    if (!numbers.length) return;
    for (const share of [0, 0.5, 1]) legend.append(make("span", {}, make("i", { style: `--key: ${tone(share)}` }), text(low + share * (high - low))));
  } else {
    for (const [name, [letter, color]] of Object.entries(PATTERNS)) {
      if (known.includes(name)) legend.append(make("span", {}, make("i", { style: `--key: ${wash(color)}` }), `${letter} ${name}`));
    }
  }
}
const tone = (share) => `color-mix(in srgb, var(--map-middle) ${Math.round(share * 85)}%, var(--open-ground))`;
const wash = (color) => `color-mix(in srgb, var(${color}) 42%, var(--card))`;

function cell(model, view, layer, head, { number, low, high }) {
  const here = view && view.layers[layer], value = measureOf(here, head, chosen.tint);
  const pressed = layer === chosen.layer && head === chosen.head;
  const told = value === undefined ? "" : `, ${TINTS[chosen.tint]} ${number ? text(value) : value}`;
  const button = make("button", { type: "button", "aria-pressed": pressed, tabindex: pressed ? 0 : -1, "data-layer": layer, "data-head": head, "aria-label": `layer ${layer}, head ${head}${told}`, title: `layer ${layer}, head ${head}${told}` });
  button.disabled = !here;
  if (number && typeof value === "number") button.style.background = tone(high > low ? (value - low) / (high - low) : 0);
  if (!number && PATTERNS[value]) {
    button.style.background = wash(PATTERNS[value][1]);
    button.textContent = PATTERNS[value][0];
  }
  return button;
}

function choose(layer, head) {
  [chosen.layer, chosen.head] = [layer, head];
  draw(["grid", "map", "curve", "pattern", "companions"]);
}
for (const grid of document.querySelectorAll("[data-grid]")) {
  grid.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) choose(Number(button.dataset.layer), Number(button.dataset.head));
  });
  grid.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = grid.querySelector(`button[data-layer="${chosen.layer + step[0]}"][data-head="${chosen.head + step[1]}"]:not(:disabled)`);
    if (!next) return;
    next.focus();
    next.click();
  });
}

// --- controls ------------------------------------------------------------------------------------------------------------

function draw(names = Object.keys(panels)) {
  for (const panel of document.querySelectorAll("[data-panel]")) {
    const name = panel.dataset.panel, model = models[panel.dataset.model];
    if (!names.includes(name)) continue;
    const box = panel.querySelector("[data-drawing]"), said = panel.querySelector("[data-number]");
    const result = panels[name](model, box, panel) || {};
    if (result.missing) {
      clear(box);
      box.classList.remove("chart");
      box.replaceChildren(make("p", { class: "absent-note" }, result.missing));
    }
    if (said) said.replaceChildren(...(result.name ? [`${result.name}: `, make("b", {}, result.value), ` (${result.control})`] : []));
  }
  if (names.includes("grid")) {
    const title = models.map(viewOf).find(Boolean);
    if (byId("chosen")) byId("chosen").textContent = `Layer ${chosen.layer}, head ${chosen.head}; ${title ? title.title : ""}.`;
  }
}

function fill(id, options, key, names) {
  const select = byId(id);
  if (!select) return;
  select.replaceChildren(...options.map((one) => make("option", { value: one.id }, one.title)));
  if (!options.some((one) => one.id === chosen[key]) && options.length) chosen[key] = options[0].id;
  select.value = chosen[key];
  select.onchange = () => {
    chosen[key] = select.value;
    if (key === "view") viewChanged();
    draw(names);
  };
}
function slide(id, key, { low, high, show = text }, names) {
  const slider = byId(id);
  if (!slider) return;
  [slider.min, slider.max, slider.value] = [low, high, chosen[key]];
  const tell = () => { byId(`${id}-value`).textContent = show(chosen[key]); slider.setAttribute("aria-valuetext", show(chosen[key])); };
  slider.oninput = () => { chosen[key] = Number(slider.value); tell(); draw(names); };
  tell();
}

function viewChanged() {
  const tints = Object.entries(TINTS).filter(([id]) => hasTint(id)).map(([id, title]) => ({ id, title }));
  fill("tint", tints, "tint", ["grid"]);
  const view = models.map(viewOf).find(Boolean);
  if (view && !view.layers[chosen.layer]) chosen.layer = Number(Object.keys(view.layers)[0]);
  const reach = Math.max(1, ...models.map(viewOf).filter((one) => one && one.offsets).map((one) => one.offsets.at(-1)));
  chosen.offset = Math.max(-reach, Math.min(reach, chosen.offset));
  slide("offset", "offset", { low: -reach, high: reach }, ["map", "curve", "companions", "profile"]);
}

const views = unique(models.flatMap((model) => model.views));
fill("view", views, "view", ["grid", "map", "curve", "pattern"]);
viewChanged();
fill("treatment", unique(models.flatMap((model) => model.table || [])), "treatment", ["similarity", "profile"]);
const kinds = models.flatMap((model) => Object.keys(model.correlations?.kinds || {}));
const expansions = [{ id: "exact", title: "exact, through LayerNorm" }, { id: "raw", title: "raw, as published" }];
fill("expansion", expansions.filter((one) => kinds.includes(one.id)), "expansion", ["correlations"]);
chosen.shift = Math.max(0, shifts.length - 1);
slide("shift-by", "shift", { low: 0, high: chosen.shift, show: (at) => text(shifts[at]) }, ["drift", "scores"]);
chosen.step = Math.max(0, steps.length - 1);
slide("step", "step", { low: 0, high: chosen.step, show: (at) => text(steps[at]) }, ["course", "losses", "kinds"]);
const deepest = Math.max(0, ...models.map((model) => (model.probe ? model.probe.distance.length - 1 : 0)));
slide("probed", "probed", { low: 0, high: deepest }, ["probe", "answers"]);
draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
