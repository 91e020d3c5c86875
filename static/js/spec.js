// A job's spec, highlighted as in the editor.
import { drawn } from "./toml.js";

for (const text of document.querySelectorAll("[data-toml]")) {
  text.replaceChildren(...[...text.children].map((line) => drawn(line.textContent)));
}
