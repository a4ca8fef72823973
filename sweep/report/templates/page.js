// Draw the charts, let one row of buttons select batch sizes in all of them, and fold details.
"use strict";
const { charts, colors } = JSON.parse(document.getElementById("charts").textContent);
const views = [];
const config = {
  background: null,
  font: "system-ui, sans-serif",
  view: { stroke: null },
  axis: {
    domainColor: "currentColor", gridColor: "currentColor", gridOpacity: 0.15,
    labelColor: "currentColor", labelFontSize: 12, labelOverlap: true, labelSeparation: 4, tickColor: "currentColor",
    titleColor: "currentColor", titleFontSize: 12, titleFontWeight: "normal",
  },
  legend: { symbolOpacity: 1, labelColor: "currentColor", labelFontSize: 12, symbolStrokeColor: "currentColor",
    symbolBaseFillColor: "currentColor" },
  title: { anchor: "start", color: "currentColor", fontSize: 13 },
  line: { color: "currentColor" },
  rule: { color: "currentColor" },
  rect: { color: "currentColor" },
};
const options = {
  actions: { export: true, source: false, compiled: false, editor: false },
  config, renderer: "svg", tooltip: { theme: "custom" },
};

async function draw() {
  const drawn = [];
  for (const [name, panels] of Object.entries(charts)) {
    const figure = document.getElementById(`chart-${name}`);
    for (const [index, panel] of panels.entries()) {
      const element = figure.querySelectorAll(".panel")[index];
      drawn.push(embedChart(element, panel, { ...options, downloadFileName: `${name}-${index + 1}` })
        .then((result) => views.push(result.view)));
    }
  }
  await Promise.all(drawn);
  document.documentElement.dataset.charts = views.length;
}

function printWhole() {
  addEventListener("beforeprint", () => { for (const view of views) view.width(330).run(); });
  addEventListener("afterprint", () => dispatchEvent(new Event("resize")));
}

function addSelection() {
  const sizes = Object.keys(colors).map(Number), shown = new Set(sizes);
  const controls = document.getElementById("selection");
  for (const size of sizes) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = size;
    button.style.setProperty("--color", colors[size]);
    button.setAttribute("aria-pressed", "true");
    button.addEventListener("click", () => {
      shown.has(size) ? shown.delete(size) : shown.add(size);
      button.setAttribute("aria-pressed", shown.has(size));
      for (const view of views) view.signal("shown", [...shown]).runAsync();
    });
    controls.append(button);
  }
  controls.hidden = sizes.length < 2 || !Object.keys(charts).length;
}

function foldDetails() {
  for (const heading of document.querySelectorAll("main h4")) {
    const details = document.createElement("details");
    const summary = document.createElement("summary");
    let next = heading.nextSibling;
    heading.replaceWith(details);
    summary.append(heading);
    details.append(summary);
    while (next && !/^H[1-4]$/.test(next.nodeName)) {
      const following = next.nextSibling;
      details.append(next);
      next = following;
    }
  }
  const all = document.querySelectorAll("details");
  const open = () => { for (const details of all) details.open = true; };
  addEventListener("beforeprint", open);
  const reveal = () => {
    const details = document.getElementById(location.hash.slice(1))?.closest("details");
    if (details) details.open = true;
  };
  addEventListener("hashchange", reveal);
  reveal();
}

foldDetails();
addSelection();
printWhole();
draw();
