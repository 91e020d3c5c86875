// Live updates of pages: one socket, frames decoded into typed arrays, and a call whenever the page must fetch again.
//
// follow(jobId, { points(series, header), state(header), event(event), stale(isStale), reread() }, { rank })
// followJobs({ jobs(lines), stale(isStale), reread() })
// Both return an object with close(). Every callback is optional.
//
// The socket subscribes before the page reads its history, so nothing is lost between the two: reread() is called after
// the subscription, and again after a gap or a reconnection. It may return (a promise of) the version that its data
// includes: frames up to that version are dropped. There is no replay. A point is identified by name, rank, incarnation
// and step, and a later point replaces it: see Curve.merge().

import { connect, rereader } from "./socket.js";

const GAP_MS = 400; // two web processes may publish a moment out of order
const BAND = ["min", "median", "max", "worst"];
const nothing = () => {};

/** Decode a frame into its header, with columns in its series: step is a Float64Array, the others are Float32Arrays. */
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
  let number = null; // the job's current attempt
  let version = null; // every frame up to this version has been received
  let ahead = new Set(); // versions received beyond a gap
  let queuedFrames = null; // frames received while the page fetches again
  let gapTimer = 0;

  const again = rereader(async () => {
    clearTimeout(gapTimer);
    gapTimer = 0;
    queuedFrames ??= [];
    let included;
    try {
      included = await reread();
    } finally {
      const frames = queuedFrames;
      queuedFrames = null;
      if (Number.isFinite(included)) advanceTo(included);
      for (const frame of frames) deliver(frame);
    }
  });

  function advanceTo(included) {
    if (version === null || included > version) version = included;
    ahead = new Set([...ahead].filter((seen) => seen > version));
  }

  function isCurrent(header) {
    // Return whether the header belongs to the current attempt; switch to a newer attempt.
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
    if (queuedFrames) {
      queuedFrames.push(header);
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

  const handlers = {
    hello(message) {
      number = message.number ?? number;
      version = null;
      ahead.clear();
      state(message);
      again();
    },
    heartbeat(message) {
      if (!isCurrent(message) || queuedFrames || version === null || message.version <= version) return;
      state(message);
      // Frames in flight may still close the gap.
      ahead.add(message.version);
      gapTimer ||= setTimeout(checkGap, GAP_MS);
    },
    missed: again,
  };

  const query = rank ? `?rank=${rank}` : "";
  return connect(`/ws/jobs/${jobId}${query}`, on.stale ?? nothing, (data) => {
    if (typeof data === "string") {
      const message = JSON.parse(data);
      handlers[message.kind]?.(message);
      return;
    }
    const header = decode(data);
    if (isCurrent(header)) deliver(header);
  });
}

export function followJobs(on) {
  const { jobs = nothing, reread = nothing } = on;
  const again = rereader(reread);
  const handlers = { hello: again, missed: again, jobs: (message) => jobs(message.jobs) };
  return connect("/ws/jobs", on.stale ?? nothing, (data) => {
    const message = JSON.parse(data);
    handlers[message.kind]?.(message);
  });
}

// Follow all machines: { machines(lines), stale(isStale), reread() }.
export function followMachines(on) {
  const { machines = nothing, reread = nothing } = on;
  const again = rereader(reread);
  const handlers = { hello: again, missed: again, machines: (message) => machines(message.machines) };
  return connect("/ws/cluster", on.stale ?? nothing, (data) => {
    const message = JSON.parse(data);
    handlers[message.kind]?.(message);
  });
}
