// The lines of a chart, the data of their columns, and how uPlot (a global) draws them.
import { align, gapsIn, smooth } from "./curves.js";
import { paintAttempts, paintGaps, paintLimits, paintSlow, tint, token } from "./paint.js";
import { label } from "./ranges.js";

// The lines in drawing order: {key, label, color, digits, kind, column}. Bands come as low, high, then the middle.
export function linesOf(spec) {
  const lines = [];
  for (const s of spec.series) {
    const key = s.scaled_name ?? s.name;
    if (spec.band) {
      lines.push({ ...s, key: `${key} min`, label: "", kind: "low", column: "min" });
      lines.push({ ...s, key: `${key} max`, kind: "high", column: "max" });
      lines.push({ ...s, key, column: "median" });
      lines.push({ ...s, key: `${key} worst`, label: "worst", kind: "fact", column: "worst" });
    } else if (s.kind || spec.stacked) {
      lines.push({ ...s, key, kind: s.kind ?? "stack", column: "value" });
    } else {
      lines.push({ ...s, key: `${key} min`, kind: "low", column: "min", silent: true });
      lines.push({ ...s, key: `${key} max`, kind: "high", column: "max", silent: true });
      if (spec.smooth) lines.push({ ...s, key: `${key} raw`, label: "raw", kind: "raw", column: "raw" });
      lines.push({ ...s, key, column: spec.smooth ? "smooth" : "value" });
    }
  }
  return lines;
}

// The aligned columns for uPlot, and the stretches of non-finite values. The half-life of smoothing is a share of the range.
export function dataOf(spec, lines, curves, share) {
  const breaks = (spec.breaks || []).map((b) => b.at);
  const gaps = [];
  const parts = spec.series.map((s) => {
    const matching = lines.filter((line) => line.name === s.name);
    const curve = curves.get(s.name);
    if (!curve?.n) return { x: [], ys: matching.map(() => []) };
    if (!s.kind && !spec.x) gaps.push(...nonFiniteStretches(curve).map(([from, to, what]) => [from, to, what, s.name]));
    const ys = columnsOf(matching, curve, share, breaks);
    return { x: curve.steps, ys: s.times ? ys.map((column) => scaled(column, s.times)) : ys };
  });
  const data = align(parts);
  return { data: spec.stacked ? stacked(data) : data, gaps };
}

// Convert a column into the unit that is drawn.
export const scaled = (column, times) => column.map((value) => value * times);

// Cumulative sums over the columns.
function stacked([x, ...columns]) {
  let below = [];
  const sums = columns.map((column) => {
    below = column.map((value, i) => (value === null || value === undefined ? value : value + (below[i] ?? 0)));
    return below;
  });
  return [x, ...sums];
}

export const halfLife = (curve, share) => Math.max((curve.last - curve.first) * share, 1e-9);

function columnsOf(lines, curve, share, breaks) {
  const nothing = new Float64Array(curve.n).fill(Number.NaN);
  return lines.map(({ column }) => {
    if (column === "smooth")
      return share ? smooth(curve.steps, curve.main, halfLife(curve, share), breaks) : curve.main;
    if (column === "raw") return "mean" in curve.columns || !share ? nothing : curve.main;
    if (column === "value" || column === "median") return curve.main;
    return column in curve.columns ? curve.column(column) : nothing;
  });
}

// The gaps that the server reported, and those in points received since.
function nonFiniteStretches(curve) {
  const reported = curve.gaps || [];
  const since = gapsIn(curve.steps, curve.main).filter(
    ([from, to]) => !reported.some(([a, b]) => from >= a && to <= b),
  );
  return [...reported, ...since];
}

// Charts of throughput, where periods of a slow file system are marked.
const SPEEDS = new Set(["speed", "step_seconds", "tokens_per_second", "samples_per_second"]);

const isHidden = (line) => ["low", "high", "fact"].includes(line?.kind);

function style(line, isLowest) {
  const hidden = isHidden(line);
  const alpha = line.kind === "raw" ? 0.38 : 1;
  return {
    stroke: hidden ? "transparent" : () => tint(line, alpha),
    width: line.kind === "raw" ? 1 : line.kind === "dots" ? 0 : 1.5,
    spanGaps: false,
    paths: line.kind === "dots" ? () => null : undefined,
    fill: line.kind === "stack" && isLowest ? () => tint(line, 0.2) : undefined,
    points: { show: line.kind === "dots", size: 5, width: 0, fill: () => tint(line) },
  };
}

// Fill between the edges of a band, and between a stacked line and the line below it.
function bandOf(line, i) {
  const fill = () => tint(line, 0.2);
  if (line.kind === "low") return [{ series: [i + 2, i + 1], fill }];
  return line.kind === "stack" && i ? [{ series: [i + 1, i], fill }] : [];
}

export function plotOf(chart, data) {
  return new uPlot(options(chart), data, chart.plot);
}

function options(chart) {
  const { plot, lines, spec } = chart;
  const { sync } = chart.figure.dataset;
  const narrow = plot.clientWidth < 420;
  const axis = { stroke: () => token("--faint"), font: `500 ${narrow ? 10 : 11}px Inter` };
  return {
    width: plot.clientWidth,
    height: plot.clientHeight,
    padding: spec.bare ? [7, 1, 6, 0] : [8, 18, 0, 0],
    tzDate: spec.x?.tzDate,
    legend: { show: false },
    cursor: {
      y: false,
      sync: sync ? { key: sync, setSeries: false } : undefined,
      points: { size: (_, i) => (isHidden(lines[i - 1]) ? 0 : 6), width: 1.5 },
      drag: { x: true, y: false, setScale: false, dist: 6 },
      bind: { dblclick: () => () => chart.reset() },
    },
    scales: {
      x: { time: Boolean(spec.x), range: (_, low, high) => chart.xRange(low, high) },
      y: { distr: chart.log ? 3 : 1, range: () => chart.range.of(chart) },
    },
    axes: [
      {
        ...axis,
        size: 22,
        gap: 4,
        space: narrow ? 70 : 90,
        grid: { show: false },
        ticks: { stroke: () => token("--line-strong"), width: 1, size: 4 },
        values: spec.x?.values ?? ((_, v) => v.map(label)),
        show: !spec.bare,
      },
      {
        ...axis,
        size: spec.bare ? 30 : narrow ? 38 : 44,
        gap: spec.bare ? 4 : 6,
        space: spec.bare ? 22 : 34,
        grid: { stroke: () => token("--line"), width: 1 },
        ticks: { show: false },
        values: (_, v) => v.map((y) => label(chart.log && y !== null ? Number(y.toPrecision(3)) : y)),
      },
    ],
    series: [{}, ...lines.map((line, i) => style(line, i === 0))],
    bands: lines.flatMap((line, i) => bandOf(line, i)),
    hooks: {
      drawClear: [
        (u) => {
          paintAttempts(u, spec);
          if (SPEEDS.has(spec.id)) paintSlow(u, spec.slow || []);
          spec.under?.(u, chart);
          for (const ghost of chart.ghostsShown()) ghost.paint(u, chart);
          paintGaps(u, chart.gaps);
        },
      ],
      draw: [(u) => paintLimits(u, spec.limits || [])],
      setCursor: [(u) => chart.readout.show(chart.data, u.cursor.idx, chart.gaps)],
      setSelect: [(u) => chart.select(u)],
    },
  };
}
