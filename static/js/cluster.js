// Nodes and queue: what the database says is shown anew every few seconds, while somebody looks.
import { lamp } from "./app.js";

const EVERY_MS = 5_000;

// An open dialog and a chosen text are left alone.
function refresh() {
  if (document.visibilityState !== "visible" || document.querySelector("dialog[open]")) return;
  if (!getSelection().isCollapsed) return;
  htmx.ajax("GET", location.href, { target: "#live", swap: "innerHTML" });
}

setInterval(refresh, EVERY_MS);
document.addEventListener("visibilitychange", refresh);
document.addEventListener("htmx:afterRequest", (event) => lamp(event.detail.successful));
lamp(true);
