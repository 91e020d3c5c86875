// Which lines a chart has, what stands in their columns, and how each is drawn.
import { align, gapsIn, smooth } from "./curves.js";
import { tint } from "./paint.js";

// The lines drawn, in order: {key, label, color, digits, kind, of}. Bands come as low, high, then their middle.
export function linesOf(spec) {
  const lines = [];
  for (const s of spec.series) {
    if (spec.band) {
      lines.push({ ...s, key: `${s.name} min`, label: "", kind: "low", column: "min" });
      lines.push({ ...s, key: `${s.name} max`, kind: "high", column: "max" });
      lines.push({ ...s, key: s.name, column: "median" });
      lines.push({ ...s, key: `${s.name} worst`, label: "worst", kind: "fact", column: "worst" });
    } else if (spec.smooth && s.kind !== "dots") {
      lines.push({ ...s, key: `${s.name} min`, kind: "low", column: "min", silent: true });
      lines.push({ ...s, key: `${s.name} max`, kind: "high", column: "max", silent: true });
      lines.push({ ...s, key: `${s.name} raw`, label: "raw", kind: "ghost", column: "raw" });
      lines.push({ ...s, key: s.name, column: "smooth" });
    } else if (s.kind === "dots") {
      lines.push({ ...s, key: s.name, column: "value" });
    } else {
      lines.push({ ...s, key: `${s.name} min`, kind: "low", column: "min", silent: true });
      lines.push({ ...s, key: `${s.name} max`, kind: "high", column: "max", silent: true });
      lines.push({ ...s, key: s.name, column: "value" });
    }
  }
  return lines;
}

// The aligned columns for uPlot, and the stretches that are no numbers.
export function dataOf(spec, lines, curves) {
  const breaks = (spec.breaks || []).map((b) => b.at);
  const gaps = [];
  const parts = spec.series.map((s) => {
    const mine = lines.filter((line) => line.name === s.name);
    const curve = curves.get(s.name);
    if (!curve?.n) return { x: [], ys: mine.map(() => []) };
    if (s.kind !== "dots") gaps.push(...oddOf(curve));
    return { x: curve.steps, ys: columnsOf(mine, curve, spec.smooth && s.kind !== "dots", breaks) };
  });
  return { data: align(parts), gaps };
}

function columnsOf(lines, curve, isSmoothed, breaks) {
  const halfLife = Math.max((curve.last - curve.first) * 0.01, 1e-9);
  const nothing = new Float64Array(curve.n).fill(Number.NaN);
  return lines.map(({ column }) => {
    if (column === "smooth") return isSmoothed ? smooth(curve.steps, curve.main, halfLife, breaks) : curve.main;
    if (column === "raw") return "mean" in curve.columns ? nothing : curve.main;
    if (column === "value" || column === "median") return curve.main;
    return column in curve.columns ? curve.column(column) : nothing;
  });
}

// The server's gaps, and those that came since.
function oddOf(curve) {
  const told = curve.gaps || [];
  const since = gapsIn(curve.steps, curve.main).filter(([from, to]) => !told.some(([a, b]) => from >= a && to <= b));
  return [...told, ...since];
}

export const isHidden = (line) => ["low", "high", "fact"].includes(line?.kind);

export function style(line) {
  const hidden = isHidden(line);
  const alpha = line.kind === "ghost" ? 0.38 : 1;
  return {
    stroke: hidden ? "transparent" : () => tint(line, alpha),
    width: line.kind === "ghost" ? 1 : line.kind === "dots" ? 0 : 1.5,
    spanGaps: false,
    paths: line.kind === "dots" ? () => null : undefined,
    points: { show: line.kind === "dots", size: 5, width: 0, fill: () => tint(line) },
  };
}
