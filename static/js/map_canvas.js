// The map of a thousand nodes: one canvas, the same colour buckets as map_cells.js, arrow keys and a readout line.
import { heatBucket, stateOf, useBucket } from "./map_cells.js";
import { token } from "./paint.js";

const CELL = 8;
const STEP = CELL + 1;
const ROW = CELL + 2;
const HEAD = 18;
const BETWEEN = 18; // columns
const FEWEST = 8; // minimum width of a column, in cells
const NOBODY = 255;
const STATES = { b: "busy", w: "wasted", i: "idle", d: "drained", l: "lost", x: "broken", h: "hot", s: "stray" };
const ramp = (name) => Array.from({ length: 9 }, (_, i) => `--${name}-${i}`);
const [USES, HEATS, OWNERS] = ["seq", "heat", "series"].map(ramp);
const LETTERS = Object.fromEntries(Object.entries(STATES).map(([letter, state]) => [state, letter]));

export class CanvasMap {
  constructor(canvas, data, by, { open, showReadout }) {
    Object.assign(this, { canvas, data, by, open, showReadout });
    this.context = canvas.getContext("2d", { alpha: false });
    this.columns = data.columns.map((column) => ({ ...column, nodes: column.nodes.map(unpacked) }));
    this.nodes = this.columns.flatMap((column) => column.nodes.map((node) => Object.assign(node, { column })));
    this.byName = new Map(this.nodes.map((node) => [node.name, node]));
    this.widest = Math.max(FEWEST, ...this.nodes.map((node) => node.states.length));
    this.styles = new Map();
    this.cursor = null; // {node, index}
    this.abort = new AbortController();
    this.sizes = new ResizeObserver(() => this.fit());
    this.sizes.observe(canvas.parentElement);
    this.listen();
    this.fit();
  }

  close() {
    this.abort.abort();
    this.sizes.disconnect();
  }

  listen() {
    const { signal } = this.abort;
    const on = (kind, handler) => this.canvas.addEventListener(kind, handler, { signal });
    on("pointermove", (event) => this.point(this.under(event)));
    on("pointerleave", () => document.activeElement !== this.canvas && this.move(null));
    on("click", (event) => this.enter(this.under(event)));
    on("keydown", (event) => this.pressed(event));
    on("focus", () => !this.cursor && this.point(this.first(), true));
    const again = () => {
      this.styles.clear();
      this.paint();
    };
    document.addEventListener("vigil:theme", again, { signal });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again, { signal });
  }

  place() {
    return document.activeElement === this.canvas && this.cursor ? [this.cursor.node.name, this.cursor.index] : null;
  }

  focus([name, index]) {
    const node = this.byName.get(name);
    if (node) this.cursor = { node, index };
    this.canvas.focus({ preventScroll: true });
    this.paint();
  }

  colour(by) {
    this.by = by;
    this.paint();
  }

  // Place as many columns side by side as fit, and wrap the rest below.
  fit() {
    const width = this.canvas.parentElement.clientWidth;
    if (width === this.width) return;
    this.width = width;
    const wide = this.widest * STEP;
    let [x, y, tall] = [0, 0, 0];
    for (const column of this.columns) {
      if (x && x + wide > width) [x, y, tall] = [0, y + tall + HEAD, 0];
      Object.assign(column, { x, y, wide });
      for (const [i, node] of column.nodes.entries()) Object.assign(node, { x, y: y + HEAD + i * ROW });
      tall = Math.max(tall, HEAD + column.nodes.length * ROW);
      x += wide + BETWEEN;
    }
    const ratio = devicePixelRatio;
    this.canvas.width = width * ratio;
    this.canvas.height = (y + tall + 2) * ratio;
    this.canvas.style.height = `${y + tall + 2}px`;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.paint();
  }

  apply(lines) {
    for (const { node: name, gpus } of lines) {
      const node = this.byName.get(name);
      if (!node) continue;
      for (let i = 0; i < node.states.length; i++) {
        const values = gpus[node.indices[i]];
        if (!values) continue;
        const [percent, , celsius] = values;
        node.uses[i] = percent ?? -1;
        node.heats[i] = celsius ?? -1;
        node.states[i] = LETTERS[stateOf(STATES[node.states[i]], percent, celsius, node.limit)];
        if (this.styleKeyOf(node, i) !== node.styleKeys[i]) this.cell(node, i);
      }
    }
    if (this.cursor) this.showCursor(false);
  }

  paint() {
    const { context } = this;
    context.fillStyle = token("--bg");
    context.fillRect(0, 0, this.width, this.canvas.height);
    context.textBaseline = "top";
    for (const column of this.columns) {
      this.head(column);
      for (const node of column.nodes) {
        if (!node.states.length) this.bar(node);
        for (let i = 0; i < node.states.length; i++) this.cell(node, i);
      }
    }
    this.mark(this.cursor, token("--ink"));
  }

  head({ name, part, off, x, y, wide }) {
    const { context } = this;
    context.font = "600 11px Inter";
    context.fillStyle = token("--ink");
    const room = wide - (off ? 34 : 0);
    context.fillText(truncated(context, part ? `${name} ${part}` : name, room), x, y + 3);
    if (!off) return;
    context.fillStyle = token("--warn");
    context.fillText(off, x + wide - context.measureText(off).width - 1, y + 3);
  }

  // A node without GPUs: a bar of its CPUs in use.
  bar({ x, y, used, cpus, column }) {
    const { context } = this;
    context.fillStyle = token("--line");
    context.fillRect(x, y + 2, column.wide - 1, CELL - 4);
    context.fillStyle = token("--running");
    context.fillRect(x, y + 2, ((column.wide - 1) * used) / Math.max(1, cpus), CELL - 4);
  }

  cell(node, i) {
    const { context } = this;
    const [x, y] = [node.x + i * STEP, node.y];
    node.styleKeys[i] = this.styleKeyOf(node, i);
    const { fill, edge, sign, ink } = this.styleOf(node.styleKeys[i]);
    context.fillStyle = fill;
    context.fillRect(x, y, CELL, CELL);
    if (edge) {
      context.strokeStyle = edge;
      context.lineWidth = 1;
      context.strokeRect(x + 0.5, y + 0.5, CELL - 1, CELL - 1);
    }
    if (sign) SIGNS[sign](context, x, y, ink);
  }

  // The key of a cell's appearance: a cell is painted again only when its key changes.
  styleKeyOf(node, i) {
    const state = node.states[i];
    if (state === "l" || state === "d" || this.by === "state") return state;
    if (this.by === "use") return node.uses[i] < 0 ? "none" : USES[useBucket(node.uses[i])];
    const [low, high] = this.data.heat;
    if (this.by === "heat") return node.heats[i] < 0 ? "none" : HEATS[heatBucket(node.heats[i], low, high)];
    return node.owners[i] === NOBODY ? (state === "i" ? "i" : "none") : OWNERS[this.data.owners[node.owners[i]][2]];
  }

  styleOf(key) {
    if (!this.styles.has(key)) this.styles.set(key, styleFor(key));
    return this.styles.get(key);
  }

  mark(cursor, colour) {
    if (!cursor) return;
    const { node, index } = cursor;
    const wide = node.states.length ? STEP : node.column.wide;
    this.context.strokeStyle = colour;
    this.context.lineWidth = 1;
    this.context.strokeRect(node.x + index * STEP - 0.5, node.y - 0.5, wide, STEP);
  }

  move(cursor) {
    this.mark(this.cursor, token("--bg"));
    this.cursor = cursor;
    this.mark(cursor, token("--ink"));
  }

  point(cursor, byKey = false) {
    if (!cursor || (cursor.node === this.cursor?.node && cursor.index === this.cursor.index && !byKey)) return;
    this.move(cursor);
    this.showCursor(byKey);
  }

  showCursor(byKey) {
    const { node, index } = this.cursor;
    const parts = [node.name, node.column.part ? `${node.column.name} ${node.column.part}` : node.column.name];
    if (node.states.length) {
      const owner = this.data.owners[node.owners[index]];
      parts.push(`GPU ${node.indices[index]}`, this.data.words[node.states[index]], owner?.[1]);
      if (node.uses[index] >= 0) parts.push(`${node.uses[index]}\u00a0%`);
      if (node.heats[index] >= 0) parts.push(`${node.heats[index]}\u00a0°C`);
    } else parts.push(`${node.used} of ${node.cpus}\u00a0CPUs`);
    this.showReadout([...parts, node.trouble], byKey);
  }

  under({ offsetX, offsetY }) {
    const column = this.columns.find(
      ({ x, y, wide, nodes }) =>
        offsetX >= x && offsetX < x + wide && offsetY >= y + HEAD && offsetY < y + HEAD + nodes.length * ROW,
    );
    if (!column) return null;
    const node = column.nodes[Math.floor((offsetY - column.y - HEAD) / ROW)];
    const index = Math.floor((offsetX - column.x) / STEP);
    return index < Math.max(1, node.states.length) || !node.states.length
      ? { node, index: node.states.length ? index : 0 }
      : null;
  }

  first() {
    return this.nodes.length ? { node: this.nodes[0], index: 0 } : null;
  }

  enter(cursor) {
    if (!cursor) return;
    this.point(cursor);
    const { node, index } = cursor;
    if (!node.states.length) {
      location.assign(`/nodes/${encodeURIComponent(node.name)}`);
      return;
    }
    const { left, top } = this.canvas.getBoundingClientRect();
    const x = left + node.x + index * STEP;
    this.open(node.name, node.indices[index], { left: x, top: top + node.y, bottom: top + node.y + CELL });
  }

  pressed(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.cursor) return;
    if (event.key === "Enter" || event.key === " ") this.enter(this.cursor);
    else {
      const next = this.neighbour(event.key);
      if (!next) return;
      this.point(next, true);
      this.reveal(next.node);
    }
    event.preventDefault();
  }

  neighbour(key) {
    const { node, index } = this.cursor;
    const last = Math.max(0, node.states.length - 1);
    const at = this.columns.indexOf(node.column);
    const row = node.column.nodes.indexOf(node);
    if (key === "ArrowLeft" && index > 0) return { node, index: index - 1 };
    if (key === "ArrowRight" && index < last) return { node, index: index + 1 };
    if (key === "ArrowLeft" || key === "ArrowRight") {
      const column = this.columns[at + (key === "ArrowLeft" ? -1 : 1)];
      const adjacent = column?.nodes[Math.min(row, column.nodes.length - 1)];
      return adjacent && { node: adjacent, index: key === "ArrowLeft" ? Math.max(0, adjacent.states.length - 1) : 0 };
    }
    const place = this.nodes.indexOf(node);
    const steps = { ArrowUp: place - 1, ArrowDown: place + 1, Home: 0, End: this.nodes.length - 1 };
    const other = this.nodes[steps[key]];
    return other && { node: other, index: Math.min(index, Math.max(0, other.states.length - 1)) };
  }

  // The canvas may be several screens tall: scroll the cursor into view.
  reveal(node) {
    const { top } = this.canvas.getBoundingClientRect();
    const y = top + node.y;
    if (y < 40) scrollBy(0, y - 120);
    else if (y > innerHeight - 60) scrollBy(0, y - innerHeight + 160);
  }
}

function unpacked([name, limit, states, uses, heats, owners, trouble, indices, used, cpus]) {
  return {
    name,
    limit,
    states: [...states],
    uses: numbers(uses, -1),
    heats: numbers(heats, -1),
    owners: numbers(owners, NOBODY),
    trouble,
    styleKeys: [],
    indices: indices ?? [...states].map((_, i) => i),
    used,
    cpus,
  };
}

// Decode two hex digits per number; "--" is a missing value.
function numbers(text, none) {
  const values = new Int16Array(text.length / 2);
  for (let i = 0; i < values.length; i++)
    values[i] = text[2 * i] === "-" ? none : Number.parseInt(text.slice(2 * i, 2 * i + 2), 16);
  return values;
}

function styleFor(key) {
  if (key === "none") return { fill: token("--hover") };
  if (key.startsWith("--")) return { fill: key.startsWith("--series") ? solid(key, 0.62) : token(key) };
  return {
    b: () => ({ fill: solid("--running", 0.36) }),
    w: () => ({ fill: solid("--warn", 0.22), sign: "wasted", ink: token("--warn") }),
    i: () => ({ fill: token("--bg"), edge: token("--line-strong") }),
    d: () => ({ fill: token("--hover"), sign: "drained", ink: token("--faint") }),
    l: () => ({ fill: token("--failed"), sign: "lost", ink: token("--bg") }),
    x: () => ({ fill: token("--failed"), sign: "broken", ink: token("--bg") }),
    h: () => ({ fill: solid("--running", 0.3), sign: "hot", ink: token("--warn") }),
    s: () => ({ fill: token("--bg"), edge: token("--running"), sign: "stray", ink: token("--running") }),
  }[key]();
}

// Blend the colour with the background: on an opaque canvas, repainting must cover what was there.
function solid(name, alpha) {
  const probe = document.createElement("canvas").getContext("2d");
  probe.canvas.width = probe.canvas.height = 1;
  probe.fillStyle = token("--bg");
  probe.fillRect(0, 0, 1, 1);
  probe.fillStyle = token(name, alpha);
  probe.fillRect(0, 0, 1, 1);
  const [red, green, blue] = probe.getImageData(0, 0, 1, 1).data;
  return `rgb(${red} ${green} ${blue})`;
}

const SIGNS = {
  wasted: (c, x, y, ink) => line(c, ink, [x + 1, y + 7, x + 7, y + 1]),
  drained: (c, x, y, ink) => line(c, ink, [x + 2, y + 4, x + 6, y + 4]),
  lost: (c, x, y, ink) => {
    line(c, ink, [x + 2, y + 2, x + 6, y + 6]);
    line(c, ink, [x + 6, y + 2, x + 2, y + 6]);
  },
  broken: (c, x, y, ink) => {
    line(c, ink, [x + 4, y + 1, x + 4, y + 5]);
    line(c, ink, [x + 4, y + 6, x + 4, y + 7]);
  },
  hot: (c, x, y, ink) => {
    c.fillStyle = ink;
    c.beginPath();
    c.moveTo(x + 4, y + 1);
    c.lineTo(x + 7, y + 7);
    c.lineTo(x + 1, y + 7);
    c.fill();
  },
  stray: (c, x, y, ink) => {
    c.fillStyle = ink;
    c.fillRect(x + 3, y + 3, 2, 2);
  },
};

function line(context, ink, [x, y, toX, toY]) {
  context.strokeStyle = ink;
  context.lineWidth = 1.4;
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(toX, toY);
  context.stroke();
}

function truncated(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let end = text.length - 1;
  while (end > 1 && context.measureText(`${text.slice(0, end)}…`).width > room) end--;
  return `${text.slice(0, end)}…`;
}
