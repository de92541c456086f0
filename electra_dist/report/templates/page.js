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
  function place(panel, step) {
    if (panel.data.flops) return step.toExponential(2).replace("e+", "e") + " FLOPs";
    return "step " + Math.round(step).toLocaleString("en-US");
  }
  function list(panel, step) {
    box.replaceChildren();
    const title = document.createElement("b");
    title.textContent = place(panel, step);
    box.appendChild(title);
    for (const curve of panel.data.lines) {
      const at = nearest(curve.steps, step);
      const row = document.createElement("div");
      const dot = document.createElement("i");
      dot.style.background = `var(${curve.color})`;
      let text = curve.label + " " + number(curve.values[at], panel.data.scale);
      if (curve.smooth) text += " (smoothed " + number(curve.smooth[at], panel.data.scale) + ")";
      const where = place(panel, curve.steps[at]);
      if (where !== place(panel, step)) text += " at " + where;
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
