// The head of a chart: legend and readout in one line, with reserved space.
import { count, duration, loss, measure, NBSP } from "./words.js";

export class Readout {
  constructor(element, lines, { xunit = "step", unit = "", suffix = "", x, bare }) {
    this.form = suffix ? (value) => suffixed(value, suffix) : unit === "seconds" ? seconds : measure;
    this.xform = x?.form ?? count;
    this.bare = bare;
    this.element = element;
    this.lines = lines;
    const all = lines.map((line, column) => ({ line, column }));
    this.shown = all.filter(({ line }) => line.kind !== "high" && line.kind !== "fact" && !line.silent);
    this.fact = all.find(({ line }) => line.kind === "fact");
    this.note = this.fact && element.closest("figure").querySelector("h3").appendChild(document.createElement("span"));
    this.at = this.item(x ? "" : xunit, null);
    this.at.span.hidden = Boolean(bare);
    const before = bare && element.textContent; // keep the server's text until there is a curve
    this.cells = this.shown.map(({ line }) => this.item(line.label ?? line.name, line));
    this.late = document.createElement("span");
    this.late.className = "late";
    this.ghost = this.legend(lines[0]);
    if (before) this.cells[0].value.textContent = before;
    element.replaceChildren(this.at.span, ...this.cells.map((cell) => cell.span), this.ghost, this.late);
  }

  item(text, line) {
    const span = document.createElement("span");
    const value = document.createElement("b");
    value.textContent = "–";
    if (line && !this.bare) {
      const swatch = document.createElement("i");
      swatch.dataset.kind = line.kind === "low" ? "band" : line.kind || "line";
      span.className = `s${line.color}`;
      span.append(swatch);
      if (line.kind === "low") value.className = "wide";
    }
    span.append(text && !(line && this.bare) ? `${text} ` : "", value);
    return { span, value };
  }

  // The legend of the wide pale line of superseded steps, if any. Its values are not read out.
  legend(line) {
    const span = document.createElement("span");
    const swatch = document.createElement("i");
    swatch.dataset.kind = "ghost";
    span.className = `s${line.color}`;
    span.append(swatch, "superseded");
    span.hidden = true;
    return span;
  }

  showGhostLegend(hasGhosts) {
    this.ghost.hidden = !hasGhosts;
  }

  // Show the values at an index of the aligned columns; null: the newest of each. `gaps`: where values were not finite.
  show(data, index, gaps = []) {
    if (!data?.[0].length) {
      if (!this.bare) for (const cell of [this.at, ...this.cells]) cell.value.textContent = "–";
      if (this.note) put(this.note, "");
      return;
    }
    const [x, ...columns] = data;
    const i = index ?? x.length - 1;
    put(this.at.value, this.xform(x[i]));
    if (this.note) this.formatFact(columns[this.fact.column], i);
    this.shown.forEach(({ line, column }, n) => {
      const on = (c) => at(columns[c], i, line.kind === "dots" || index === null || index === undefined);
      const read = (c) => (line.kind === "stack" && c ? above(on(c), on(c - 1)) : on(c));
      const form = line.digits === undefined ? this.form : fixed(line.digits);
      const [low, high] = [read(column), line.kind === "low" ? read(column + 1) : null];
      const odd = nonFiniteAt(x, columns[column], i, line.name, gaps);
      put(this.cells[n].value, odd || (high === null ? form(low) : `${form(low)}–${form(high)}`));
      this.cells[n].span.hidden = line.kind === "raw" && !columns[column].some((v) => v !== null && v !== undefined);
    });
  }

  // Show a fact about this point next to the title: "worst r19".
  formatFact(column, index) {
    const value = at(column, index, true);
    put(this.note, value === null ? "" : `${this.fact.line.label} r${count(value)}`);
  }

  stale(text) {
    put(this.late, text);
  }

  announce() {
    this.element.setAttribute("aria-live", "polite");
  }

  stopSpeaking() {
    this.element.removeAttribute("aria-live");
  }
}

const fixed = (digits) =>
  digits === 3
    ? loss
    : (value) => (Number.isFinite(value ?? Number.NaN) ? value.toFixed(digits).replace("-", "−") : measure(value));

// The unit is in the title; values far below one second are shown in milliseconds.
const seconds = (value) => (value !== null && Math.abs(value) < 0.01 ? `${measure(value * 1000)} ms` : measure(value));

const suffixed = (value, suffix) => {
  if (!Number.isFinite(value)) return measure(value);
  return suffix === "s" ? duration(value) : `${measure(value)}${NBSP}${suffix}`;
};

// What one line adds to a stack.
const above = (sum, below) => (sum === null ? null : sum - (below ?? 0));

// The value at the index, or the newest before it: curves have points at different steps.
function at(column, index, backwards) {
  let i = index;
  while (i > 0 && (column[i] === undefined || (backwards && column[i] === null))) i -= 1;
  return column[i] ?? null;
}

// The label of a non-finite value at the index, such as "NaN"; empty for numbers.
function nonFiniteAt(x, column, index, name, gaps) {
  let i = index;
  while (i > 0 && column[i] === undefined) i -= 1;
  if (column[i] !== null) return "";
  return gaps.find(([from, to, , series]) => series === name && from <= x[i] && x[i] <= to)?.[2] ?? "";
}

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
