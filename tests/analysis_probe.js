// What tests/test_analysis_page.py looks at and presses in each frame.
function probe(frame) {
  const page = frame.contentDocument, view = frame.contentWindow, root = page.documentElement, seen = {};
  const panel = (name, model) => page.querySelector(`[data-panel="${name}"][data-model="${model}"]`);
  const canvas = (name, model = 0) => panel(name, model).querySelector("canvas")?.toDataURL();
  const paths = (name, model = 0) => [...panel(name, model).querySelectorAll("path")].map((one) => one.getAttribute("d")).join();
  const said = (name, model = 0) => panel(name, model).querySelector("[data-number]").textContent;
  const press = (element, key) => element.dispatchEvent(new view.KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
  const set = (id, value) => {
    const control = page.getElementById(id);
    control.value = value;
    control.dispatchEvent(new view.Event(control.tagName === "SELECT" ? "change" : "input", { bubbles: true }));
  };
  const changes = (act, ...looks) => { const before = looks.map((look) => look()); act(); return looks.map((look, k) => look() !== before[k]); };
  seen.client = root.clientWidth;
  seen.scroll = root.scrollWidth;
  seen.background = view.getComputedStyle(page.body).backgroundColor;
  seen.empty = [...page.querySelectorAll("[data-drawing]")].filter((one) => !one.children.length).map((one) => one.parentElement.dataset.panel);
  seen.missing = panel("similarity", 1).textContent;
  const heads = (model) => [...page.querySelectorAll(`[data-panel="grid"][data-model="${model}"] button`)];
  seen.heads = [heads(0).length, heads(1).length];
  seen.click = changes(() => heads(0)[4].click(), () => canvas("map"), () => canvas("map", 1), () => paths("curve"), () => said("pattern"));
  seen.chosen = page.getElementById("chosen").textContent;
  heads(0)[4].focus();
  seen.arrow = changes(() => press(page.activeElement, "ArrowLeft"), () => canvas("map"), () => paths("curve"));
  seen.focus = page.activeElement.getAttribute("aria-label");
  seen.edge = changes(() => press(page.activeElement, "ArrowDown"), () => canvas("map"));
  seen.offset = changes(() => set("offset", 3), () => said("curve"), () => panel("map", 0).querySelector(".diagonal line").getAttribute("x1"));
  seen.tint = changes(() => set("tint", "far"), () => heads(0)[0].style.background);
  set("tint", "pattern");
  seen.view = changes(() => set("view", "layernorm_bias"), () => canvas("map"), () => paths("curve"), () => said("curve"));
  seen.disabled = heads(0).filter((one) => one.disabled).length;
  seen.nothing = panel("map", 1).textContent;
  seen.treatment = changes(() => set("treatment", "layernorm"), () => canvas("similarity"), () => said("similarity"));
  seen.expansion = changes(() => set("expansion", "raw"), () => canvas("correlations"), () => said("correlations"));
  seen.shift = changes(() => set("shift-by", 1), () => said("drift"), () => said("drift", 1), () => paths("drift"));
  seen.probed = changes(() => set("probed", 2), () => paths("answers"), () => said("answers"));
  const map = panel("similarity", 0).querySelector("canvas");
  map.focus();
  seen.read = changes(() => press(map, "ArrowRight"), () => panel("similarity", 0).querySelector(".read").textContent);
  const controls = [...page.querySelectorAll("select, input, canvas, a")];
  seen.unreachable = controls.filter((one) => one.tabIndex < 0).length;
  seen.unnamed = controls.filter((one) => !one.closest("label") && !one.getAttribute("aria-label") && !one.textContent).length;
  const wide = [...page.querySelectorAll("figure svg, figure canvas, select")].filter((one) => one.getBoundingClientRect().right > root.clientWidth);
  seen.wide = wide.length;
  return seen;
}
