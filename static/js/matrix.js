// Client states by round: one row per client, one column per round. Shapes mark the states, so that reading needs no colour.
//
// data: {rows: [{name, short, owner, note, odd, values}], states, first, columns, done, total, accuracy};
// a value is an index into states, or -1 for none.
import { token } from "./paint.js";
import { count } from "./words.js";

const ROW = 20;
const LOW_ROW = 12; // with many clients
const AXIS = 22;
const LABEL = 70; // pixels per label on the round axis

export class Matrix {
  constructor(canvas, readout) {
    Object.assign(this, { canvas, readout, hover: null });
    this.ctx = canvas.getContext("2d");
    new ResizeObserver(() => this.paint()).observe(canvas.parentElement);
    canvas.addEventListener("pointermove", (event) => this.point(this.cellAt(event)));
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  show(data) {
    this.data = data;
    this.canvas.parentElement.hidden = !data.done;
    if (this.hover && (this.hover.row >= data.rows.length || this.hover.column >= data.columns)) this.hover = null;
    this.paint();
    this.showReadout();
  }

  layout() {
    const width = this.canvas.parentElement.clientWidth;
    const isNarrow = width < 560;
    const { rows, columns } = this.data;
    const row = rows.length > 30 ? LOW_ROW : ROW;
    const hasOwners = rows.some(({ owner }) => owner);
    const [left, right] = isNarrow ? [34, 0] : [hasOwners ? 148 : 76, 90];
    const bottom = rows.length * row;
    return { width, isNarrow, row, left, right, bottom, height: bottom + AXIS, cell: (width - left - right) / columns };
  }

  paint() {
    if (!this.data?.done || !this.canvas.parentElement.clientWidth) return;
    const at = this.layout();
    this.at = at;
    const ratio = devicePixelRatio;
    this.canvas.width = Math.round(at.width * ratio);
    this.canvas.height = Math.round(at.height * ratio);
    this.canvas.style.width = `${at.width}px`;
    this.canvas.style.height = `${at.height}px`;
    this.ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.ctx.font = `500 ${at.row < ROW ? 10 : 11}px Inter`;
    this.ctx.textBaseline = "middle";
    this.cells(at);
    this.names(at);
    this.ahead(at);
    this.axis(at);
    this.crosshair(at);
  }

  cells({ row, left, cell }) {
    const { ctx, data } = this;
    const shapes = shapesOf(ctx);
    const gap = cell > 3 ? 1 : 0;
    const width = Math.max(1, cell - gap);
    data.rows.forEach(({ values }, i) => {
      values.forEach((value, column) => {
        if (value < 0) return;
        shapes[data.states[value]]?.(left + column * cell, i * row + 1, width, row - 2);
      });
    });
  }

  names({ row, left, right, width, isNarrow }) {
    const { ctx } = this;
    const [ink, faint] = [token("--ink"), token("--faint")];
    ctx.textAlign = "left";
    this.data.rows.forEach(({ name, short, owner, note, odd }, i) => {
      const middle = i * row + row / 2;
      ctx.fillStyle = odd ? ink : faint;
      ctx.fillText(
        isNarrow ? short : owner ? truncated(ctx, `${short} ${owner}`, left - 8) : name,
        0,
        middle,
        left - 4,
      );
      if (right) ctx.fillText(note, width - right + 6, middle, right - 6);
    });
  }

  // Outline the rounds to come.
  ahead({ left, cell, bottom }) {
    const { columns, done } = this.data;
    if (done >= columns) return;
    this.ctx.strokeStyle = token("--line-strong");
    this.ctx.lineWidth = 1;
    this.ctx.setLineDash([3, 3]);
    this.ctx.strokeRect(left + done * cell + 0.5, 0.5, (columns - done) * cell - 1, bottom - 1);
    this.ctx.setLineDash([]);
  }

  axis({ left, cell, bottom }) {
    const { ctx, data } = this;
    const { first, columns } = data;
    const every = [1, 2, 5, 10, 20, 30, 50, 100].find((n) => n * cell >= LABEL) ?? 200;
    ctx.fillStyle = token("--faint");
    for (let column = 0; column < columns; column += 1) {
      const round = first + column;
      const isEnd = column === columns - 1;
      const isNear = column * cell < LABEL * 1.25 || (columns - 1 - column) * cell < LABEL / 2;
      if (!isEnd && column && (round % every || isNear)) continue;
      ctx.textAlign = column === 0 ? "left" : isEnd ? "right" : "center";
      const x = column === 0 ? left : isEnd ? left + columns * cell : left + (column + 0.5) * cell;
      ctx.fillText(column === 0 ? `round ${count(round)}` : count(round), x, bottom + 12);
    }
  }

  crosshair({ row, left, cell, bottom }) {
    if (!this.hover) return;
    const { ctx } = this;
    const x = left + this.hover.column * cell;
    const y = this.hover.row * row;
    ctx.fillStyle = token("--ink", 0.45);
    ctx.fillRect(Math.round(x + cell / 2), 0, 1, bottom);
    for (const [colour, thick] of [
      [token("--bg"), 4],
      [token("--ink"), 1.5],
    ]) {
      ctx.strokeStyle = colour;
      ctx.lineWidth = thick;
      ctx.strokeRect(x - 1.5, y - 0.5, cell + 2, row);
    }
    ctx.lineWidth = 1;
  }

  cellAt({ offsetX, offsetY }) {
    if (!this.at) return null;
    const column = Math.floor((offsetX - this.at.left) / this.at.cell);
    const row = Math.floor(offsetY / this.at.row);
    const isInside = row >= 0 && row < this.data.rows.length && column >= 0 && column < this.data.columns;
    return isInside ? { row, column } : null;
  }

  point(cell) {
    this.hover = cell;
    requestAnimationFrame(() => this.paint());
    this.showReadout();
  }

  // Describe the cell under the pointer, or else the newest round.
  showReadout() {
    const { rows, states, first, total, done, accuracy } = this.data;
    const { row, column } = this.hover ?? { row: null, column: done - 1 };
    const parts = row === null ? [] : [rows[row].name];
    if (done) parts.push(`round ${count(first + column)} of ${count(total)}`);
    if (row !== null) parts.push(stateText(states, rows[row].values[column], column >= done));
    if (accuracy[column] !== undefined) parts.push(`global accuracy ${accuracy[column]}`);
    const text = done ? parts.join(" · ") : "";
    if (this.readout.textContent !== text) this.readout.textContent = text;
    if (this.canvas.matches(":focus")) this.readout.setAttribute("aria-live", "polite");
  }

  key(event) {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const [down, right] = moves[event.key] ?? [];
    if (down === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    const from = this.hover ?? { row: 0, column: this.data.done - 1 };
    const within = (value, most) => Math.max(0, Math.min(most - 1, value));
    this.point({
      row: within(from.row + down, this.data.rows.length),
      column: within(from.column + right, this.data.columns),
    });
  }
}

const stateText = (states, value, isAhead) =>
  value >= 0
    ? states[value] === "broken"
      ? "no numbers"
      : states[value]
    : isAhead
      ? "not started"
      : "not selected, or not reported";

// Truncate a text to the given width.
function truncated(ctx, text, width) {
  if (ctx.measureText(text).width <= width) return text;
  let end = text.length - 1;
  while (end > 1 && ctx.measureText(`${text.slice(0, end)}…`).width > width) end -= 1;
  return `${text.slice(0, end)}…`;
}

// Full, lower half, dot, cross, stroke: distinguishable without colour.
function shapesOf(ctx) {
  const colours = {
    trained: token("--running", 0.42),
    late: token("--timeout"),
    dropped: token("--muted"),
    rejected: token("--failed"),
  };
  const fill = (colour, ...rest) => {
    ctx.fillStyle = colour;
    ctx.fillRect(...rest);
  };
  const stroke = (...lines) => {
    ctx.strokeStyle = colours.rejected;
    ctx.lineWidth = 1.5;
    ctx.beginPath();
    for (const [x1, y1, x2, y2] of lines) {
      ctx.moveTo(x1, y1);
      ctx.lineTo(x2, y2);
    }
    ctx.stroke();
  };
  return {
    trained: (x, y, w, h) => fill(colours.trained, x, y, w, h),
    late: (x, y, w, h) => fill(colours.late, x, y + h / 2, w, h / 2),
    dropped: (x, y, w, h) => fill(colours.dropped, x + w / 2 - 1, y + h / 2 - 1, 2, 2),
    rejected: (x, y, w, h) => {
      const d = Math.min(3, w / 2, h / 2);
      const [cx, cy] = [x + w / 2, y + h / 2];
      stroke([cx - d, cy - d, cx + d, cy + d], [cx + d, cy - d, cx - d, cy + d]);
    },
    broken: (x, y, w, h) => stroke([x + w / 2, y + 1, x + w / 2, y + h - 1]),
  };
}
