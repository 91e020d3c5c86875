// What a chart paints besides its lines: attempts, slow periods, non-finite values, limits; and colours from the tokens.
const probe = document.createElement("i");
probe.hidden = true;
document.body.append(probe);
const colours = new Map();

// Resolve a token to a colour for the canvas; cached until the theme changes.
export function token(name, alpha = 1) {
  const key = `${name} ${alpha}`;
  if (!colours.has(key)) {
    probe.style.color = alpha === 1 ? `var(${name})` : `color-mix(in srgb, var(${name}) ${alpha * 100}%, transparent)`;
    colours.set(key, getComputedStyle(probe).color);
  }
  return colours.get(key);
}

// Clear the cache before any painter reacts: by listening in the capture phase, and by registering first.
document.addEventListener("vigil:theme", () => colours.clear(), true);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => colours.clear());

export const tint = (series, alpha = 1) => token(series.color ? `--series-${series.color}` : "--muted", alpha);

// Shade every second attempt. A hairline at its start has the colour of the previous attempt's end; restarts in place
// get a hairline too.
export function paintAttempts(u, { breaks = [], restarts = [] }) {
  const { ctx, bbox } = u;
  const ratio = devicePixelRatio;
  const edge = bbox.left + bbox.width;
  ctx.save();
  ctx.font = `500 ${10.5 * ratio}px Inter`;
  ctx.textAlign = "left";
  ctx.textBaseline = "top";
  const line = (at, name) => {
    const x = u.valToPos(at, "x", true);
    if (x < bbox.left || x > edge) return;
    ctx.fillStyle = token(name);
    ctx.fillRect(Math.round(x), bbox.top, ratio, bbox.height);
  };
  const hasLabels = breaks.length > 1 && bbox.height > 150 * ratio;
  breaks.forEach((b, i) => {
    const from = Math.max(bbox.left, u.valToPos(b.at, "x", true));
    const to = Math.min(edge, i + 1 < breaks.length ? u.valToPos(breaks[i + 1].at, "x", true) : edge);
    if (to <= from) return;
    if (i % 2) {
      ctx.fillStyle = token("--ink", 0.035);
      ctx.fillRect(from, bbox.top, to - from, bbox.height);
    }
    if (i) line(b.at, `--${b.state}`);
    if (hasLabels && to - from > 60 * ratio) {
      ctx.fillStyle = token("--faint");
      ctx.fillText(b.label, from + 5 * ratio, bbox.top + 2 * ratio);
    }
  });
  for (const at of restarts) line(at, "--warn");
  ctx.restore();
}

// Mark where a shared file system was slow: [from, to, text]; the text is painted if there is room.
export function paintSlow(u, slow) {
  const { ctx, bbox } = u;
  const ratio = devicePixelRatio;
  ctx.save();
  ctx.font = `500 ${10 * ratio}px Inter`;
  ctx.textAlign = "left";
  ctx.textBaseline = "bottom";
  for (const [first, last, words] of slow) {
    const from = Math.max(bbox.left, u.valToPos(first, "x", true));
    const to = Math.min(bbox.left + bbox.width, u.valToPos(last, "x", true));
    if (to <= from) continue;
    ctx.fillStyle = token("--warn", 0.16);
    ctx.fillRect(from, bbox.top, Math.max(ratio, to - from), bbox.height);
    ctx.fillStyle = token("--muted");
    const room = bbox.left + bbox.width - to - 4 * ratio;
    if (ctx.measureText(words).width < room) ctx.fillText(words, to + 4 * ratio, bbox.top + bbox.height - 2 * ratio);
  }
  ctx.restore();
}

// Mark where values were NaN or infinite: the line stops, and a red foot shows why.
export function paintGaps(u, gaps) {
  const { ctx, bbox } = u;
  const ratio = devicePixelRatio;
  ctx.save();
  ctx.font = `600 ${10 * ratio}px Inter`;
  ctx.textAlign = "left";
  ctx.textBaseline = "bottom";
  let labelled = -1e9;
  for (const [from, to, what] of gaps) {
    const x = u.valToPos(from, "x", true);
    const width = Math.max(4 * ratio, u.valToPos(to, "x", true) - x);
    if (x + width < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.fillStyle = token("--failed", 0.12);
    ctx.fillRect(x, bbox.top, width, bbox.height);
    ctx.fillStyle = token("--failed");
    ctx.fillRect(x, bbox.top + bbox.height - 3 * ratio, width, 3 * ratio);
    if (x - labelled > 40 * ratio && x + width + 30 * ratio < bbox.left + bbox.width) {
      ctx.fillText(what, x + width + 3 * ratio, bbox.top + bbox.height - 2 * ratio);
      labelled = x;
    }
  }
  ctx.restore();
}

// Dashed reference lines such as the clipping norm, each labelled at the right with a halo against the curves.
export function paintLimits(u, limits) {
  const { ctx, bbox } = u;
  const ratio = devicePixelRatio;
  const edge = bbox.left + bbox.width;
  ctx.save();
  ctx.font = `500 ${10 * ratio}px Inter`;
  ctx.textAlign = "right";
  ctx.textBaseline = "bottom";
  ctx.fillStyle = token("--muted");
  ctx.strokeStyle = token("--bg");
  ctx.lineWidth = 4 * ratio;
  ctx.lineJoin = "round";
  for (const { value, label } of limits) {
    const y = Math.round(u.valToPos(value, "y", true));
    if (y < bbox.top || y > bbox.top + bbox.height) continue;
    for (let x = bbox.left; x < edge; x += 8 * ratio) ctx.fillRect(x, y, Math.min(4 * ratio, edge - x), ratio);
    ctx.strokeText(label, edge, y - 2 * ratio);
    ctx.fillText(label, edge, y - 2 * ratio);
  }
  ctx.restore();
}
