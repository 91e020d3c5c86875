// A job's spec, highlighted as in the editor.
import { highlighted } from "./toml.js";

for (const text of document.querySelectorAll("[data-toml]")) {
  text.replaceChildren(...[...text.children].map((line) => highlighted(line.textContent)));
}
