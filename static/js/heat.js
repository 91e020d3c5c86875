// A heat map of many rows over time on one canvas; values are quantised to nine colours so that they can be read back by eye.
//
// data: {groups: [{name, rows: [{key, label, note, odd, values}]}], start, width, columns, ramp, low, high, unit,
// rowHeight, attempts}; x: formats times (times.js); on: {chosen(row), dragged(from, to), at(row, column)}
import { token } from "./paint.js";

const BETWEEN = 6; // pixels between groups
const AXIS = 22;
const STEPS = 9;
const DRAG = 6; // pixels; a shorter drag is a click

export class Heat {
  constructor(canvas, x, on) {
    Object.assign(this, { canvas, x, on, hover: null, chosen: "", drag: null });
    this.ctx = canvas.getContext("2d");
    new ResizeObserver(() => this.paint()).observe(canvas.parentElement);
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerleave", () => !this.drag && this.point(null));
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointerup", (event) => this.release(event));
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  show(data) {
    this.data = data;
    this.rows = data.groups.flatMap((group) => group.rows);
    if (this.hover && this.hover.row >= this.rows.length) this.hover = null;
    this.paint();
  }

  choose(key) {
    this.chosen = key;
    this.paint();
  }

  // Compute the positions for the available width.
  layout() {
    const width = this.canvas.parentElement.clientWidth;
    const narrow = width < 560;
    const left = narrow ? 58 : 92;
    const right = narrow ? 0 : 70;
    const { columns, rowHeight, groups } = this.data;
    const boxes = [];
    let y = 0;
    for (const group of groups) {
      for (const row of group.rows) {
        boxes.push({ y, row, group });
        y += rowHeight;
      }
      y += BETWEEN;
    }
    return { width, height: y + AXIS, left, right, cell: (width - left - right) / columns, boxes, bottom: y - BETWEEN };
  }

  paint() {
    if (!this.data || !this.canvas.parentElement.clientWidth) return;
    const at = (this.at = this.layout());
    const { canvas, ctx } = this;
    const ratio = devicePixelRatio;
    canvas.width = Math.round(at.width * ratio);
    canvas.height = Math.round(at.height * ratio);
    canvas.style.height = `${at.height}px`;
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    ctx.font = "500 11px Inter";
    ctx.textBaseline = "middle";
    this.cells(at);
    this.names(at);
    this.axis(at);
    this.overlay(at);
  }

  cells({ boxes, left, cell }) {
    const { ramp, low, high, rowHeight } = this.data;
    const colours = Array.from({ length: STEPS }, (_, i) => token(`--${ramp}-${i}`));
    for (const { y, row } of boxes) {
      row.values.forEach((value, column) => {
        if (value === null) return;
        const step = Math.floor(((value - low) / (high - low)) * STEPS);
        this.ctx.fillStyle = colours[Math.max(0, Math.min(STEPS - 1, step))];
        this.ctx.fillRect(left + column * cell, y, cell + 0.6, rowHeight - 1);
      });
    }
  }

  names({ boxes, left, right, width }) {
    const { rowHeight } = this.data;
    const tall = rowHeight >= 14;
    const { ctx } = this;
    const [ink, faint] = [token("--ink"), token("--faint")];
    let last = null;
    ctx.textAlign = "left";
    for (const { y, row, group } of boxes) {
      const middle = y + rowHeight / 2;
      ctx.fillStyle = row.key === this.chosen ? ink : faint;
      if (tall) ctx.fillText(row.label, 0, middle, left - 6);
      else if (group !== last) ctx.fillText(group.name, 0, y + (rowHeight * group.rows.length) / 2, left - 6);
      last = group;
      if (right && (row.odd || (tall && boxes.length < 13))) {
        ctx.fillStyle = row.odd ? ink : faint;
        ctx.fillText(row.odd ? `◂ ${row.note}` : row.note, width - right + 6, middle, right - 6);
      }
    }
  }

  axis({ left, cell, bottom }) {
    const { start, width, columns, attempts } = this.data;
    const { ctx } = this;
    const span = columns * cell;
    const ticks = Math.max(1, Math.floor(span / 110));
    ctx.fillStyle = token("--faint");
    for (let i = 0; i <= ticks; i += 1) {
      ctx.textAlign = i === 0 ? "left" : i === ticks ? "right" : "center";
      ctx.fillText(this.x.short(start + (i / ticks) * columns * width), left + (i / ticks) * span, bottom + 14);
    }
    ctx.fillStyle = token("--muted");
    for (const at of attempts) {
      const from = left + ((at - start) / width) * cell;
      if (from > left && from < left + span) ctx.fillRect(Math.round(from), 0, 1, bottom);
    }
  }

  overlay({ boxes, left, cell, bottom, right, width }) {
    const { ctx, hover, drag } = this;
    const { rowHeight } = this.data;
    const ink = token("--ink");
    const chosenBox = boxes.find(({ row }) => row.key === this.chosen);
    if (chosenBox) {
      for (const [colour, thick] of [
        [token("--bg"), 4],
        [ink, 1.5],
      ]) {
        ctx.strokeStyle = colour;
        ctx.lineWidth = thick;
        ctx.strokeRect(left - 1, chosenBox.y - 1.5, width - left - right + 2, rowHeight + 2);
      }
      ctx.lineWidth = 1;
    }
    if (drag && drag.to !== drag.from) {
      ctx.fillStyle = token("--ink", 0.12);
      ctx.fillRect(Math.min(drag.from, drag.to), 0, Math.abs(drag.to - drag.from), bottom);
    }
    if (!hover) return;
    const x = left + hover.column * cell;
    ctx.fillStyle = token("--ink", 0.45);
    ctx.fillRect(Math.round(x + cell / 2), 0, 1, bottom);
    ctx.strokeStyle = token("--bg");
    ctx.lineWidth = 4;
    ctx.strokeRect(x - 1.5, boxes[hover.row].y - 1.5, cell + 2, rowHeight + 2);
    ctx.strokeStyle = ink;
    ctx.lineWidth = 1.5;
    ctx.strokeRect(x - 1.5, boxes[hover.row].y - 1.5, cell + 2, rowHeight + 2);
    ctx.lineWidth = 1;
  }

  cellAt({ offsetX, offsetY }) {
    const { boxes, left, cell } = this.at;
    const column = Math.floor((offsetX - left) / cell);
    const row = boxes.findIndex(({ y }) => offsetY >= y && offsetY < y + this.data.rowHeight);
    return row >= 0 && column >= 0 && column < this.data.columns ? { row, column } : null;
  }

  point(cell) {
    this.hover = cell;
    requestAnimationFrame(() => this.paint());
    this.on.at(cell && this.rows[cell.row], cell?.column);
  }

  move(event) {
    if (!this.at) return;
    if (this.drag) this.drag.to = this.inside(event.offsetX);
    this.point(this.cellAt(event));
  }

  inside(x) {
    return Math.max(this.at.left, Math.min(x, this.at.left + this.data.columns * this.at.cell));
  }

  press(event) {
    if (event.button || event.offsetX < this.at.left) return;
    this.canvas.setPointerCapture(event.pointerId);
    const from = this.inside(event.offsetX);
    this.drag = { from, to: from };
  }

  release(event) {
    const { drag } = this;
    this.drag = null;
    if (!drag) return;
    const cell = this.cellAt(event);
    if (Math.abs(drag.to - drag.from) < DRAG) {
      if (cell) this.on.chosen(this.rows[cell.row]);
      return;
    }
    const { start, width } = this.data;
    const at = (x) => start + ((x - this.at.left) / this.at.cell) * width;
    this.on.dragged(Math.floor(at(Math.min(drag.from, drag.to))), Math.ceil(at(Math.max(drag.from, drag.to))));
  }

  key(event) {
    const [down, right] =
      { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key] ?? [];
    if (down === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    const row = this.rows.findIndex(({ key }) => key === this.chosen);
    const from = this.hover ?? { row: Math.max(0, row), column: this.data.columns - 1 };
    const within = (value, most) => Math.max(0, Math.min(most - 1, value));
    const to = {
      row: within(from.row + down, this.rows.length),
      column: within(from.column + right, this.data.columns),
    };
    this.point(to);
    if (down) this.on.chosen(this.rows[to.row]);
  }
}

// The colour scale with its end values, for the head.
export function rampOf(element, { ramp, low, high, unit }) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [72, 8];
  const ctx = canvas.getContext("2d");
  for (let i = 0; i < STEPS; i += 1) {
    ctx.fillStyle = token(`--${ramp}-${i}`);
    ctx.fillRect(i * 8, 0, 8, 8);
  }
  element.replaceChildren(`${low}`, canvas, `${high} ${unit}`);
}
