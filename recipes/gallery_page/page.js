// Charts and sorting. Numbers come from the JSON in #data.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const FLOOR = -12;

function svg(parent, name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

const short = x => Math.abs(x) >= 1024 && x % 1024 === 0 ? x / 1024 + "k" : String(Math.round(x * 100) / 100);

// lines: [{y, style}] over x; null leaves a gap.
function chart(target, { x, lines, trained, low, high, offset = 0 }) {
  target.replaceChildren();
  const [, , width, height] = target.getAttribute("viewBox").split(" ").map(Number);
  const left = 38, right = 10, top = 8, bottom = 22;
  const values = lines.flatMap(l => l.y).filter(v => v !== null);
  if (low === undefined) low = Math.min(...values);
  if (high === undefined) high = Math.max(...values);
  if (high - low < 1e-9) { low -= 0.5; high += 0.5; }
  const at = x.map(v => Math.log2(v + offset)), span = at[at.length - 1] - at[0] || 1;
  const px = v => left + (v - at[0]) / span * (width - left - right);
  const py = v => top + (high - Math.min(high, Math.max(low, v))) / (high - low) * (height - top - bottom);
  for (let k = 0; k <= 4; k++) {
    const v = low + (high - low) * k / 4;
    svg(target, "line", { class: "grid", x1: left, x2: width - right, y1: py(v), y2: py(v) });
    svg(target, "text", { x: left - 5, y: py(v) + 4, "text-anchor": "end" }, v.toFixed(high - low < 2 ? 2 : 0));
  }
  let last = -99;
  x.forEach((v, n) => {
    const whole = offset === 0 || v === 0 || Number.isInteger(Math.log2(v));
    const here = px(at[n]);
    if (!whole || here - last < 34 || n < x.length - 1 && width - right - here < 12) return;
    last = here;
    svg(target, "text", { x: here, y: height - 6, "text-anchor": n === x.length - 1 ? "end" : "middle" }, short(v));
  });
  if (trained) {
    const here = px(Math.log2(trained + offset));
    if (here >= left && here <= width - right)
      svg(target, "line", { class: "trained", x1: here, x2: here, y1: top, y2: height - bottom });
  }
  for (const line of lines) {
    const points = line.y.flatMap((v, n) => v === null ? [] : [px(at[n]).toFixed(1) + "," + py(v).toFixed(1)]);
    svg(target, "polyline", { class: line.style, points: points.join(" ") });
  }
}

function drawScores() {
  for (const target of document.querySelectorAll("svg[data-model]")) {
    const table = data.tables[target.dataset.table], name = target.dataset.model;
    const lines = Object.entries(table.rows).map(([label, y]) => ({ y, style: label === name ? "s0" : "other", label }));
    lines.sort((a, b) => (a.label === name) - (b.label === name));
    chart(target, { x: table.places, lines, trained: Number(target.dataset.trained), ...(table.share && { low: 0, high: 1 }) });
  }
}

function drawPrior(details) {
  for (const target of details.querySelectorAll("svg[data-prior]")) {
    const prior = data.priors[target.dataset.prior];
    const lines = prior.layers[target.dataset.layer].map((y, h) => ({ y, style: "s" + h % 4 }));
    chart(target, { x: prior.at, lines, low: FLOOR, high: 0, trained: prior.trained, offset: 1 });
  }
}

function sortable(table) {
  const body = table.tBodies[0];
  table.querySelectorAll("thead button").forEach((button, column) => button.addEventListener("click", () => {
    const head = button.parentNode, up = head.getAttribute("aria-sort") !== "ascending";
    table.querySelectorAll("thead th").forEach(th => th.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = row => row.cells[column].textContent;
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === "–" || y === "–") return (x === "–") - (y === "–");  // what was not measured comes last
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y, "en", { numeric: true }) : x - y;
      return up ? order : -order;
    });
    body.append(...rows);
  }));
}

// A figure fills the window until the next click, or Escape.
function enlarge(figure) {
  const large = document.querySelector("figure.large");
  if (large) large.classList.remove("large");
  if (figure && figure !== large) figure.classList.add("large");
}

document.addEventListener("click", event => enlarge(event.target.closest("figure")));
document.addEventListener("keydown", event => {
  if (event.key === "Escape") enlarge(null);
  if (event.key === "Enter" && event.target.matches("figure")) enlarge(event.target);
});
document.querySelectorAll("table").forEach(sortable);
document.querySelectorAll("details").forEach(node => node.addEventListener("toggle", () => node.open && drawPrior(node)));
drawScores();
