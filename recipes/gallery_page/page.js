// The page: charts, sorting and the sliders. Figures come from the JSON in #data.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
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

const live = data.live;
let mine = null;

const SLIDERS = () => [
  ["theta_alpha", null, "θα: strength", -6, 6, 0.01], ["theta_beta", null, "θβ: shape (below 0 looks away)", -3, 3, 0.01],
  ["mu", null, "μ: centre, in tokens (below 0: back)", -48, 48, 0.1],
  ...live.heads[0].omega.flatMap((w, r) => [
    ["alpha", r, `α${r + 1}: cosine, ω = ${w.toPrecision(2)}`, -6, 6, 0.01], ["beta", r, `β${r + 1}: sine, ω = ${w.toPrecision(2)}`, -6, 6, 0.01],
  ]),
];

const get = ([name, r]) => r === null ? mine[name] : mine[name][r];
function set([name, r], value) { if (r === null) mine[name] = value; else mine[name][r] = value; }

function makeSliders() {
  for (const slider of SLIDERS()) {
    const [name, r, text, min, max, step] = slider, id = name + (r ?? "");
    const [row, label, out, input] = ["div", "label", "output", "input"].map(tag => document.createElement(tag));
    row.className = "slider";
    label.htmlFor = input.id = id;
    label.textContent = text;
    row.append(label, out, input);
    Object.assign(input, { type: "range", min, max, step });
    input.addEventListener("input", () => { set(slider, Number(input.value)); show(); });
    $("sliders").append(row);
    input.refresh = () => { input.value = get(slider); };
    input.tell = () => { out.textContent = get(slider).toFixed(2); input.setAttribute("aria-valuetext", out.textContent); };
  }
}

function learned() {
  mine = structuredClone(live.heads[$("head").value]);
  for (const input of $("sliders").querySelectorAll("input")) input.refresh();
  show();
}

function show() {
  const own = live.heads[$("head").value], n = live.tokens.length;
  for (const input of $("sliders").querySelectorAll("input")) input.tell();
  const at = Array.from({ length: n }, (_, d) => d);
  const curve = head => { const y = at.map(d => relativePrior(d, head)), top = Math.max(...y); return y.map(v => v - top); };
  chart($("live-prior"), { x: at, lines: [{ y: curve(own), style: "s1" }, { y: curve(mine), style: "s0" }], low: FLOOR, high: 0, offset: 1 });
  const p = attention(mine), canvas = $("heat"), draw = canvas.getContext("2d"), side = canvas.width / n;
  const style = getComputedStyle(document.documentElement);
  draw.globalAlpha = 1;
  draw.fillStyle = style.getPropertyValue("--page");
  draw.fillRect(0, 0, canvas.width, canvas.height);
  draw.fillStyle = style.getPropertyValue("--mark");
  p.forEach((row, i) => row.forEach((v, j) => {
    draw.globalAlpha = Math.sqrt(v);
    draw.fillRect(Math.floor(j * side), Math.floor(i * side), Math.ceil(side), Math.ceil(side));
  }));
  const query = Number($("query").value), row = p[query], before = attention(own)[query];
  $("query-out").textContent = `${query + 1} of ${n}, “${live.tokens[query].trim()}”`;
  [...$("tokens").children].forEach((span, j) => {
    span.style.setProperty("--p", j <= query ? (12 * Math.sqrt(row[j])).toFixed(1) + "px" : "0px");
    span.classList.toggle("query", j === query);
  });
  const name = probabilities => probabilities.map((v, j) => [v, j]).sort((a, b) => b[0] - a[0]).slice(0, 3)
    .map(([v, j]) => `“${live.tokens[j].trim()}” ${(100 * v).toFixed(1)}%`).join(", ");
  $("told").textContent = `It attends most to ${name(row)}; as learned to ${name(before)}.`;
}

function startLive() {
  $("live-model").textContent = live.model;
  live.heads.forEach((head, n) => $("head").append(new Option(`layer ${head.layer}, head ${head.head}`, n, false, n === live.chosen)));
  for (const token of live.tokens) {
    const span = document.createElement("span");
    span.textContent = token;
    $("tokens").append(span);
  }
  $("query").max = $("query").value = live.tokens.length - 1;
  makeSliders();
  $("query").addEventListener("input", show);
  $("head").addEventListener("change", learned);
  $("reset").addEventListener("click", learned);
  $("flat").addEventListener("click", () => {
    for (const slider of SLIDERS()) set(slider, slider[0] === "theta_alpha" ? -6 : 0);
    for (const input of $("sliders").querySelectorAll("input")) input.refresh();
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  learned();
}

document.querySelectorAll("table").forEach(sortable);
document.querySelectorAll("details").forEach(node => node.addEventListener("toggle", () => node.open && drawPrior(node)));
drawScores();
startLive();
