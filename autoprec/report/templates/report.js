"use strict";
// Draws the figures in the colours of the style sheet: light, dark, and on paper.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const places = Array.from(document.querySelectorAll("[data-figure]"));
  const touch = matchMedia("(pointer: coarse)").matches;
  const config = { displayModeBar: false };
  const LIGHT_TILE = "#e4e7ec";
  const PAPER_WIDTH = 680;
  const NARROW = 520;

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const layoutOf = (figure, width, height) => {
    const [ink, soft, grid, paper] = ["--ink", "--soft", "--grid", "--paper"].map(colour);
    const layout = structuredClone(figure.layout);
    layout.font.color = ink;
    layout.paper_bgcolor = paper;
    layout.hoverlabel = { align: "left" };
    if (touch) layout.dragmode = false; // a finger scrolls the page
    for (const key of Object.keys(layout).filter((name) => /^[xy]axis/.test(name))) {
      Object.assign(layout[key], { gridcolor: grid, linecolor: grid, tickcolor: grid });
    }
    for (const note of layout.annotations || []) note.font = Object.assign({}, note.font, { color: soft });
    if (width < NARROW) {
      layout.font.size = 10;
      layout.margin = Object.assign(layout.margin, { l: Math.min(40, layout.margin.l), r: Math.min(8, layout.margin.r) });
    }
    return Object.assign(layout, { width, height });
  };

  const draw = (width) => Promise.all(places.map((place) => {
    const figure = figures[place.dataset.figure];
    const room = width || place.clientWidth;
    const data = structuredClone(figure.data);
    for (const trace of data.filter((one) => one.type === "treemap")) {
      trace.marker.line.color = colour("--edge");
      trace.marker.colors = trace.marker.colors.map((tile) => (tile === LIGHT_TILE ? colour("--tile") : tile));
    }
    return Plotly.react(place, data, layoutOf(figure, room, figure.layout.height), config);
  }));

  for (const button of document.querySelectorAll("[data-png]")) {
    const place = document.getElementById(`figure-${button.dataset.png}`);
    button.addEventListener("click", () => Plotly.downloadImage(place, { format: "png", scale: 2, filename: button.dataset.png }));
  }

  const ready = () => { document.documentElement.dataset.drawn = String(places.length); };
  draw().then(ready);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => draw(), 150); });
  addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((part) => { part.open = true; });
    draw(PAPER_WIDTH);
  });
  addEventListener("afterprint", () => draw());
})();
