// Line charts on uPlot (a global). The head is legend and readout in one, so nothing floats and nothing jumps.
//
// spec: {id, title, series: [{name, label, color, digits, kind}], breaks, limits, zero, smooth, band}
// chart(figure, spec, fetchRange) → {load(items), append(entries), stale(text), redraw()}
import { Curve } from "./curves.js";
import { menu } from "./export.js";
import { dataOf, isHidden, linesOf, style } from "./lines.js";
import { forget, paintAttempts, paintGaps, paintLimits, tint, token } from "./paint.js";
import { label, Range } from "./ranges.js";
import { Readout } from "./readout.js";
import { measure } from "./words.js";

const FRAME_MS = 250; // four redraws a second at most
const MOST_POINTS = 12_000; // beyond, the server's envelope is asked for anew

export function chart(figure, spec, fetchRange) {
  return new Chart(figure, spec, fetchRange);
}

class Chart {
  constructor(figure, spec, fetchRange) {
    this.figure = figure;
    this.spec = spec;
    this.fetchRange = fetchRange;
    this.plot = figure.querySelector(".plot");
    this.curves = new Map(); // of everything, by name
    this.view = null; // {from, to, curves} while zoomed
    this.log = false;
    this.range = new Range();
    this.visible = true;
    this.lines = linesOf(spec);
    this.readout = new Readout(figure.querySelector(".readout"), this.lines, spec);
    this.listen();
    menu(this);
  }

  // Everything anew, as the server tells it: [{name, step, value | min, max, mean | median, …}].
  load(items) {
    this.curves = curvesOf(items);
    this.loaded = true;
    this.soon(0);
  }

  // Newer points, from a live frame.
  append(entries) {
    let grew = false;
    for (const entry of entries) {
      const curve = this.curves.get(entry.name) || this.start(entry);
      const columns =
        "value" in curve.columns
          ? { value: entry.value }
          : { ...entry.columns, min: entry.value, max: entry.value, mean: entry.value };
      curve.merge(entry.step, entry.columns || columns);
      grew = true;
      if (curve.n > MOST_POINTS) this.crowded = true;
    }
    if (grew) this.soon(FRAME_MS);
    if (this.crowded && this.reread) {
      this.crowded = false;
      this.reread();
    }
  }

  start(entry) {
    const curve = new Curve(entry.columns ? Object.keys(entry.columns) : ["value"]);
    this.curves.set(entry.name, curve);
    return curve;
  }

  setBreaks(breaks) {
    this.spec.breaks = breaks;
    this.soon(FRAME_MS);
  }

  stale(text) {
    this.readout.stale(text);
  }

  // Draw within `wait` ms, once, and only where somebody can see it.
  soon(wait) {
    if (this.timer) return;
    this.timer = setTimeout(() => {
      this.timer = null;
      if (!this.visible || document.visibilityState !== "visible") this.dirty = true;
      else requestAnimationFrame(() => this.draw());
    }, wait);
  }

  shown() {
    return this.view?.curves || this.curves;
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
    const { data, gaps } = dataOf(this.spec, this.lines, this.shown());
    this.data = data;
    this.gaps = gaps;
    if (!this.u) this.make(data);
    else this.u.setData(data);
    if (this.pinned !== undefined) this.point(this.pinned);
    else this.readout.show(this.data, null);
    this.tell();
  }

  empty() {
    this.u?.destroy();
    this.u = null;
    if (!this.loaded) return;
    const p = document.createElement("p");
    p.textContent = this.spec.empty || "No values yet. The trainer reports about every second once step 1 is done.";
    this.plot.classList.add("nothing");
    this.plot.replaceChildren(p);
    this.readout.show(null, null);
  }

  make(data) {
    this.plot.classList.remove("nothing");
    this.plot.replaceChildren();
    const narrow = this.plot.clientWidth < 420;
    const font = `500 ${narrow ? 10 : 11}px Inter`;
    const axis = { stroke: () => token("--faint"), font };
    const lines = this.lines;
    this.u = new uPlot(
      {
        width: this.plot.clientWidth,
        height: this.plot.clientHeight,
        padding: [8, 12, 0, 0],
        legend: { show: false },
        cursor: {
          y: false,
          sync: this.figure.dataset.sync ? { key: this.figure.dataset.sync, setSeries: false } : undefined,
          points: { size: (_, i) => (isHidden(lines[i - 1]) ? 0 : 6), width: 1.5 },
          drag: { x: true, y: false, setScale: false, dist: 6 },
          bind: { dblclick: () => () => this.reset() },
        },
        scales: {
          x: { time: false, range: (_, low, high) => this.xRange(low, high) },
          y: { distr: this.log ? 3 : 1, range: () => this.range.of(this) },
        },
        axes: [
          {
            ...axis,
            size: 22,
            gap: 4,
            space: narrow ? 70 : 90,
            grid: { show: false },
            ticks: { stroke: () => token("--line-strong"), width: 1, size: 4 },
            values: (_, v) => v.map(label),
          },
          {
            ...axis,
            size: narrow ? 38 : 44,
            gap: 6,
            space: 34,
            grid: { stroke: () => token("--line"), width: 1 },
            ticks: { show: false },
            values: (_, v) => v.map(label),
          },
        ],
        series: [{}, ...lines.map((line) => style(line))],
        bands: lines.flatMap((line, i) =>
          line.kind === "low" ? [{ series: [i + 2, i + 1], fill: () => tint(line, 0.2) }] : [],
        ),
        hooks: {
          drawClear: [
            (u) => {
              paintAttempts(u, this.spec.breaks || []);
              paintGaps(u, this.gaps);
              paintLimits(u, this.spec.limits || []);
            },
          ],
          setCursor: [(u) => this.readout.show(this.data, u.cursor.idx)],
          setSelect: [(u) => this.select(u)],
        },
      },
      data,
      this.plot,
    );
  }

  xRange(low, high) {
    if (this.view) return [this.view.from, this.view.to];
    return high > low ? [low, high] : [low - 0.5, high + 0.5];
  }

  // Zoom: show at once what is there, then what the server has of that range.
  async zoom(from, to) {
    const view = { from, to, curves: this.curves };
    this.view = view;
    this.liveButton(true);
    this.draw();
    const items = await this.fetchRange(this.spec, from, to).catch(() => null);
    if (items && this.view === view) {
      this.view = { from, to, curves: curvesOf(items) };
      this.draw();
    }
  }

  reset() {
    this.view = null;
    this.liveButton(false);
    this.draw();
  }

  select(u) {
    const { left, width } = u.select;
    if (width < 6) return;
    const [from, to] = [u.posToVal(left, "x"), u.posToVal(left + width, "x")];
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.zoom(from, to);
  }

  liveButton(show) {
    const tools = this.figure.querySelector(".tools");
    let button = tools.querySelector("[data-live-edge]");
    if (!button) {
      button = document.createElement("button");
      button.type = "button";
      button.className = "button small plain";
      button.dataset.liveEdge = "";
      button.textContent = "↦ all";
      button.title = "Show everything and follow the newest";
      button.addEventListener("click", () => this.reset());
      tools.prepend(button);
    }
    button.hidden = !show;
  }

  setLog(on) {
    const positive = this.spec.series.every((s) => {
      const curve = this.curves.get(s.name);
      return !curve?.main.some((v) => v <= 0);
    });
    this.log = on && positive;
    for (const button of this.figure.querySelectorAll("[data-scale]")) {
      button.setAttribute("aria-pressed", String((button.dataset.scale === "log") === this.log));
    }
    this.rebuild();
  }

  rebuild() {
    this.u?.destroy();
    this.u = null;
    if (this.hasData()) this.draw();
  }

  listen() {
    new IntersectionObserver(
      ([entry]) => {
        this.visible = entry.isIntersecting;
        if (this.visible && this.dirty) this.soon(0);
      },
      { rootMargin: "120px" },
    ).observe(this.plot);
    document.addEventListener("visibilitychange", () => this.dirty && this.soon(0));
    this.figure.addEventListener("click", (event) => {
      const button = event.target.closest("[data-scale]");
      if (button) this.setLog(button.dataset.scale === "log");
    });
    this.plot.addEventListener("keydown", (event) => this.key(event));
    this.plot.addEventListener("blur", () => this.unpin());
  }

  // Arrows walk the points, with Shift ten at a time; + and − zoom; l switches the axis.
  key(event) {
    if (!this.u || event.ctrlKey || event.metaKey || event.altKey) return;
    const x = this.data[0];
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
    if (move) {
      const now = this.u.cursor.idx ?? x.length - 1;
      this.pinned = Math.max(0, Math.min(x.length - 1, now + move * (event.shiftKey ? 10 : 1)));
      this.readout.speak();
      this.point(this.pinned);
    } else if (event.key === "+" || event.key === "-") {
      const { min, max } = this.u.scales.x;
      const middle =
        this.u.cursor.idx === null || this.u.cursor.idx === undefined ? (min + max) / 2 : x[this.u.cursor.idx];
      const half = ((max - min) / 2) * (event.key === "+" ? 0.5 : 2);
      const [from, to] = [Math.max(x[0], middle - half), Math.min(this.end(), middle + half)];
      if (from <= this.start_() && to >= this.end()) this.reset();
      else this.zoom(from, to);
    } else if (event.key === "l" && this.figure.querySelector("[data-scale]")) this.setLog(!this.log);
    else if (event.key === "Escape") this.reset();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  start_() {
    return Math.min(...[...this.curves.values()].filter((c) => c.n).map((c) => c.first));
  }

  end() {
    return Math.max(...[...this.curves.values()].filter((c) => c.n).map((c) => c.last));
  }

  point(index) {
    const x = this.data[0][Math.min(index, this.data[0].length - 1)];
    this.u.setCursor({ left: this.u.valToPos(x, "x"), top: 10 }, true, true);
  }

  unpin() {
    if (this.pinned === undefined) return;
    this.pinned = undefined;
    this.readout.hush();
    this.u?.setCursor({ left: -10, top: -10 }, true, true);
  }

  resize() {
    if (this.u && this.u.width !== this.plot.clientWidth)
      this.u.setSize({ width: this.plot.clientWidth, height: this.plot.clientHeight });
  }

  // One sentence with the finding, for who does not see the drawing.
  tell() {
    const curve = this.curves.get(this.spec.series[0].name);
    if (!curve?.n || curve.n === this.told) return;
    this.told = curve.n;
    const ends = [curve.main.find(Number.isFinite), curve.main.findLast(Number.isFinite)];
    this.plot.setAttribute(
      "aria-label",
      `${this.spec.title}: from ${measure(ends[0])} at step ${curve.first} to ${measure(ends[1])} at step ${curve.last}. Arrow keys read points, plus and minus zoom.`,
    );
  }
}

// What the API answers, as curves by name.
export function curvesOf(items) {
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

document.addEventListener("vigil:theme", forget, true);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", forget);
