"use strict";
// A case's page: rows of its nights for each chart, its controls, and the facts of one night.
(() => {
  const groups = [...document.querySelectorAll(".figures[data-key]")];
  const section = document.getElementById("night");
  const data = window.reproData[section.dataset.key];
  const { nights, changes, charts, texts } = data;
  const { text } = window.reproCharts;
  const count = nights.at.length;
  const told = (column, i) => texts[nights[column][i]];
  const time = (seconds) => `${new Date(1000 * seconds).toISOString().slice(0, 16).replace("T", " ")} UTC`;
  const date = (seconds) => time(seconds).slice(0, 10);
  const short = (commit) => (/^[0-9a-f]{40}$/.test(commit) ? commit.slice(0, 10) : commit);
  const shown = (value) => (typeof value === "number" ? String(Number(value.toPrecision(7))) : value ?? "-");

  const statistic = document.getElementById("statistic");
  const span = document.getElementById("span");
  const begin = () => {
    const wanted = Number(span.value);
    const dates = [...new Set(nights.at.map(date))];
    return wanted && dates.length > wanted ? Date.parse(dates[dates.length - wanted]) / 1000 : -Infinity;
  };

  const edges = { edge_nan: "NaN", edge_above: "+inf", edge_below: "-inf" }; // layers of the charts
  const special = { NaN: "NaN", Infinity: "+inf", "-Infinity": "-inf" };
  const rowsOf = (name) => {
    const columns = charts[name].values;
    const values = columns.value ?? columns[statistic.value];
    const from = begin();
    const rows = [];
    const last = new Map(); // machine -> its row before
    for (let i = 0; i < count; i += 1) {
      if (nights.at[i] < from) continue;
      const value = values[i];
      const row = {
        at: 1000 * nights.at[i],
        night: time(nights.at[i]),
        machine: told("machine", i),
        status: told("status", i),
        commit: `${short(told("commit", i))} ${told("subject", i)}`,
        value: typeof value === "number" ? value : null,
        special: special[value] ?? null,
        shown: special[value] ?? shown(value),
        dot: told("status", i) !== "green",
      };
      // A value between two gaps makes no line: it gets a dot.
      const before = last.get(row.machine);
      row.alone = row.value !== null && (!before || before.value === null);
      if (before && before.alone && row.value === null) before.dot = true;
      last.set(row.machine, row);
      rows.push(row);
    }
    for (const row of last.values()) if (row.alone) row.dot = true;
    return rows;
  };
  const marksOf = () => {
    const from = begin();
    return changes.at.flatMap((at, i) => (at < from ? [] : [{
      at: 1000 * at, night: `${time(at)}, ${texts[changes.machine[i]]}`, status: texts[changes.status[i]],
      what: texts[changes.what[i]],
    }]));
  };
  // A layer without rows would have no extent: it is left out. Without any value the axis has no numbers.
  const fitted = (spec, log, rows, marks, width) => {
    const copy = structuredClone(spec);
    const some = rows.some((row) => row.value !== null);
    const kept = (name) => (name === "changes" ? marks.length : name === "marks" ? some : rows.some((r) => r.special === edges[name]));
    copy.layer = copy.layer.filter((layer) => !layer.name || kept(layer.name));
    const days = [...new Map(rows.map((row) => [row.night.slice(0, 10), row.at])).values()];
    const every = Math.ceil(days.length / Math.max(2, Math.floor(width / 80)));
    const ticks = days.filter((_, i) => (days.length - 1 - i) % every === 0); // the last night has one
    for (const { encoding } of copy.layer) {
      encoding.x.axis.values = { expr: JSON.stringify(ticks) }; // as numbers: the interpreter takes datetime(1) for a year
      if (encoding.color?.field === "machine") encoding.color.scale = { domain: data.machines };
      if (encoding.y?.field !== "value") continue;
      if (log) encoding.y.scale = { type: "log", padding: 8 }; // `zero` is for linear ones
      if (!some) Object.assign(encoding.y, { scale: { domain: [0, 1] }, axis: { labels: false, ticks: false } });
    }
    return copy;
  };

  const all = [];
  for (const figure of groups.flatMap((group) => [...group.querySelectorAll("figure")])) {
    const name = figure.dataset.chart;
    const { spec, unit } = charts[name];
    const log = figure.querySelector("[data-log]");
    all.push(figure);
    window.reproCharts.add(figure, () => {
      const rows = rowsOf(name);
      const odd = rows.filter((row) => row.special);
      const edge = figure.querySelector(".edge");
      edge.hidden = !odd.length;
      edge.textContent = ["NaN", "+inf", "-inf"].flatMap((kind) => {
        const n = odd.filter((row) => row.special === kind).length;
        return n ? [`${kind} on ${n} ${n === 1 ? "night" : "nights"}`] : [];
      }).join(", ");
      const changed = marksOf();
      return {
        spec: fitted(spec, log?.getAttribute("aria-pressed") === "true", rows, changed, figure.clientWidth),
        datasets: { nights: rows, changes: changed },
        head: ["night", "machine", "status", unit ? `${name}, ${unit}` : name, "commit"],
        rows: () => rows.slice().reverse().map((r) => [r.night, r.machine, r.status, r.shown, r.commit]),
      };
    });
    log?.addEventListener("click", () => {
      log.setAttribute("aria-pressed", String(log.getAttribute("aria-pressed") !== "true"));
      window.reproCharts.refresh(figure);
    });
  }
  for (const control of [statistic, span]) {
    control.addEventListener("change", () => all.forEach(window.reproCharts.refresh));
  }

  // -- one night

  const title = document.getElementById("night-title");
  const facts = document.getElementById("night-facts");
  const link = (commit) => {
    const base = section.dataset.repository;
    if (!base || !/^[0-9a-f]{40}$/.test(commit)) return text("code", short(commit));
    const made = text("a", short(commit));
    made.href = `${base}/commit/${commit}`;
    return made;
  };
  const chip = (status) => text("span", status, `chip s-${status.replace(" ", "-")}`);
  const fact = (name, ...parts) => {
    const value = document.createElement("dd");
    value.append(...parts);
    facts.append(text("dt", name), value);
  };
  let at = count - 1;
  const same = (by) => {
    for (let i = at + by; i >= 0 && i < count; i += by) if (nights.machine[i] === nights.machine[at]) return i;
    return -1;
  };
  const show = () => {
    title.textContent = `Night of ${time(nights.at[at])}`;
    facts.replaceChildren();
    fact("Judged", chip(told("status", at)), ` ${time(nights.at[at])} on ${told("machine", at)}`);
    fact("Commit", link(told("commit", at)), ` ${told("subject", at)}`, text("span", ` ${told("author", at).replace(/\s*<[^<>]*>$/, "")}`, "soft"));
    const baseline = told("baseline", at);
    const kind = told("kind", at);
    if (kind !== "none") fact("Baseline", `${kind} `, baseline ? link(baseline) : "");
    if (told("chain", at)) fact("Chain", text("code", told("chain", at)));
    const checks = nights.checks[at].map((n) => texts[n]);
    const list = document.createElement("ul");
    for (let i = 0; i < checks.length; i += 3) {
      const item = text("li", `${checks[i]}: `);
      item.append(text("span", checks[i + 1], `said s-${checks[i + 1].replace(" ", "-")}`), `; ${checks[i + 2]}`);
      list.append(item);
    }
    if (checks.length) fact("Checks", list);
    if (told("looked", at)) fact("Looked at", told("looked", at));
    if (told("page", at)) {
      const more = text("a", "how its numbers differ from the baseline's");
      more.href = `../comparisons/${encodeURIComponent(told("page", at))}.html`;
      fact("Comparison", more);
    }
    if (told("reproduce", at)) fact("Reproduce", text("code", told("reproduce", at)));
    document.getElementById("earlier").disabled = same(-1) < 0;
    document.getElementById("later").disabled = same(1) < 0;
    section.hidden = false;
  };
  const go = (by) => {
    at = same(by);
    history.replaceState(null, "", `#n-${nights.key[at]}`);
    show();
  };
  document.getElementById("earlier").addEventListener("click", () => go(-1));
  document.getElementById("later").addEventListener("click", () => go(1));
  const read = () => {
    const asked = /^#n-([0-9a-f]+)$/.exec(location.hash);
    const found = asked ? nights.key.indexOf(asked[1]) : -1;
    if (found >= 0) at = found;
    show();
    if (found >= 0) title.focus();
  };
  addEventListener("hashchange", read);
  read();
})();
