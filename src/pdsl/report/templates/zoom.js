// Zoom of line charts: drag to choose a range, double-click or 0 to return, + and - to zoom around the marked round.
const zooms = new Map(); // view of each zoomed chart by the name of its figure, so that a live report keeps it
let drag = null; // { chart, x, y, box } while a range is chosen

const numbers = (text) => text.split(" ").map(Number);
const nameOf = (chart) => chart.closest("figure")?.dataset.name ?? "";
const viewOf = (chart) => numbers(chart.dataset.now ?? chart.dataset.view);
const inChart = (chart, event) => {
  const box = chart.getBoundingClientRect(), scale = chart.viewBox.baseVal.width / box.width;
  return [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
};

const roundStep = (range) => {
  const power = 10 ** Math.floor(Math.log10(range / 5));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= (range / 5) * (1 - 1e-9));
};
const ticksWithin = (low, high, step) => {
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) ticks.push(k * step);
  return ticks;
};
const digits = (step) => Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
const written = (value, step, unit) => {
  if (unit === "percent") return (100 * value).toFixed(digits(100 * step)) + "\u00a0%";
  if (unit === "size") {
    const power = value < 1 ? 0 : Math.min(4, Math.floor(Math.log10(value) / 3));
    return (value / 1000 ** power).toFixed(digits(step / 1000 ** power)) + "\u00a0" + ["B", "kB", "MB", "GB", "TB"][power];
  }
  const large = Math.abs(value) >= 1e6 || (step < 1e-4 && value !== 0);
  return (large ? value.toPrecision(3) : value.toFixed(digits(step))).replace("-", "−");
};
const makeMark = (name, attributes, text = "") => {
  const made = document.createElementNS(document.querySelector("svg").namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
};

// Shows the part [x0, x1] × [y0, y1] of a chart. Shapes are scaled, and ticks are written again.
const showView = (chart, [x0, x1, y0, y1]) => {
  const [left, right, top, bottom] = numbers(chart.dataset.box), [a0, a1, b0, b1] = numbers(chart.dataset.view);
  const across = (a1 - a0) / (x1 - x0), up = (b1 - b0) / (y1 - y0);
  const dx = left - across * (left + ((right - left) * (x0 - a0)) / (a1 - a0));
  const dy = bottom - up * (bottom - ((bottom - top) * (y0 - b0)) / (b1 - b0));
  chart.querySelector(".zoom").setAttribute("transform", `matrix(${across} 0 0 ${up} ${dx} ${dy})`);
  chart.querySelector(".hit").setAttribute("transform", `matrix(${across} 0 0 1 ${dx} 0)`);
  const x = (t) => left + ((right - left) * (t - x0)) / (x1 - x0), y = (v) => bottom - ((bottom - top) * (v - y0)) / (y1 - y0);
  const step = roundStep(y1 - y0), every = Math.max(1, Math.round(roundStep((x1 - x0) * 0.83)));
  const values = ticksWithin(y0, y1, step);
  const marks = [makeMark("path", { class: "grid", d: values.map((v) => `M${left} ${y(v)}H${right}`).join("") })];
  for (const v of values) marks.push(makeMark("text", { class: "end", x: left - 8, y: y(v) + 4 }, written(v, step, chart.dataset.unit)));
  for (const t of ticksWithin(x0, x1, every)) marks.push(makeMark("text", { class: "middle", x: x(t), y: bottom + 18 }, String(t)));
  chart.querySelector(".axes").replaceChildren(...marks);
  chart.dataset.now = [x0, x1, y0, y1].join(" ");
  if (chart.dataset.now === chart.dataset.view) zooms.delete(nameOf(chart));
  else zooms.set(nameOf(chart), [x0, x1, y0, y1]);
};
// Back to the first view; from there, to all values, if the axis leaves some out.
const resetView = (chart) => {
  const first = numbers(chart.dataset.view).join(" ");
  showView(chart, numbers(viewOf(chart).join(" ") === first ? chart.dataset.whole : chart.dataset.view));
};
const zoomBy = (chart, factor, at) => {
  const [x0, x1, y0, y1] = viewOf(chart), [a0, a1] = numbers(chart.dataset.view);
  const width = Math.min(a1 - a0, Math.max(1, (x1 - x0) * factor)), from = Math.max(a0, Math.min(a1 - width, at - width / 2));
  showView(chart, [from, from + width, y0, y1]);
};
const restoreZooms = () => {
  for (const chart of document.querySelectorAll("svg[data-view]")) {
    if (zooms.has(nameOf(chart))) showView(chart, zooms.get(nameOf(chart)));
  }
};

addEventListener("pointerdown", (event) => {
  const chart = event.pointerType === "mouse" && event.button === 0 ? event.target.closest?.("svg[data-view]") : null;
  if (!chart) return;
  const [x, y] = inChart(chart, event), [left, right, top, bottom] = numbers(chart.dataset.box);
  if (x >= left && x <= right && y >= top && y <= bottom) drag = { chart, x, y, box: null };
});
addEventListener("pointermove", (event) => {
  if (!drag) return;
  const [left, right, top, bottom] = numbers(drag.chart.dataset.box), [px, py] = inChart(drag.chart, event);
  const x = Math.max(left, Math.min(right, px)), y = Math.max(top, Math.min(bottom, py));
  if (!drag.box && Math.abs(x - drag.x) < 6) return;
  drag.box ??= drag.chart.appendChild(makeMark("rect", { class: "selection" }));
  const tall = Math.abs(y - drag.y) >= 20; // a flat selection chooses rounds only
  drag.range = [Math.min(x, drag.x), Math.max(x, drag.x), tall ? Math.min(y, drag.y) : top, tall ? Math.max(y, drag.y) : bottom];
  const [a, b, c, d] = drag.range;
  for (const [key, value] of Object.entries({ x: a, y: c, width: b - a, height: d - c })) drag.box.setAttribute(key, value);
  show(null);
});
const endDrag = () => {
  if (drag?.box) {
    drag.box.remove();
    const [left, right, top, bottom] = numbers(drag.chart.dataset.box), [x0, x1, y0, y1] = viewOf(drag.chart);
    const [a, b, c, d] = drag.range, t = (x) => x0 + ((x1 - x0) * (x - left)) / (right - left);
    const v = (y) => y0 + ((y1 - y0) * (bottom - y)) / (bottom - top);
    if (t(b) - t(a) >= 0.5) showView(drag.chart, [t(a), t(b), v(d), v(c)]);
  }
  drag = null;
};
addEventListener("pointerup", endDrag);
addEventListener("pointercancel", endDrag);
addEventListener("dblclick", (event) => {
  const chart = event.target.closest?.("svg[data-view]");
  if (chart) resetView(chart);
});
addEventListener("keydown", (event) => {
  const chart = document.activeElement;
  if (!chart.matches("svg[data-view]") || event.ctrlKey || event.metaKey) return;
  const [x0, x1] = viewOf(chart), told = mark && chart.contains(mark) ? Number(mark.dataset.tip.match(/\d+/)[0]) : (x0 + x1) / 2;
  if (event.key === "0") resetView(chart);
  else if (event.key === "+" || event.key === "=") zoomBy(chart, 0.5, told);
  else if (event.key === "-") zoomBy(chart, 2, told);
});
