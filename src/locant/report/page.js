"use strict";
for (const element of document.querySelectorAll(".toggle, .with-script")) element.hidden = false;

// Untick an encoding: take its lines, points and names out of every plot.
function show(box) {
  for (const part of document.querySelectorAll(`[data-series="${box.dataset.toggle}"]`)) {
    part.style.display = box.checked ? "" : "none";
  }
}
for (const box of document.querySelectorAll("[data-toggle]")) {
  box.addEventListener("change", () => show(box));
  show(box); // a reloaded page may remember an unticked box
}

// Press the name of a column: sort by it; cells without a value stay last.
function compareCells(one, other, direction) {
  if (one === "" || other === "") return (one === "") - (other === "");
  const gap = Number(one) - Number(other);
  return direction * (Number.isNaN(gap) ? one.localeCompare(other) : gap);
}
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const direction = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
      const value = (row) => row.cells[column].dataset.value;
      const rows = [...table.tBodies[0].rows];
      rows.sort((one, other) => compareCells(value(one), value(other), direction));
      table.tBodies[0].append(...rows);
    });
  });
}
