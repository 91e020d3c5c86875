// All charts of a page: created from the server's specs, loaded with shared requests, shown as the user chose.
import { Chart } from "./charts.js";
import { View } from "./view.js";

const AGAIN_MS = 5_000; // how often to fetch superseded points while steps are being repeated

export class Figures {
  constructor(grid, job, specs) {
    this.job = job;
    this.inFlight = new Set(); // for each request in flight, the frames received meanwhile
    this.charts = [];
    this.view = viewOf(grid, specs, () => this.choose());
    for (const spec of specs) this.add(grid.querySelector(`[data-chart="${spec.id}"]`), { ...spec, job });
    this.choose();
    new ResizeObserver(() => this.forEachChart((chart) => chart.resize())).observe(grid);
    const again = () => this.forEachChart((chart) => chart.rebuild());
    document.addEventListener("vigil:theme", again);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
    setTimeout(() => this.forEachChart((chart) => chart.loaded || chart.plot.classList.add("skeleton")), 200);
  }

  add(figure, spec) {
    const chart = new Chart(figure, spec, {
      zoom: (range, kind) => this.view.zoom(chart.unit, range, kind),
      log: (on) => this.view.setLog(spec.id, on),
      smooth: (share) => this.view.setSmooth(share),
      reread: () => this.reread().catch(() => null),
    });
    chart.names = new Set(spec.series.map((s) => s.name));
    chart.unit = unitOf(spec);
    this.charts.push(chart);
  }

  forEachChart(act) {
    for (const chart of this.charts) act(chart);
  }

  // The names of all charted series.
  get names() {
    return this.charts.flatMap(({ names }) => [...names]);
  }

  // Update where attempts and restarts begin, and the text of empty charts.
  mark(marks) {
    for (const chart of this.charts.filter(({ unit }) => unit !== "second")) {
      Object.assign(chart.spec, marks);
      chart.schedule(0);
    }
  }

  // Show the coarse curves that are embedded in the page.
  paint(answer) {
    this.forEachChart((chart) => {
      const items = this.itemsFor(chart, answer);
      if (items.length) chart.load(items, null);
      chart.isCoarse = true;
    });
  }

  // Fetch everything again; resolve to the version that the data includes.
  reread() {
    this.isStarted = true;
    this.refine(this.charts);
    return this.fetchInto(this.charts, null);
  }

  // Apply the user's choice to every chart: immediately with the points at hand, then with the server's data for that range.
  choose() {
    const { ranges, logs, smooth } = this.view;
    const moved = this.charts.filter((chart) =>
      chart.choose({ range: ranges.get(chart.unit), log: logs.has(chart.spec.id), share: smooth }),
    );
    if (this.isStarted) this.refine(moved);
  }

  refine(charts) {
    for (const [unit, range] of this.view.ranges) {
      const zoomed = charts.filter((chart) => chart.unit === unit);
      if (range && zoomed.length) this.fetchInto(zoomed, range).catch(() => null);
    }
  }

  async fetchInto(charts, range) {
    const meanwhile = [];
    this.inFlight.add(meanwhile);
    const answer = await this.query(charts.map(requestFor), range).finally(() => this.inFlight.delete(meanwhile));
    for (const chart of charts) chart.load(this.itemsFor(chart, answer), range);
    for (const entries of meanwhile) this.append(entries);
    // Where steps were repeated, fetch the superseded points too.
    if (answer.items.some((item) => item.superseded?.length))
      import("./ghosts.js").then(({ setGhosts }) => setGhosts(this, charts, answer, range)).catch(() => null);
    else for (const chart of charts) chart.setGhosts([], range);
    return answer.version;
  }

  // Handle the points of a live frame.
  points(entries) {
    for (const meanwhile of this.inFlight) meanwhile.push(entries);
    if (this.append(entries)) this.again ||= setTimeout(() => this.onRedone(), AGAIN_MS);
  }

  append(entries) {
    let back = false;
    this.forEachChart((chart) => {
      const matching = entries.filter((entry) => isOf(chart, entry)).map(columnsOf);
      if (matching.length && chart.append(matching) && !chart.spec.band) back = true;
    });
    return back;
  }

  onRedone() {
    this.again = 0;
    this.reread().catch(() => null);
  }

  // Query the API: requests are [{names, rank, points, band}], range is {from, to} or null for everything.
  async query(requests, range) {
    const answer = { items: [], bands: [], version: null };
    await Promise.all(
      this.groupQueries(requests).map(async ({ names, rank, points, band }) => {
        const query = { points, digits: 6, ...(band ? { band: 1 } : { rank }), ...range };
        const found = await this.get(names, query);
        answer[band ? "bands" : "items"].push(...found.items.map((item) => ({ ...item, queriedRank: rank, points })));
        // The combined data is current only up to the oldest answer.
        answer.version = Math.min(answer.version ?? found.version, found.version);
      }),
    );
    return answer;
  }

  async get(names, rest) {
    const query = new URLSearchParams([...names].map((name) => ["name", name]));
    for (const [name, value] of Object.entries(rest)) query.set(name, value);
    const path = `/api/v1/jobs/${this.job}/series?${query}`;
    const response = await fetch(path, { headers: { Accept: "application/json" } });
    if (!response.ok) throw new Error(`series: ${response.status}`);
    return response.json();
  }

  // Charts of the same width share a request.
  groupQueries(requests) {
    const groups = new Map();
    for (const request of requests) {
      const key = `${request.points} ${request.band ? "band" : request.rank}`;
      if (!groups.has(key)) groups.set(key, { ...request, names: new Set(), members: [] });
      const group = groups.get(key);
      for (const name of request.names) group.names.add(name);
      group.members.push(request);
    }
    return [...groups.values()];
  }

  itemsFor({ spec, names }, answer) {
    const matching = spec.band
      ? answer.bands.filter((item) => item.median)
      : answer.items.filter((item) => item.queriedRank === (spec.rank ?? 0));
    return matching.filter((item) => names.has(item.name));
  }
}

const unitOf = (spec) => spec.xunit ?? "step";

function viewOf(grid, specs, changed) {
  const options = [...(grid.querySelector("[data-smooth]")?.options ?? [])];
  return new View({
    units: [...new Set(specs.map(unitOf))],
    logs: specs.filter((spec) => spec.scale).map((spec) => spec.id),
    shares: options.sort((a, b) => b.defaultSelected - a.defaultSelected).map((option) => Number(option.value)),
    changed,
  });
}

// Two points per pixel.
const requestFor = ({ spec, names, plot }) => ({
  names,
  rank: spec.rank ?? 0,
  band: Boolean(spec.band),
  points: 100 * Math.ceil(plot.clientWidth / 50),
});

const isOf = ({ spec, names }, entry) =>
  names.has(entry.name) &&
  (spec.band ? entry.kind === "band" : entry.kind === "value" && entry.rank === (spec.rank ?? 0));

const columnsOf = ({ name, kind, step, value, min, median, max, worst }) => ({
  name,
  step,
  columns: kind === "band" ? { min, median, max, worst } : { value },
});
