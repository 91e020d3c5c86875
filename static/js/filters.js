// Filters of a list: chips apply immediately, the search when typing pauses.
const filters = document.getElementById("filters");
let typing = 0;
const apply = (wait) => {
  clearTimeout(typing);
  typing = setTimeout(() => htmx.trigger(filters, "vigil:filter"), wait);
};
filters.addEventListener("input", (event) => event.target.type === "search" && apply(300));
filters.addEventListener("change", (event) => {
  if (event.target.type === "search") return; // already handled by the input event
  if (event.target.matches("select")) event.target.toggleAttribute("data-on", event.target.value !== "");
  if (event.target.type === "checkbox") event.target.closest(".chip").hidden = !event.target.checked;
  apply(0);
});
// Keep empty fields out of the address.
filters.addEventListener("htmx:configRequest", (event) => {
  for (const [name, value] of [...event.detail.formData.entries()])
    if (value === "") event.detail.formData.delete(name);
});
