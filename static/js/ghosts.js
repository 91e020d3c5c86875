// Superseded stretches of repeated steps, painted wide and pale beneath the current line so that the two can be compared.
// They are painted only: the readout, the table and the smoothing of the current line ignore them.
import { smooth } from "./curves.js";
import { halfLife, scaled } from "./lines.js";
import { tint } from "./paint.js";

const WIDTH = 6;
const ALPHA = 0.38;

// One superseded stretch of one series.
class Ghost {
  constructor(name) {
    this.name = name;
    this.step = [];
    this.value = [];
  }

  paint(u, chart) {
    const { ctx, bbox } = u;
    const series = chart.spec.series.find((s) => s.name === this.name);
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.lineWidth = WIDTH * devicePixelRatio;
    ctx.lineCap = "round";
    ctx.lineJoin = "round";
    ctx.strokeStyle = tint(series, ALPHA);
    ctx.stroke(pathOf(u, this.step, this.valuesFor(chart)));
    ctx.restore();
  }

  // The values to draw: scaled, and smoothed with the half-life of the current line, starting afresh at this stretch.
  valuesFor(chart) {
    const { spec, share } = chart;
    const curve = chart.curvesShown().get(this.name);
    const { times } = spec.series.find((s) => s.name === this.name);
    const values = times ? scaled(this.value, times) : this.value;
    return spec.smooth && share && curve?.n ? smooth(this.step, values, halfLife(curve, share), []) : values;
  }
}

// Give charts by step of single ranks their ghosts, for the full range or for the range that they show.
export async function setGhosts(figures, charts, answer, range) {
  const shown = charts.filter(({ spec, unit }) => !spec.band && !spec.stacked && unit !== "second");
  const shownNames = new Set(shown.flatMap(({ spec }) => spec.series.filter((s) => !s.kind).map((s) => s.name)));
  const items = shown.flatMap((chart) => figures.itemsFor(chart, answer));
  const lines = await supersededLines(
    figures,
    items.filter((item) => item.superseded?.length && shownNames.has(item.name)),
  );
  const ghosts = [...shownNames].flatMap((name) => {
    const attemptLines = lines.filter((line) => line.name === name && line.step.length);
    return attemptLines.flatMap((attemptLine, i) => overlapsOf(attemptLine, attemptLines.slice(i + 1)));
  });
  for (const chart of shown) {
    const matching = ghosts.filter(({ name }) => chart.names.has(name));
    chart.setGhosts(matching, range);
  }
}

// Fetch the separate lines of each attempt and incarnation around superseded steps, oldest first, one point per two pixels.
async function supersededLines(figures, items) {
  const requests = items.map((item) => ({ names: [item.name], rank: item.queriedRank, points: item.points, item }));
  const answers = await Promise.all(
    figures.groupQueries(requests).map(({ names, rank, points, members }) => {
      const [from, to] = extentOf(members.flatMap(({ item }) => item.superseded));
      const [first, last] = extentOf(members.map(({ item }) => [item.step[0], item.step.at(-1)]));
      const few = Math.max(2, Math.round(((points / 4) * (to - from)) / Math.max(1, last - first)));
      return figures.get(names, { all: 1, rank, points: few, digits: 6, from, to });
    }),
  );
  return answers.flatMap((answer) => answer.items);
}

const extentOf = (stretches) => [Math.min(...stretches.map(([a]) => a)), Math.max(...stretches.map(([, b]) => b))];

// The stretches of a line whose steps a newer line covers.
function overlapsOf(attemptLine, newer) {
  const runs = [];
  const reaches = newer.map(({ step }) => [step[0], step.at(-1)]);
  const values = attemptLine.value ?? attemptLine.mean;
  let run = null;
  attemptLine.step.forEach((step, i) => {
    if (!reaches.some(([from, to]) => step >= from && step <= to)) {
      run = null;
      return;
    }
    if (!run) runs.push((run = new Ghost(attemptLine.name)));
    run.step.push(step);
    run.value.push(values[i] ?? Number.NaN);
  });
  return runs;
}

function pathOf(u, step, values) {
  const path = new Path2D();
  let drawing = false;
  values.forEach((value, i) => {
    const isDrawable = Number.isFinite(value);
    if (isDrawable) {
      const at = [u.valToPos(step[i], "x", true), u.valToPos(value, "y", true)];
      if (!drawing) path.moveTo(...at);
      path.lineTo(...at);
    }
    drawing = isDrawable;
  });
  return path;
}
