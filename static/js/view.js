// The user's view of a page's charts, stored in the address: ?from=1200&to=2400&log=loss&smooth=0.02
// Opening such an address restores the view, going back undoes a choice, and invalid values are ignored.
const AT_ONCE_MS = 1_000; // key presses within this time are one choice

export class View {
  // units: of the charts' x; shares: the selectable smoothing, the default first; changed(): called after every change.
  constructor({ units, logs, shares, changed }) {
    Object.assign(this, { units, logIds: new Set(logs), shares, changed });
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
    this.logs = new Set((query.get("log") ?? "").split(",").filter((id) => this.logIds.has(id)));
    this.smooth = this.shares.includes(share) ? share : this.shares[0];
  }

  // Zoom to whole steps around the range; null: everything.
  zoom(unit, range, kind = "") {
    const [from, to] = range ? [Math.max(0, Math.floor(range[0])), Math.ceil(range[1])] : [0, 0];
    this.ranges.set(unit, range && { from, to: Math.max(to, from + 1) });
    this.save(kind);
  }

  setLog(id, on) {
    if (on) this.logs.add(id);
    else this.logs.delete(id);
    this.save();
  }

  setSmooth(share) {
    this.smooth = share;
    this.save("smooth");
  }

  // Choices of the same kind in quick succession share one history entry.
  save(kind = "") {
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
