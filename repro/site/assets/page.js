"use strict";
// The overview: arrow keys move in the table, and the legend's buttons show only the rows that hold a status.
(() => {
  const table = document.getElementById("matrix");
  if (!table) return;
  const rows = [...table.tBodies[0].rows];
  const inside = (row) => [...row.cells].map((cell) => cell.firstElementChild);
  const all = rows.map(inside);

  // One stop for the Tab key in the whole table; without this script every link is a stop.
  let here = [0, Math.min(1, all[0].length - 1)];
  all.flat().forEach((item) => { item.tabIndex = -1; });
  all[here[0]][here[1]].tabIndex = 0;

  const place = (row, column, focus) => {
    all[here[0]][here[1]].tabIndex = -1;
    here = [row, column];
    const item = all[row][column];
    item.tabIndex = 0;
    if (focus) {
      item.focus({ preventScroll: true });
      const region = document.getElementById("region");
      const head = rows[row].cells[0].offsetWidth;
      const cell = item.parentElement;
      if (column > 0) { // the sticky heading must not cover the cell
        const left = cell.offsetLeft - head - 4;
        const right = cell.offsetLeft + cell.offsetWidth + 4 - region.clientWidth;
        region.scrollLeft = Math.max(right, Math.min(region.scrollLeft, left));
      }
      item.scrollIntoView({ block: "nearest", inline: column > 0 ? "nearest" : "end" });
    }
  };
  const step = (row, by) => {
    for (let next = row + by; next >= 0 && next < rows.length; next += by) if (!rows[next].hidden) return next;
    return row;
  };
  const edge = (by) => step(by > 0 ? -1 : rows.length, by);

  table.addEventListener("keydown", (event) => {
    if (event.altKey || event.metaKey) return;
    const [row, column] = here;
    const last = all[row].length - 1;
    const whole = event.ctrlKey;
    const moves = {
      ArrowLeft: () => [row, Math.max(0, column - 1)],
      ArrowRight: () => [row, Math.min(last, column + 1)],
      ArrowUp: () => [step(row, -1), column],
      ArrowDown: () => [step(row, 1), column],
      Home: () => [whole ? edge(1) : row, 0],
      End: () => [whole ? edge(-1) : row, last],
    };
    if (!moves[event.key] || (whole && event.key.startsWith("Arrow"))) return;
    event.preventDefault();
    place(...moves[event.key](), true);
  });
  table.addEventListener("focusin", (event) => {
    const cell = event.target.closest("th, td");
    const row = cell ? rows.indexOf(cell.parentElement) : -1;
    if (row >= 0) place(row, cell.cellIndex, false);
  });

  const buttons = [...document.querySelectorAll("button[data-status]")];
  const said = document.getElementById("said");
  const filter = () => {
    const wanted = buttons.filter((b) => b.getAttribute("aria-pressed") === "true").map((b) => b.dataset.status);
    const match = (cell) => wanted.some((status) => cell.classList.contains(`s-${status}`));
    let left = 0;
    rows.forEach((row) => {
      const cells = [...row.cells].slice(1);
      row.hidden = wanted.length > 0 && !cells.some(match);
      left += row.hidden ? 0 : 1;
      cells.forEach((cell) => cell.classList.toggle("dim", wanted.length > 0 && !match(cell)));
    });
    said.textContent = wanted.length ? `${left} of ${rows.length} rows` : "";
    if (rows[here[0]].hidden && left) place(edge(1), here[1], false);
    const hash = wanted.length ? `#status=${wanted.join(",")}` : "";
    history.replaceState(null, "", hash || location.pathname.split("/").pop());
    document.querySelectorAll(".seg a").forEach((a) => { a.href = a.getAttribute("href").split("#")[0] + hash; });
  };
  buttons.forEach((button) => button.addEventListener("click", () => {
    button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
    filter();
  }));
  const asked = /^#status=([a-z,-]+)$/.exec(location.hash);
  if (asked) {
    const names = asked[1].split(",");
    buttons.forEach((b) => b.setAttribute("aria-pressed", String(names.includes(b.dataset.status) && !b.disabled)));
    filter();
  }
})();
