// Highlight a line of TOML: tables, values, comments.
const VALUE = /("(?:\\.|[^"\\])*"|'[^']*'|\b(?:true|false)\b|[+-]?\d[\d_.:eE+-]*)/;

export function highlighted(line) {
  const span = document.createElement("span");
  const comment = line.match(/^((?:[^"'#]|"(?:\\.|[^"\\])*"|'[^']*')*)(#.*)$/);
  const code = comment ? comment[1] : line;
  if (/^\s*\[/.test(code) && !code.includes("=")) span.append(piece("t", code));
  else {
    for (const [i, part] of code.split(VALUE).entries()) if (part) span.append(i % 2 ? piece("v", part) : part);
  }
  if (comment) span.append(piece("n", comment[2]));
  return span;
}

export function piece(kind, text) {
  const span = document.createElement("span");
  span.className = kind;
  span.textContent = text;
  return span;
}
