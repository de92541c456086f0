"""Hold the style sheet and the script of the report pages.

Style: light or dark by the reader's preference, one column on a phone.

Script: it shows the values of a diagram's curves at the step under the pointer. Each diagram is followed by a JSON
element with the positions of its axes and the points of its curves (`curves.DrawnPanel.hover`). The script finds the
nearest point of each curve, marks it, and lists its value. The vertical line is drawn in all diagrams at once. Without
scripts, the page shows everything except these values.
"""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #374151; --strong: #111827; --soft: #6b7280;
  --grid: #e5e7eb; --series-1: #2563eb; --series-2: #ea580c;
  --series-3: #15803d; --series-4: #7c3aed; --series-5: #b91c1c; --series-6: #0891b2; --series-7: #a16207;
  --series-8: #db2777; --good: #15803d; --bad: #b91c1c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f1216; --card: #181c22; --ink: #c3cad5; --strong: #f3f4f6; --soft: #8b95a5;
    --grid: #2b313b; --series-1: #6ea8fe; --series-2: #fb9a5b;
    --series-3: #4ade80; --series-4: #b79bff; --series-5: #f87171; --series-6: #4fd1e8; --series-7: #e0b64a;
    --series-8: #f58bbd; --good: #4ade80; --bad: #f87171;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 60px; }
header h1 { margin: 0; color: var(--strong); font-size: 26px; line-height: 1.2; overflow-wrap: anywhere; }
header p { margin: 6px 0 0; color: var(--soft); }
.state { font-weight: 600; color: var(--strong); }
.state.done { color: var(--good); }
.state.crash { color: var(--bad); }
h2 { margin: 34px 0 12px; font-size: 17px; color: var(--strong); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(158px, 1fr)); gap: 10px; margin-top: 22px; }
.tile, .card { background: var(--card); border: 1px solid var(--grid); border-radius: 10px; }
.tile { padding: 12px 14px; }
.tile .name { display: block; font-size: 12.5px; color: var(--soft); }
.tile .value { display: block; font-size: 22px; line-height: 1.3; font-weight: 600; color: var(--strong); }
.tile .more { display: block; font-size: 12px; color: var(--soft); }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 12px; }
.curves .card { padding: 10px 12px 6px; min-width: 0; }
.curves svg { display: block; width: 100%; height: auto; }
.curves svg text { font-family: inherit !important; }
.curves svg { touch-action: pan-y; }
.values {
  position: fixed; z-index: 1; max-width: 340px; padding: 7px 10px; pointer-events: none; font-size: 12.5px;
  background: var(--card); color: var(--ink); border: 1px solid var(--soft); border-radius: 8px;
  box-shadow: 0 4px 14px rgb(0 0 0 / 0.18); font-variant-numeric: tabular-nums;
}
.values i, .chip i { display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin-right: 6px; }
.chips { margin: 14px 0 0; }
.chip { display: inline-block; margin-right: 18px; font-weight: 600; color: var(--strong); }
.samples { padding: 4px 16px; line-height: 1.8; }
.samples u { text-decoration-thickness: 2px; text-underline-offset: 3px; }
.samples span, .samples u { border-radius: 3px; padding: 1px 0; }
.samples s { color: var(--soft); font-size: 13px; }
.card.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 14px; text-align: right; white-space: nowrap; border-top: 1px solid var(--grid); }
tr:first-child > * { border-top: 0; }
th { font-weight: 600; color: var(--soft); }
.left th, .left td, th:first-child, td:first-child { text-align: left; }
.left td:last-child { white-space: normal; min-width: 10em; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr)); gap: 12px; }
details summary { cursor: pointer; padding: 10px 14px; color: var(--strong); font-weight: 600; }
pre { margin: 0; padding: 4px 14px 14px; overflow-x: auto; font: 12.5px/1.45 ui-monospace, Menlo, monospace; }
p.note { color: var(--soft); font-size: 13px; margin: 8px 2px; }
@media (max-width: 480px) {
  main { padding: 18px 12px 40px; }
  header h1 { font-size: 22px; }
  .tiles { grid-template-columns: 1fr 1fr; }
  .tile .value { font-size: 19px; }
}
@media print { body { background: #fff; } .card, .tile { break-inside: avoid; } }
"""

SCRIPT = """
(function () {
  "use strict";
  const svgName = "http://www.w3.org/2000/svg";
  const panels = [];
  const box = document.createElement("div");
  box.className = "values";
  box.hidden = true;
  document.body.appendChild(box);

  function element(name, attributes) {
    const node = document.createElementNS(svgName, name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    return node;
  }
  function nearest(steps, step) {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle; else high = middle;
    }
    return step - steps[low] <= steps[high] - step ? low : high;
  }
  function number(value, scale) {
    if (scale === "percent") return (100 * value).toFixed(1) + " %";
    if (scale === "scientific" && value !== 0) return value.toExponential(2);
    if (Math.abs(value) >= 10000) return Math.round(value).toLocaleString("en-US");
    return String(Number(value.toPrecision(4)));
  }
  function xOf(data, step) {
    const [left, right, first, last] = data.x;
    return left + (step - first) / (last - first) * (right - left);
  }
  function yOf(data, value) {
    let [bottom, top, low, high] = data.y;
    if (data.log) [low, high, value] = [Math.log(low), Math.log(high), Math.log(value)];
    return bottom + (value - low) / (high - low) * (top - bottom);
  }
  function mark(panel, step) {
    panel.marks.replaceChildren();
    const x = xOf(panel.data, step);
    if (x < panel.data.x[0] || x > panel.data.x[1]) return;
    const line = {x1: x, x2: x, y1: panel.data.y[0], y2: panel.data.y[1], stroke: "var(--soft)", "stroke-width": 0.6};
    panel.marks.appendChild(element("line", line));
    for (const curve of panel.data.lines) {
      const at = nearest(curve.steps, step);
      const value = (curve.smooth || curve.values)[at];
      const point = {cx: xOf(panel.data, curve.steps[at]), cy: yOf(panel.data, value), r: 2};
      panel.marks.appendChild(element("circle", {...point, fill: `var(${curve.color})`}));
    }
  }
  function list(panel, step) {
    box.replaceChildren();
    const title = document.createElement("b");
    title.textContent = "step " + Math.round(step).toLocaleString("en-US");
    box.appendChild(title);
    for (const curve of panel.data.lines) {
      const at = nearest(curve.steps, step);
      const row = document.createElement("div");
      const dot = document.createElement("i");
      dot.style.background = `var(${curve.color})`;
      let text = curve.label + " " + number(curve.values[at], panel.data.scale);
      if (curve.smooth) text += " (smoothed " + number(curve.smooth[at], panel.data.scale) + ")";
      if (curve.steps[at] !== Math.round(step)) text += " at " + curve.steps[at].toLocaleString("en-US");
      row.append(dot, text);
      box.appendChild(row);
    }
  }
  function leave() {
    box.hidden = true;
    for (const panel of panels) panel.marks.replaceChildren();
  }
  function move(panel, event) {
    const svg = panel.svg.getBoundingClientRect();
    const [left, right, first, last] = panel.data.x;
    const x = (event.clientX - svg.left) / svg.width * panel.svg.viewBox.baseVal.width;
    if (x < left || x > right) { leave(); return; }
    let step = first + (x - left) / (right - left) * (last - first);
    const longest = panel.data.lines.reduce((a, b) => a.steps.length >= b.steps.length ? a : b);
    step = longest.steps[nearest(longest.steps, step)];
    for (const other of panels) mark(other, step);
    list(panel, step);
    box.hidden = false;
    const width = box.offsetWidth, height = box.offsetHeight;
    const toLeft = event.clientX + 16 + width > document.documentElement.clientWidth;
    const above = event.clientY + 16 + height > document.documentElement.clientHeight;
    box.style.left = Math.max(4, toLeft ? event.clientX - 16 - width : event.clientX + 16) + "px";
    box.style.top = Math.max(4, above ? event.clientY - 16 - height : event.clientY + 16) + "px";
  }
  for (const holder of document.querySelectorAll('.curves script[type="application/json"]')) {
    const svg = holder.parentNode.querySelector("svg");
    const panel = {svg: svg, data: JSON.parse(holder.textContent), marks: element("g", {"pointer-events": "none"})};
    svg.appendChild(panel.marks);
    svg.addEventListener("pointermove", (event) => move(panel, event));
    svg.addEventListener("pointerdown", (event) => move(panel, event));
    svg.addEventListener("pointerleave", leave);
    panels.push(panel);
  }
})();
"""
