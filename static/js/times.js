// Charts over time: clocks in the lab's time zone, gaps where samples are missing, and bands and marks on the time axis.
import { token } from "./paint.js";

const DAY_S = 86_400;
const MISSED = 3; // a distance of more than this many usual intervals is a gap

// The time axis of a chart in a time zone: formats times and axis labels. uPlot is a global.
export function timeAxis(zone) {
  const format = (options) => {
    const formatter = new Intl.DateTimeFormat("en-GB", { timeZone: zone, ...options });
    return (second) => formatter.format(second * 1000);
  };
  const clock = format({ hour: "2-digit", minute: "2-digit" });
  const exact = format({ hour: "2-digit", minute: "2-digit", second: "2-digit" });
  const day = format({ day: "numeric", month: "short" });
  const today = day(Date.now() / 1000);
  const word = (step) => (second) => {
    if (step >= DAY_S || clock(second) === "00:00") return day(second);
    return step < 60 ? exact(second) : clock(second);
  };
  return {
    short: (second) => (day(second) === today ? clock(second) : `${day(second)} ${clock(second)}`),
    form: (second) => (day(second) === today ? exact(second) : `${day(second)} ${clock(second)}`),
    values: (_, seconds, __, ___, step) => seconds.map(word(step)),
    tzDate: (second) => uPlot.tzDate(new Date(second * 1000), zone),
  };
}

// A curve of the API with nulls where samples are missing, each value multiplied by a factor.
export function withGaps({ name, step, ...columns }, factor = 1) {
  const names = ["value", "min", "max", "mean"].filter((key) => columns[key]);
  const out = { name, step: [], ...Object.fromEntries(names.map((key) => [key, []])) };
  // Old data has longer intervals than new data, so the usual interval is the one just before.
  let usual = Math.min(step[1] - step[0] || 1, step[2] - step[1] || Number.POSITIVE_INFINITY);
  step.forEach((second, i) => {
    const distance = i ? second - step[i - 1] : 0;
    if (distance > MISSED * usual) {
      out.step.push(step[i - 1] + usual);
      for (const key of names) out[key].push(null);
    } else if (distance) usual = distance;
    out.step.push(second);
    for (const key of names) out[key].push(columns[key][i] === null ? null : columns[key][i] * factor);
  });
  return out;
}

const BAND_COLOURS = { mine: ["--running", 0.75], busy: ["--running", 0.35] };
const BAND = 5;

// Paint allocations as a band along the upper edge: [since, until, kind, …]; a thin gap separates adjacent ones.
export function paintBand(u, bands, now) {
  const { ctx, bbox } = u;
  const ratio = devicePixelRatio;
  for (const [since, until, kind] of bands) {
    const [from, to] = inside(u, since, until ?? now);
    if (to <= from) continue;
    ctx.fillStyle = token(...BAND_COLOURS[kind]);
    ctx.fillRect(from, bbox.top - (BAND + 1) * ratio, Math.max(1, to - from - ratio), BAND * ratio);
  }
}

const TONES = { failed: "--failed", warn: "--warn", gap: "--line-strong" };

// Paint events as hairlines and lasting conditions as tinted stretches: [at, until, gpu, tone, title, lasts].
export function paintMarks(u, marks, now) {
  const { ctx, bbox } = u;
  const ratio = devicePixelRatio;
  for (const [at, until, , tone, , lasts] of marks) {
    const [from, to] = inside(u, at, until ?? now);
    if (to < from) continue;
    const name = TONES[tone] ?? "--muted";
    if (lasts) {
      ctx.fillStyle = token(name, 0.14);
      ctx.fillRect(from, bbox.top, Math.max(ratio, to - from), bbox.height);
    }
    ctx.fillStyle = token(name);
    ctx.fillRect(from, bbox.top, ratio, bbox.height);
    ctx.fillRect(from - ratio, bbox.top + bbox.height - 3 * ratio, 3 * ratio, 3 * ratio);
  }
}

// Clip a time range to the axis, in canvas pixels.
function inside(u, from, to) {
  const { left, width } = u.bbox;
  const at = (second) => Math.round(Math.min(left + width, Math.max(left, u.valToPos(second, "x", true))));
  return u.scales.x.max < from || u.scales.x.min > to ? [1, 0] : [at(from), at(to)];
}
