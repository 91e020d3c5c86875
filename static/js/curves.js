// Columns of a curve in typed arrays: append, merge, smooth, align. No drawing here.

// One curve: increasing steps and one or several value columns ("value", or "min", "max", "mean"; a band also has
// "median" and "worst").
export class Curve {
  constructor(columns) {
    this.names = [...columns];
    this.n = 0;
    this.step = new Float64Array(256);
    this.columns = Object.fromEntries(columns.map((name) => [name, new Float64Array(256)]));
  }

  static of(step, columns) {
    const curve = new Curve(Object.keys(columns));
    curve.merge(step, columns);
    return curve;
  }

  get first() {
    return this.n ? this.step[0] : null;
  }

  get last() {
    return this.n ? this.step[this.n - 1] : null;
  }

  // Newer points replace those at the same steps and everything between them: that stretch was trained again.
  merge(step, columns) {
    if (!step.length) return;
    for (const name of Object.keys(columns)) this.addColumn(name);
    const order = rising(step) ? null : Array.from(step.keys()).sort((a, b) => step[a] - step[b]);
    const at = (i) => (order ? order[i] : i);
    const from = this.place(step[at(0)]);
    const tail = this.place(step[at(step.length - 1)] + 0.5);
    const tailLength = this.n - tail;
    this.reserve(from + step.length + tailLength);
    for (const array of [this.step, ...Object.values(this.columns)]) array.copyWithin(from + step.length, tail, this.n);
    for (let i = 0; i < step.length; i += 1) {
      this.step[from + i] = step[at(i)];
      for (const name of this.names) this.columns[name][from + i] = value(columns[name], at(i));
    }
    this.n = from + step.length + tailLength;
  }

  // Drop the points before a step.
  drop(step) {
    const from = this.place(step);
    for (const array of [this.step, ...Object.values(this.columns)]) array.copyWithin(0, from, this.n);
    this.n -= from;
  }

  // Add a column that the curve does not have yet, filled with NaN.
  addColumn(name) {
    if (name in this.columns) return;
    this.columns[name] = new Float64Array(this.step.length).fill(Number.NaN);
    this.names.push(name);
  }

  // The index of the first point at or after a step.
  place(step) {
    let low = 0;
    let high = this.n;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.step[middle] < step) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  reserve(n) {
    if (n <= this.step.length) return;
    const size = Math.max(n, this.step.length * 2);
    const grow = (array) => {
      const larger = new Float64Array(size);
      larger.set(array);
      return larger;
    };
    this.step = grow(this.step);
    for (const name of this.names) this.columns[name] = grow(this.columns[name]);
  }

  // A column, cut to the number of points.
  column(name) {
    return this.columns[name].subarray(0, this.n);
  }

  get steps() {
    return this.step.subarray(0, this.n);
  }

  // The column to use where a single value per point is needed.
  get main() {
    return this.column(["value", "mean", "median"].find((name) => name in this.columns));
  }
}

const value = (column, i) => {
  const v = column?.[i];
  return v === null || v === undefined ? Number.NaN : v;
};

function rising(step) {
  for (let i = 1; i < step.length; i += 1) if (step[i] <= step[i - 1]) return false;
  return true;
}

// A debiased exponential mean over x, restarted at every break and after every gap.
export function smooth(step, values, halfLife, breaks) {
  const out = new Float64Array(values.length);
  let mean = 0;
  let weight = 0;
  let next = 0;
  for (let i = 0; i < values.length; i += 1) {
    if (!Number.isFinite(values[i])) {
      weight = 0;
      out[i] = Number.NaN;
      continue;
    }
    while (next < breaks.length && breaks[next] <= step[i]) {
      if (i && breaks[next] > step[i - 1]) weight = 0;
      next += 1;
    }
    const decay = weight === 0 ? 0 : 0.5 ** ((step[i] - step[i - 1]) / halfLife);
    mean = decay * mean + (1 - decay) * values[i];
    weight = decay * weight + (1 - decay);
    out[i] = mean / weight;
  }
  return out;
}

// Align several curves on one x for uPlot: undefined where a curve has no point, null (a real gap) where its value is not finite.
export function align(curves) {
  if (curves.length === 1) return [curves[0].x, ...curves[0].ys.map(withNulls)];
  const all = new Set();
  for (const curve of curves) for (const step of curve.x) all.add(step);
  const x = Float64Array.from(all).sort();
  const columns = [];
  for (const curve of curves) {
    const outs = curve.ys.map(() => new Array(x.length).fill(undefined));
    let j = 0;
    for (let i = 0; i < x.length && j < curve.x.length; i += 1) {
      if (curve.x[j] !== x[i]) continue;
      curve.ys.forEach((ys, k) => {
        outs[k][i] = Number.isFinite(ys[j]) ? ys[j] : null;
      });
      j += 1;
    }
    columns.push(...outs);
  }
  return [x, ...columns];
}

const withNulls = (ys) => Array.from(ys, (v) => (Number.isFinite(v) ? v : null));

// The first and last step of each stretch of non-finite values, with its label ("NaN" or "Inf").
export function gapsIn(step, values) {
  const gaps = [];
  for (let i = 0; i < step.length; i += 1) {
    if (Number.isFinite(values[i])) continue;
    const from = step[i];
    const what = Number.isNaN(values[i]) ? "NaN" : "Inf";
    while (i + 1 < step.length && !Number.isFinite(values[i + 1])) i += 1;
    gaps.push([from, step[i], what]);
  }
  return gaps;
}

// The low and high quantiles of the values; null without values.
export function quantiles(values, low, high) {
  const sorted = Float64Array.from(values).sort();
  if (!sorted.length) return null;
  const at = (share) => sorted[Math.min(sorted.length - 1, Math.max(0, Math.round(share * (sorted.length - 1))))];
  return [at(low), at(high)];
}
