// Keyboard control of a chart: arrows move between points, with Shift ten at a time; + and − zoom; l toggles the log axis.
const MOVES = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 };

export function press(chart, key, shift) {
  if (!chart.plot.matches(":focus")) return;
  if (key === "Escape") chart.reset();
  else if (key === "l") chart.scales.length && chart.on.log(!chart.log);
  else if (!chart.u || !chart.data[0].length) return;
  else if (key in MOVES) walk(chart, MOVES[key] * (shift ? 10 : 1));
  else zoom(chart, key === "+" ? 0.5 : 2);
}

function walk(chart, by) {
  const last = chart.data[0].length - 1;
  chart.pinned = Math.max(0, Math.min(last, (chart.u.cursor.idx ?? last) + by));
  chart.readout.announce();
  chart.point(chart.pinned);
}

function zoom(chart, by) {
  const [first, last] = reach(chart);
  const { from: left, to: right } = chart.view ?? { from: first, to: last };
  const middle = chart.data[0][chart.u.cursor.idx] ?? (left + right) / 2;
  const half = ((right - left) / 2) * by;
  const [from, to] = [Math.max(first, middle - half), Math.min(last, middle + half)];
  if (from <= first && to >= last) chart.reset();
  else if (to > from) chart.on.zoom([from, to], "keys");
}

// The first and last step of all curves.
function reach({ curves }) {
  const loaded = [...curves.values()].filter((curve) => curve.n);
  return [Math.min(...loaded.map((curve) => curve.first)), Math.max(...loaded.map((curve) => curve.last))];
}
