// A job's GPUs: the heat map, the curves of the selected row next to it, and the loss over the same time.
import { Heat, rampOf } from "./heat.js";
import { token } from "./paint.js";
import { timeAxis, withGaps } from "./times.js";
import { count, loss, measure } from "./words.js";

const EVERY_MS = 10_000;
const FACTORS = { memory_mib: 1 / 1024 };
const COLOURS = { gpu_percent: 3, memory_mib: 6, temperature_c: 2, watts: 5 };

const read = () => JSON.parse(document.getElementById("heat-data").textContent);
let data = read();
const x = timeAxis(data.zone);
const canvas = document.querySelector(".heat-box canvas");
const readout = document.getElementById("cell");

// The address holds the selected field, time range and row.
const query = () => new URLSearchParams(location.search);

function change(changes, how = "pushState") {
  const now = query();
  for (const [name, value] of Object.entries(changes)) {
    if (value === null) now.delete(name);
    else now.set(name, value);
  }
  history[how](null, "", `${location.pathname}${now.size ? `?${now}` : ""}`);
}

const heat =
  canvas &&
  new Heat(canvas, x, {
    chosen: (row) => {
      change({ row: row.key }, "replaceState");
      choose(row);
    },
    dragged: (from, to) => {
      change({ from, to });
      renew();
    },
    at: showCell,
  });

function showCell(row, column) {
  const text = row ? words(row, column) : "";
  if (readout.textContent !== text) readout.textContent = text;
  if (canvas.matches(":focus")) readout.setAttribute("aria-live", "polite");
}

function words({ key, label, values }, column) {
  const value = values[column];
  const reading = value === null ? "no sample" : `${value} ${data.unit}`;
  return `${key.replace(":", " GPU ")}${label.startsWith("rank") ? ` · ${label}` : ""} · ${x.form(data.start + column * data.width)} · ${reading}`;
}

// A small chart drawn directly by uPlot: one line, no smoothing, gaps left open.
class Small {
  constructor(figure, { color, form, xform, time, zero }) {
    Object.assign(this, { figure, color, form, xform, time, zero });
    this.plot = figure.querySelector(".plot");
    this.readout = figure.querySelector(".readout");
    new ResizeObserver(() => this.u?.setSize(this.size())).observe(this.plot);
  }

  size() {
    return { width: this.plot.clientWidth, height: this.plot.clientHeight };
  }

  show(xs, ys, range) {
    this.data = [xs, ys];
    this.range = range;
    this.u?.destroy();
    this.plot.replaceChildren();
    this.u = new uPlot(this.options(), this.data, this.plot);
    this.showReading(null);
  }

  showReading(index) {
    const [xs, ys] = this.data;
    const at = index ?? xs.length - 1;
    const value = ys[at];
    this.readout.textContent = xs.length
      ? `${this.xform(xs[at])} · ${value === null || value === undefined ? "no sample" : this.form(value)}`
      : "";
  }

  options() {
    const axis = { stroke: () => token("--faint"), font: "500 11px Inter" };
    const colour = () => token(`--series-${this.color}`);
    return {
      ...this.size(),
      padding: [6, 12, 0, 0],
      legend: { show: false },
      tzDate: this.time ? x.tzDate : undefined,
      cursor: {
        y: false,
        drag: { x: false, y: false },
        sync: this.time ? { key: "row", setSeries: false } : undefined,
      },
      scales: {
        x: { time: Boolean(this.time), range: (_, low, high) => this.range ?? [low, Math.max(high, low + 1)] },
        y: this.zero ? { range: (_, __, high) => [0, Math.max(1, high * 1.05)] } : {},
      },
      axes: [
        {
          ...axis,
          size: 20,
          gap: 3,
          grid: { show: false },
          ticks: { show: false },
          values: this.time ? x.values : undefined,
        },
        {
          ...axis,
          size: 42,
          gap: 5,
          space: 28,
          grid: { stroke: () => token("--line"), width: 1 },
          ticks: { show: false },
        },
      ],
      series: [{}, { stroke: colour, width: 1.5, spanGaps: false, points: { show: false } }],
      hooks: { setCursor: [(u) => this.showReading(u.cursor.idx)] },
    };
  }
}

// Curves of one row: with an agent, every field of the node's series; with launcher samples, only the field of the map.
const aside = document.getElementById("row-of");
const curves = new Map();
for (const figure of document.querySelectorAll("[data-row]")) {
  const name = figure.dataset.row;
  const form = (value) => `${measure(value)} ${figure.querySelector("h4 span").textContent}`;
  curves.set(
    name,
    new Small(figure, { color: COLOURS[name], form, xform: x.form, time: true, zero: name !== "temperature_c" }),
  );
}

const span = () => [data.start, data.start + data.width * data.columns];

// The span in which the GPU was allocated to this job: before and after, it served other jobs.
function allocatedSpan({ values }) {
  const first = values.findIndex((value) => value !== null);
  const last = values.findLastIndex((value) => value !== null);
  return first < 0 ? span() : [data.start + first * data.width, data.start + (last + 1) * data.width];
}

async function choose(row) {
  heat.choose(row.key);
  aside.textContent = row.key.replace(":", " GPU ");
  const [from, to] = span();
  const items = row.uuid ? await fetchRow(row, ...allocatedSpan(row)) : [mapSeriesOf(row)];
  if (heat.chosen !== row.key) return;
  for (const [name, small] of curves) {
    const item = items.find((candidate) => candidate.name === name);
    small.figure.hidden = !item;
    if (!item) continue;
    const { step, value, mean } = withGaps(item, row.uuid ? (FACTORS[name] ?? 1) : 1);
    small.show(step, value ?? mean, [from, to]);
  }
}

const mapSeriesOf = ({ values }) => ({
  name: data.field,
  step: values.map((_, i) => data.start + i * data.width),
  value: values,
});

async function fetchRow({ key, uuid }, from, to) {
  const params = new URLSearchParams({ from, to, gpu: uuid, points: 600, digits: 4 });
  for (const name of curves.keys()) params.append("name", name);
  const node = encodeURIComponent(key.slice(0, key.lastIndexOf(":")));
  const response = await fetch(`/api/v1/nodes/${node}/series?${params}`);
  return response.ok ? (await response.json()).items : [];
}

// The loss over the same time, by step or by round.
const steps = document.getElementById("steps");
const counts = steps?.dataset.counts;
const small = steps && new Small(steps, { color: 1, form: loss, xform: (step) => `${counts} ${count(step)}` });

function showLoss() {
  if (!small) return;
  const { step, value } = data.loss ?? { step: [], value: [] };
  const reach = step.length
    ? `${counts}s ${count(step[0])} to ${count(step.at(-1))}`
    : `no ${counts} completed in this time`;
  document.getElementById("steps-of").textContent = reach;
  small.show(step, value);
}

function show() {
  data = read();
  if (!canvas && data.groups.length) location.reload(); // the first samples have arrived
  if (!canvas) return;
  heat.show(data);
  rampOf(document.getElementById("ramp"), data);
  showLoss();
  document.getElementById("whole").hidden = !query().has("from");
  const row =
    heat.rows.find(({ key }) => key === (heat.chosen || query().get("row"))) ??
    heat.rows.find(({ odd }) => odd) ??
    heat.rows[0];
  if (row) choose(row).catch(() => null);
}

// Refresh after a choice, and periodically while the job runs.
async function renew() {
  const open = document.getElementById("data")?.open;
  await htmx.ajax("GET", location.href, { target: "#gpu-summary", swap: "innerHTML" });
  const table = document.getElementById("data");
  if (table && open) table.open = true;
  show();
  for (const link of document.querySelectorAll("[data-field]")) {
    const now = query();
    if (link.dataset.field === data.field) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
    now.set("field", link.dataset.field);
    link.href = `?${now}`;
  }
}

document.addEventListener("click", (event) => {
  const link = event.target.closest("[data-field], #whole");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey || !canvas) return;
  event.preventDefault();
  change(link.id === "whole" ? { from: null, to: null } : { field: link.dataset.field });
  renew();
});
canvas?.addEventListener("dblclick", () => {
  change({ from: null, to: null });
  renew();
});
addEventListener("popstate", renew);
setInterval(() => {
  const busy = document.querySelector("dialog[open]") || !getSelection().isCollapsed || heat?.drag;
  if (data.alive && !query().has("from") && !busy && document.visibilityState === "visible") renew();
}, EVERY_MS);

document.addEventListener("vigil:theme", () => document.fonts.ready.then(show));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
document.fonts.ready.then(show);
