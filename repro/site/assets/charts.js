"use strict";
// Draws the charts that come near the screen, in the colours of the present scheme, and fills their tables.
window.reproCharts = (() => {
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const makers = new Map(); // figure -> () => {spec, datasets, head, rows}
  const views = new Map(); // figure -> the drawn view
  const text = (tag, content, name) => {
    const made = document.createElement(tag);
    made.textContent = content;
    if (name) made.className = name;
    return made;
  };

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const coloured = (spec) =>
    JSON.parse(JSON.stringify(spec).replace(/var\((--[a-z0-9-]+)\)/g, (_, name) => colour(name)));
  const theme = () => {
    const [ink, soft, line] = ["--ink", "--soft", "--line"].map(colour);
    const small = { labelColor: soft, titleColor: soft, labelFontSize: 11, titleFontSize: 11, titleFontWeight: 500 };
    return {
      background: null,
      font: getComputedStyle(document.body).fontFamily,
      view: { stroke: null },
      axis: { ...small, gridColor: line, domainColor: line, tickColor: line, titlePadding: 8 },
      legend: { ...small, labelColor: ink, symbolStrokeWidth: 2, offset: 6, rowPadding: 1 },
      range: { category: [1, 2, 3, 4, 5, 6].map((n) => colour(`--series-${n}`)) },
    };
  };
  const options = {
    ast: true, // expressions are interpreted: the page's policy forbids eval
    renderer: "svg",
    actions: false,
    defaultStyle: false,
    tooltip: { disableDefaultStyle: true },
  };

  const draw = async (figure) => {
    const { spec, datasets } = makers.get(figure)();
    const whole = { ...coloured(spec), datasets: { ...spec.datasets, ...datasets }, config: theme() };
    const earlier = views.get(figure);
    const token = {};
    views.set(figure, token);
    const result = await vegaEmbed(figure.querySelector(".chart"), whole, options);
    if (earlier && earlier.finalize) earlier.finalize();
    if (views.get(figure) === token) views.set(figure, result);
    figure.dataset.drawn = scheme.matches ? "dark" : "light";
    performance.mark("chart drawn");
  };
  const fill = (figure) => {
    const region = figure.querySelector(".data .region");
    const { head, rows } = makers.get(figure)();
    const table = text("table", "", "list");
    const top = table.createTHead().insertRow();
    head.forEach((name) => { const th = text("th", name); th.scope = "col"; top.append(th); });
    const body = table.createTBody();
    rows().forEach((row) => {
      const line = body.insertRow();
      row.forEach((value) => line.append(text("td", value ?? "-", typeof value === "number" ? "num" : "")));
    });
    region.replaceChildren(table);
  };
  const refresh = (figure) => {
    if (views.has(figure)) draw(figure);
    if (figure.querySelector(".data").open) fill(figure);
  };

  const near = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (!entry.isIntersecting) return;
    near.unobserve(entry.target);
    draw(entry.target);
  }), { rootMargin: "200px" });
  scheme.addEventListener("change", () => [...views.keys()].forEach(draw));

  const add = (figure, make) => {
    makers.set(figure, make);
    figure.querySelector(".data").addEventListener("toggle", (event) => { if (event.target.open) fill(figure); });
    near.observe(figure);
  };
  return { add, refresh, text };
})();

// Comparisons: each chart has its own columns.
for (const group of document.querySelectorAll(".figures.mixed")) {
  const { charts } = window.reproData[group.dataset.key];
  for (const figure of group.querySelectorAll("figure")) {
    const { spec, columns, head } = charts[figure.dataset.chart];
    const names = Object.keys(columns);
    const count = columns[names[0]].length;
    const rows = Array.from({ length: count }, (_, i) => Object.fromEntries(names.map((n) => [n, columns[n][i]])));
    window.reproCharts.add(figure, () => ({
      spec,
      datasets: { rows },
      head: head.map(([, title]) => title),
      rows: () => rows.map((row) => head.map(([name]) => row[name])),
    }));
  }
}
