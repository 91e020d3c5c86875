// Live updates of pages: one socket, frames decoded into typed arrays, and a word whenever the page must read again.
//
// follow(jobId, { points(series, header), state(header), event(event), stale(isStale), reread() }, { rank })
// followJobs({ jobs(lines), stale(isStale), reread() })
// Both answer an object with close(). Every function may be left out.
//
// The socket joins before the page reads its history, so nothing falls between the two: reread() is called once it has
// joined, and again after a gap or a reconnection. It may return (a promise of) the version its data includes: frames up
// to that are dropped. There is no replay. A point is known by name, rank, incarnation and step, and a later one
// replaces it: Curve.merge() does that.

import { connect, rereader } from "./socket.js";

const GAP_MS = 400; // two web processes may publish a moment out of order
const BAND = ["min", "median", "max", "worst"];
const nothing = () => {};

/** The header of a frame, its series filled with columns: step is a Float64Array, the others are Float32Arrays. */
export function decode(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  let at = 4 + length;
  const column = (Type, n) => {
    const end = at + n * Type.BYTES_PER_ELEMENT;
    const values = new Type(buffer.slice(at, end));
    at = end;
    return values;
  };
  for (const entry of header.series ?? []) {
    entry.step = column(Float64Array, entry.n);
    for (const name of entry.kind === "band" ? BAND : ["value"]) entry[name] = column(Float32Array, entry.n);
  }
  return header;
}

export function follow(jobId, on, { rank = 0 } = {}) {
  const { points = nothing, state = nothing, event = nothing, reread = nothing } = on;
  let number = null; // of the attempt that the job is at
  let version = null; // everything up to here has been seen
  let ahead = new Set(); // versions seen beyond a gap
  let held = null; // frames that came while the page reads again
  let gapTimer = 0;

  const again = rereader(async () => {
    clearTimeout(gapTimer);
    gapTimer = 0;
    held ??= [];
    let included;
    try {
      included = await reread();
    } finally {
      const frames = held;
      held = null;
      if (Number.isFinite(included)) reached(included);
      for (const frame of frames) deliver(frame);
    }
  });

  function reached(included) {
    if (version === null || included > version) version = included;
    ahead = new Set([...ahead].filter((seen) => seen > version));
  }

  function about(header) {
    // Whose version this is; false for an attempt that is over.
    if (!Number.isFinite(header.number) || (number !== null && header.number < number)) return false;
    if (number !== null && header.number > number) {
      version = null;
      ahead.clear();
      again();
    }
    number = header.number;
    return true;
  }

  function isNew(seen) {
    if (version === null) {
      version = seen;
      return true;
    }
    if (seen <= version || ahead.has(seen)) return false;
    ahead.add(seen);
    while (ahead.delete(version + 1)) version += 1;
    if (ahead.size) gapTimer ||= setTimeout(checkGap, GAP_MS);
    return true;
  }

  function checkGap() {
    gapTimer = 0;
    if (!ahead.size) return;
    version = Math.max(version, ...ahead);
    ahead.clear();
    again();
  }

  function deliver(header) {
    if (held) {
      held.push(header);
      return;
    }
    if (header.extra) {
      if (header.number === number && header.series.length) points(header.series, header);
      return;
    }
    if (!isNew(header.version)) return;
    if (header.series?.length) points(header.series, header);
    for (const item of header.events ?? []) event(item, header);
    if (header.version >= Math.max(version, ...ahead)) state(header);
    if (header.partial) again();
  }

  const words = {
    hello(word) {
      number = word.number ?? number;
      version = null;
      ahead.clear();
      state(word);
      again();
    },
    heartbeat(word) {
      if (!about(word) || held || version === null || word.version <= version) return;
      state(word);
      // Frames on their way may still close the gap.
      ahead.add(word.version);
      gapTimer ||= setTimeout(checkGap, GAP_MS);
    },
    missed: again,
  };

  const query = rank ? `?rank=${rank}` : "";
  return connect(`/ws/jobs/${jobId}${query}`, on.stale ?? nothing, (data) => {
    if (typeof data === "string") {
      const word = JSON.parse(data);
      words[word.kind]?.(word);
      return;
    }
    const header = decode(data);
    if (about(header)) deliver(header);
  });
}

export function followJobs(on) {
  const { jobs = nothing, reread = nothing } = on;
  const again = rereader(reread);
  const words = { hello: again, missed: again, jobs: (word) => jobs(word.jobs) };
  return connect("/ws/jobs", on.stale ?? nothing, (data) => {
    const word = JSON.parse(data);
    words[word.kind]?.(word);
  });
}

// All machines: { machines(lines), stale(isStale), reread() }.
export function followMachines(on) {
  const { machines = nothing, reread = nothing } = on;
  const again = rereader(reread);
  const words = { hello: again, missed: again, machines: (word) => machines(word.machines) };
  return connect("/ws/cluster", on.stale ?? nothing, (data) => {
    const word = JSON.parse(data);
    words[word.kind]?.(word);
  });
}
