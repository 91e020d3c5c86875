// The range of the y axis, and axis labels.
import { quantiles } from "./curves.js";

const SHRINK_MS = 10_000; // a range grows immediately and shrinks after this delay

export class Range {
  // The 1st to 99th percentile of the values shown, without the first 2 % of steps; zero-based for counts and seconds.
  of(chart) {
    const [x, ...columns] = chart.data;
    const { view, log, spec } = chart;
    const lines = chart.lines;
    if (spec.y) return this.settle(extended(spec.y, columns), view, log);
    const [left, right] = view ? [view.from, view.to] : [x[0], x[x.length - 1]];
    const skip = view || x.length < 50 ? left : left + (right - left) * 0.02;
    const late = right - (right - left) * 0.25;
    const values = [];
    const recent = []; // never cut off: the newest values, and the few dots of a zoomed range
    lines.forEach((line, k) => {
      if (line.kind === "fact") return;
      const isMain = line.column === "smooth" || line.column === "median" || line.kind === "dots";
      for (let i = 0; i < x.length; i += 1) {
        const v = columns[k][i];
        if (x[i] < skip || x[i] > right || v === null || v === undefined) continue;
        values.push(v);
        if (isMain && (x[i] >= late || (view && line.kind === "dots"))) recent.push(v);
      }
    });
    let range = quantiles(values, values.length > 200 ? 0.01 : 0, values.length > 200 ? 0.99 : 1) || [0, 1];
    if (recent.length) range = [Math.min(range[0], ...minmax(recent)), Math.max(range[1], ...minmax(recent))];
    if (log) return this.settle([Math.max(range[0], 1e-12) * 0.95, Math.max(range[1], 1e-11) * 1.05], view, log);
    const pad = (range[1] - range[0]) * 0.08 || Math.abs(range[1]) * 0.1 || 1;
    return this.settle([spec.zero ? Math.min(0, range[0]) : range[0] - pad, range[1] + pad], view, log);
  }

  settle([low, high], view, log) {
    const now = performance.now();
    const current = this.current;
    if (!current || current.view !== view || current.log !== log) {
      this.current = { low, high, view, log, needed: now };
      return [low, high];
    }
    const near = (current.high - current.low) * 0.04;
    const isTight = low <= current.low + near || high >= current.high - near;
    if (now - current.needed > SHRINK_MS) this.current = { ...current, low, high, needed: now };
    else
      this.current = {
        ...current,
        low: Math.min(low, current.low),
        high: Math.max(high, current.high),
        needed: isTight ? now : current.needed,
      };
    return [this.current.low, this.current.high];
  }
}

// Extend a fixed range to include every value.
function extended([low, high], columns) {
  for (const column of columns)
    for (const v of column) {
      if (v < low && v !== null) low = v;
      if (v > high) high = v;
    }
  return [low, high];
}

const minmax = (values) =>
  values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);

// Axis labels: no padding zeros, k and M.
export function label(value) {
  if (value === null) return "";
  const size = Math.abs(value);
  if (size >= 1e6) return `${Number((value / 1e6).toFixed(2))} M`;
  if (size >= 1e4) return `${Number((value / 1e3).toFixed(1))} k`;
  return size < 1e4 && size >= 1e3 ? value.toLocaleString("en") : String(Number(value.toPrecision(6)));
}
