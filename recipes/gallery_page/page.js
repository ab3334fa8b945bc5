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

// lines: [{y, low, high, style}] over x; places may be names; null leaves a gap.
function chart(target, { x, lines, trained, low, high, offset = 0 }) {
  target.replaceChildren();
  const [, , width, height] = target.getAttribute("viewBox").split(" ").map(Number);
  const left = 38, right = 10, top = 8, bottom = 22, named = typeof x[0] === "string";
  const values = lines.flatMap(l => [...l.y, ...(l.low || []), ...(l.high || [])]).filter(v => v !== null);
  if (low === undefined) low = Math.min(...values);
  if (high === undefined) high = Math.max(...values);
  if (high - low < 1e-9) { low -= 0.5; high += 0.5; }
  const at = x.map((v, n) => named ? n : Math.log2(v + offset)), span = at[at.length - 1] - at[0] || 1;
  const px = v => left + (v - at[0]) / span * (width - left - right);
  const py = v => top + (high - Math.min(high, Math.max(low, v))) / (high - low) * (height - top - bottom);
  for (let k = 0; k <= 4; k++) {
    const v = low + (high - low) * k / 4;
    svg(target, "line", { class: "grid", x1: left, x2: width - right, y1: py(v), y2: py(v) });
    svg(target, "text", { x: left - 5, y: py(v) + 4, "text-anchor": "end" }, v.toFixed(high - low < 2 ? 2 : 0));
  }
  let last = -99;
  x.forEach((v, n) => {
    const whole = named || offset === 0 || v === 0 || Number.isInteger(Math.log2(v));
    const here = px(at[n]);
    if (!whole || here - last < 34 || n < x.length - 1 && width - right - here < 12) return;
    last = here;
    svg(target, "text", { x: here, y: height - 6, "text-anchor": n === x.length - 1 ? "end" : "middle" }, named ? n + 1 : short(v));
  });
  if (trained && !named) {
    const here = px(Math.log2(trained + offset));
    if (here >= left && here <= width - right)
      svg(target, "line", { class: "trained", x1: here, x2: here, y1: top, y2: height - bottom });
  }
  for (const line of lines) {
    let points = [];
    const flush = () => {
      if (points.length) svg(target, "polyline", { class: line.style, points: points.join(" ") });
      points = [];
    };
    line.y.forEach((v, n) => {
      if (v === null) return;
      points.push(px(at[n]).toFixed(1) + "," + py(v).toFixed(1));
      if (line.low && line.low[n] !== null && line.low[n] !== undefined)
        svg(target, "line", { class: "whisker " + line.style, x1: px(at[n]), x2: px(at[n]), y1: py(line.low[n]), y2: py(line.high[n]) });
    });
    flush();
  }
}

function drawScores() {
  for (const target of document.querySelectorAll("svg[data-model]")) {
    const table = data.tables[target.dataset.table], name = target.dataset.model;
    const lines = Object.entries(table.rows).map(([label, cells]) => ({
      y: cells.map(c => c && c[0]), style: "other", label,
      ...(label === name && { style: "s0", low: cells.map(c => c && c[1]), high: cells.map(c => c && c[2]) }),
    }));
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
    const key = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === "" || y === "") return (x === "") - (y === "");  // what was not measured comes last
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y, "en", { numeric: true }) : x - y;
      return up ? order : -order;
    });
    body.append(...rows);
  }));
}

document.querySelectorAll("table").forEach(sortable);
document.querySelectorAll("details").forEach(node => node.addEventListener("toggle", () => node.open && drawPrior(node)));
drawScores();
