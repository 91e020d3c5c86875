// Line charts. The head is both legend and readout, so nothing floats and the layout never shifts.
//
// spec: {id, title, series: [{name, label, color, digits, kind}], breaks, restarts, limits, zero, smooth, band, stacked, suffix}
// A series may also have `times`, a factor for its values, and `scaled_name`, its name after scaling.
// kind: "dots"; "low" and "high" in succession are the edges of a band. stacked: each line is drawn on top of the previous one.
// Charts over time instead of steps (times.js) also have: x, span(), y, bare, under(u, chart).
// on: {zoom(range, kind), log(on), smooth(share), reread()}; the owner applies the user's choice by calling choose().
import { Curve } from "./curves.js";
import { dataOf, linesOf, plotOf } from "./lines.js";
import { Range } from "./ranges.js";
import { Readout } from "./readout.js";
import { count, measure } from "./words.js";

const FRAME_MS = 250; // four redraws a second at most
const KEYS = new Set(["ArrowLeft", "ArrowRight", "Home", "End", "+", "-", "l", "Escape"]);
const MOST_POINTS = 12_000; // with more points, fetch the server's downsampled envelope again

export class Chart {
  constructor(figure, spec, on) {
    Object.assign(this, { figure, spec, on });
    this.plot = figure.querySelector(".plot");
    this.curves = new Map(); // full range, by name
    this.ghosts = []; // superseded stretches, painted beneath the lines
    this.view = null; // while zoomed: {from, to}, plus curves and ghosts once the server has answered
    this.log = false;
    this.range = new Range();
    this.isCoarse = false; // low-resolution preview, soon replaced
    this.visible = true;
    this.lines = linesOf(spec);
    this.readout = new Readout(figure.querySelector(".readout"), this.lines, spec);
    this.tools = figure.querySelector(".tools");
    this.scales = [...(this.tools?.querySelectorAll("[data-scale]") ?? [])];
    this.listen();
  }

  // Apply the user's choice: a range of x or null, the axis, the half-life of smoothing.
  // Return whether data for that range must be fetched.
  choose({ range, log, share }) {
    const moved = !this.isAt(range);
    if (moved) this.view = range && { ...range };
    if (moved || log !== this.wantsLog || share !== this.share) this.range = new Range();
    this.wantsLog = log;
    this.share = share;
    this.updateScale();
    if (this.loaded) this.schedule(0);
    return moved && Boolean(range);
  }

  isAt(range) {
    return this.view?.from === range?.from && this.view?.to === range?.to;
  }

  // Show the server's answer for everything or for a range: [{name, step, value | min, max, mean | median, …}].
  load(items, range) {
    if (range && !this.isAt(range)) return;
    if (range) this.view = { ...this.view, curves: curvesOf(items) };
    else {
      this.curves = curvesOf(items);
      if (this.isCoarse) this.range = new Range();
      this.isCoarse = false;
      this.loaded = true;
    }
    this.schedule(0);
  }

  setGhosts(ghosts, range) {
    if (range && !this.isAt(range)) return;
    (range ? this.view : this).ghosts = ghosts;
    this.schedule(0);
  }

  // Append newer points from a live frame. Return whether they went back to steps that the chart already had.
  append(entries) {
    let back = false;
    for (const entry of entries) {
      const last = this.curves.get(entry.name)?.last ?? null;
      if (last !== null && entry.step[0] <= last) back = true;
      const curve = appendTo(this.curves, entry);
      if (this.view?.curves) appendTo(this.view.curves, within(entry, this.view));
      if (curve.n > MOST_POINTS) this.isOverfull = true;
    }
    this.schedule(FRAME_MS);
    if (this.isOverfull) {
      this.isOverfull = false;
      this.on.reread();
    }
    return back;
  }

  stale(text) {
    this.readout.stale(text);
  }

  // Draw once, within `wait` ms; after the first drawing, only while the chart is visible.
  schedule(wait) {
    if (this.timer && wait) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      this.timer = null;
      if ((this.u && !this.visible) || document.visibilityState !== "visible") this.dirty = true;
      else requestAnimationFrame(() => this.draw());
    }, wait);
  }

  curvesShown() {
    return this.view?.curves ?? this.curves;
  }

  ghostsShown() {
    return this.view?.ghosts ?? this.ghosts;
  }

  hasData() {
    return this.spec.series.some((s) => this.curves.get(s.name)?.n);
  }

  draw() {
    this.dirty = false;
    this.plot.classList.remove("skeleton");
    if (!this.hasData()) {
      this.empty();
      return;
    }
    this.updateScale();
    const { data, gaps } = dataOf(this.spec, this.lines, this.curvesShown(), this.share);
    this.data = data;
    this.gaps = gaps;
    if (!this.u) this.make(data);
    else this.u.setData(data);
    if (this.pinned !== undefined) this.point(this.pinned);
    else this.readout.show(this.data, null, gaps);
    this.readout.showGhostLegend(this.ghostsShown().length > 0);
    this.describe();
  }

  empty() {
    this.destroyPlot();
    if (!this.loaded) return;
    const p = document.createElement("p");
    p.textContent = this.spec.empty;
    this.plot.classList.add("nothing");
    this.plot.replaceChildren(p);
    this.readout.show(null, null);
  }

  make(data) {
    this.plot.classList.remove("nothing");
    this.plot.replaceChildren();
    this.u = plotOf(this, data);
  }

  destroyPlot() {
    this.u?.destroy();
    this.u = null;
  }

  rebuild() {
    this.destroyPlot();
    if (this.hasData()) this.draw();
  }

  // A log axis is available only if every value is above zero.
  updateScale() {
    const positive = this.spec.series.every((s) => !this.curves.get(s.name)?.main.some((v) => v <= 0));
    const log = Boolean(this.wantsLog && positive);
    if (log !== this.log) this.destroyPlot();
    this.log = log;
    if (!this.tools) return;
    this.tools.querySelector("[data-live-edge]").hidden = !this.view;
    const smoothing = this.tools.querySelector("[data-smooth]");
    if (smoothing) smoothing.value = String(this.share);
    for (const button of this.scales) {
      const isLog = button.dataset.scale === "log";
      button.setAttribute("aria-pressed", String(isLog === log));
      button.disabled = isLog && !positive;
    }
  }

  xRange(low, high) {
    if (this.spec.span) return this.spec.span();
    if (this.view) return [this.view.from, this.view.to];
    return high > low ? [low, high] : [low - 0.5, high + 0.5];
  }

  reset() {
    this.on.zoom(null);
  }

  // Synchronised charts show the selection too; only the chart in which it was made zooms.
  select(u) {
    const { left, width } = u.select;
    if (width < 6) return;
    const range = [u.posToVal(left, "x"), u.posToVal(left + width, "x")];
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    if (u.cursor.event) this.on.zoom(range);
  }

  listen() {
    new IntersectionObserver(
      ([entry]) => {
        this.visible = entry.isIntersecting;
        if (this.visible && this.dirty) this.schedule(0);
      },
      { rootMargin: "120px" },
    ).observe(this.plot);
    document.addEventListener("visibilitychange", () => this.dirty && this.schedule(0));
    this.plot.addEventListener("keydown", (event) => this.press(event));
    this.plot.addEventListener("blur", () => this.unpin());
    if (this.tools) this.listenToTools();
  }

  listenToTools() {
    this.tools.addEventListener("click", ({ target: { dataset } }) => {
      if ("liveEdge" in dataset) this.reset();
      else if (dataset.scale) this.on.log(dataset.scale === "log");
    });
    this.tools.addEventListener("change", ({ target }) => this.on.smooth(Number(target.value)));
    const menu = this.tools.querySelector(".menu");
    menu.addEventListener("toggle", async () => (await import("./export.js")).fill(menu, this), { once: true });
  }

  async press(event) {
    if (!this.hasData() || !KEYS.has(event.key) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    (await import("./keys.js")).press(this, event.key, event.shiftKey);
  }

  point(index) {
    const [x] = this.data;
    if (!x.length) return;
    this.u.setCursor({ left: this.u.valToPos(x[Math.min(index, x.length - 1)], "x"), top: 10 }, true, true);
  }

  unpin() {
    if (this.pinned === undefined) return;
    this.pinned = undefined;
    this.readout.stopSpeaking();
    this.u?.setCursor({ left: -10, top: -10 }, true, true);
  }

  resize() {
    if (this.u && this.u.width !== this.plot.clientWidth)
      this.u.setSize({ width: this.plot.clientWidth, height: this.plot.clientHeight });
  }

  // Summarise the chart in one sentence for screen readers.
  describe() {
    const { series, xunit = "step" } = this.spec;
    const { name, times = 1 } = series.find(({ kind }) => kind !== "low" && kind !== "high");
    const curve = this.curves.get(name);
    const ghosts = this.ghosts.map(({ step }) => `${count(step[0])} to ${count(step.at(-1))}`);
    if (!curve?.n || `${curve.n} ${ghosts}` === this.described) return;
    this.described = `${curve.n} ${ghosts}`;
    const ends = [curve.main.find(Number.isFinite) * times, curve.main.findLast(Number.isFinite) * times];
    const at = this.spec.x?.form ?? ((step) => `${xunit} ${step}`);
    const finding = `${this.spec.title}: from ${measure(ends[0])} at ${at(curve.first)} to ${measure(ends[1])} at ${at(curve.last)}.`;
    const again = ghosts.length ? ` Repeated: ${xunit}s ${[...new Set(ghosts)].join(", ")}.` : "";
    const keys = this.spec.bare ? "" : " Arrow keys read points, plus and minus zoom.";
    this.plot.setAttribute("aria-label", `${finding}${again}${keys}`);
  }
}

// Convert the API's answer into curves by name.
function curvesOf(items) {
  const curves = new Map();
  for (const item of items) {
    const columns = {};
    for (const name of ["value", "min", "max", "mean", "median"]) if (item[name]) columns[name] = item[name];
    if (item.worst_rank) columns.worst = item.worst_rank;
    const curve = Curve.of(item.step, columns);
    curve.gaps = item.gaps || [];
    curves.set(item.name, curve);
  }
  return curves;
}

// Merge newer points into the curve of their name. In an envelope, a single value fills all three columns.
function appendTo(curves, { name, step, columns }) {
  if (!curves.has(name)) curves.set(name, new Curve(Object.keys(columns)));
  const curve = curves.get(name);
  const { value } = columns;
  curve.merge(step, value && !("value" in curve.columns) ? { min: value, max: value, mean: value } : columns);
  return curve;
}

function within({ name, step, columns }, { from, to }) {
  const inside = (column) => column.filter((_, i) => step[i] >= from && step[i] <= to);
  const inRange = Object.entries(columns).map(([key, column]) => [key, inside(column)]);
  return { name, step: inside(step), columns: Object.fromEntries(inRange) };
}
