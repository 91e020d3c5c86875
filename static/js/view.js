// What a person chose to see of a page's charts, kept in its address: ?from=1200&to=2400&log=loss&smooth=0.02
// Opening such an address shows the same, going back undoes a choice, and what makes no sense there is ignored.
const AT_ONCE_MS = 1_000; // keys pressed so soon after each other are one choice

export class View {
  // units: of the charts' x; shares: what smoothing can be chosen, the first is the usual; changed(): show it.
  constructor({ units, logs, shares, changed }) {
    Object.assign(this, { units, known: new Set(logs), shares, changed });
    this.read();
    addEventListener("popstate", () => {
      this.kind = "";
      this.read();
      changed();
    });
  }

  read() {
    const query = new URLSearchParams(location.search);
    const share = Number(query.get("smooth") || Number.NaN);
    this.ranges = new Map(this.units.map((unit) => [unit, rangeIn(query, unit)]));
    this.logs = new Set((query.get("log") ?? "").split(",").filter((id) => this.known.has(id)));
    this.smooth = this.shares.includes(share) ? share : this.shares[0];
  }

  // Whole steps around what was chosen; null: everything.
  zoom(unit, range, kind = "") {
    const [from, to] = range ? [Math.max(0, Math.floor(range[0])), Math.ceil(range[1])] : [0, 0];
    this.ranges.set(unit, range && { from, to: Math.max(to, from + 1) });
    this.keep(kind);
  }

  setLog(id, on) {
    if (on) this.logs.add(id);
    else this.logs.delete(id);
    this.keep();
  }

  setSmooth(share) {
    this.smooth = share;
    this.keep("smooth");
  }

  // Choices of a kind at once are one step back.
  keep(kind = "") {
    const query = new URLSearchParams(location.search);
    const put = (name, value) => (value === undefined ? query.delete(name) : query.set(name, value));
    for (const [unit, range] of this.ranges) {
      put(nameOf("from", unit), range?.from);
      put(nameOf("to", unit), range?.to);
    }
    put("log", [...this.logs].join() || undefined);
    put("smooth", this.smooth === this.shares[0] ? undefined : this.smooth);
    const text = query.toString();
    const now = performance.now();
    const address = `${location.pathname}${text && `?${text}`}${location.hash}`;
    if (kind && kind === this.kind && now - this.at < AT_ONCE_MS) history.replaceState(null, "", address);
    else if (text !== location.search.slice(1)) history.pushState(null, "", address);
    this.kind = kind;
    this.at = now;
    this.changed();
  }
}

const nameOf = (name, unit) => (unit === "step" ? name : `${unit}_${name}`);

function rangeIn(query, unit) {
  const [from, to] = ["from", "to"].map((name) => {
    const text = query.get(nameOf(name, unit)) ?? "";
    return /^\d+$/.test(text) ? Number(text) : Number.NaN;
  });
  return from < to && Number.isSafeInteger(to) ? { from, to } : null;
}
