// The map of up to a few hundred nodes: each GPU is an element whose attributes are updated.
const WORDS = {
  busy: "in use",
  wasted: "allocated but idle",
  idle: "free",
  drained: "not schedulable",
  lost: "lost",
  broken: "broken",
  hot: "hot",
  stray: "working but not allocated",
};
const MARKS = { busy: "", wasted: "z", hot: "▲" };
const STEPS = { ArrowLeft: -1, ArrowRight: 1 };

export const useBucket = (percent) => Math.min(8, Math.floor((percent * 9) / 100));
export const heatBucket = (celsius, low, high) =>
  Math.max(0, Math.min(8, Math.floor(((celsius - low) * 9) / (high - low))));

// Derive a GPU's state from its newest values; its owner and how long it has been idle come from the database only.
export function stateOf(before, percent, celsius, limit) {
  if (before === "lost" || before === "broken" || before === "drained") return before;
  if (celsius !== null && celsius >= limit) return "hot";
  return before === "wasted" && percent > 0 ? "busy" : before;
}

export class CellMap {
  constructor(racks, { open, showReadout }) {
    Object.assign(this, { racks, open, showReadout });
    this.low = Number(racks.dataset.low);
    this.high = Number(racks.dataset.high);
    this.rows = [...racks.querySelectorAll("[data-node]")].map((element) => ({
      name: element.dataset.node,
      limit: Number(element.dataset.limit),
      cells: [...element.querySelectorAll(".gpu")],
    }));
    this.byName = new Map(this.rows.map((row) => [row.name, row]));
    this.abort = new AbortController();
    const on = (kind, handler) => racks.addEventListener(kind, handler, { signal: this.abort.signal });
    on("click", (event) => this.clicked(event));
    on("keydown", (event) => this.pressed(event));
    on("pointerover", (event) => this.read(event.target.closest(".gpu"), false));
    on("focusin", (event) => this.read(event.target.closest(".gpu"), true));
    // Roving tabindex: one Tab stop for all cells; arrow keys move between them.
    const cells = this.rows.flatMap((row) => row.cells);
    for (const cell of cells) cell.tabIndex = -1;
    if (cells.length) cells[0].tabIndex = 0;
    for (const cell of cells) if (cell.localName === "i") cell.setAttribute("role", "button");
  }

  close() {
    this.abort.abort();
  }

  // The focused cell as [node, index], to restore the focus after the map is rebuilt.
  place() {
    const cell = document.activeElement?.closest?.(".gpu");
    return cell && this.racks.contains(cell) ? [this.nameOf(cell), cell.dataset.i] : null;
  }

  focus([name, index]) {
    const cell = this.byName.get(name)?.cells.find((candidate) => candidate.dataset.i === index);
    if (cell) this.go(cell);
  }

  apply(lines) {
    for (const { node, gpus } of lines) {
      const row = this.byName.get(node);
      if (!row) continue;
      for (const cell of row.cells) {
        const values = gpus[cell.dataset.i];
        if (values) this.show(cell, values[0], values[2], row.limit);
      }
    }
  }

  show(cell, percent, celsius, limit) {
    put(cell, "use", percent ?? "");
    put(cell, "u", percent === null ? "" : useBucket(percent));
    put(cell, "temp", celsius ?? "");
    put(cell, "t", celsius === null ? "" : heatBucket(celsius, this.low, this.high));
    const state = stateOf(cell.dataset.s, percent, celsius, limit);
    if (state === cell.dataset.s) return;
    cell.dataset.s = state;
    cell.dataset.mark = MARKS[state] ?? "";
  }

  clicked(event) {
    const cell = event.target.closest(".gpu");
    if (!cell || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    this.roam(cell);
    this.open(this.nameOf(cell), cell.dataset.i, cell.getBoundingClientRect());
  }

  pressed(event) {
    const cell = event.target.closest(".gpu");
    if (!cell || event.ctrlKey || event.metaKey || event.altKey) return;
    const next = this.neighbour(cell, event.key);
    if (next) this.go(next);
    else if (event.key === "Enter" || event.key === " ")
      this.open(this.nameOf(cell), cell.dataset.i, cell.getBoundingClientRect());
    else return;
    event.preventDefault();
  }

  neighbour(cell, key) {
    const rows = this.rows.filter((row) => row.cells.length);
    const at = rows.findIndex((row) => row.cells.includes(cell));
    const index = rows[at].cells.indexOf(cell);
    if (STEPS[key]) {
      const cells = rows.flatMap((row) => row.cells);
      return cells[cells.indexOf(cell) + STEPS[key]];
    }
    if (key === "ArrowUp" || key === "ArrowDown") {
      const row = rows[at + (key === "ArrowUp" ? -1 : 1)];
      return row?.cells[Math.min(index, row.cells.length - 1)];
    }
    if (key === "Home") return rows[at].cells[0];
    return key === "End" ? rows[at].cells.at(-1) : null;
  }

  go(cell) {
    this.roam(cell);
    cell.focus();
  }

  roam(cell) {
    for (const stop of this.racks.querySelectorAll('.gpu[tabindex="0"]')) stop.tabIndex = -1;
    cell.tabIndex = 0;
  }

  read(cell, byKey) {
    if (!cell) return;
    const { i, s, use, temp, who } = cell.dataset;
    const parts = [this.nameOf(cell), `GPU ${i}`, WORDS[s], who, use && `${use}\u00a0%`, temp && `${temp}\u00a0°C`];
    if (cell.localName === "i") cell.setAttribute("aria-label", parts.filter(Boolean).join(", "));
    this.showReadout(parts, byKey);
  }

  nameOf(cell) {
    return cell.closest("[data-node]").dataset.node;
  }
}

function put(cell, name, value) {
  const text = String(value);
  if (cell.dataset[name] !== text) cell.dataset[name] = text;
}
