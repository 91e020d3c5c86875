// Whether somebody is using what a refresh would replace: an open dialog, a text selection, a form.
const PARTS = ["live", "below"];

export function isInUse() {
  return Boolean(document.querySelector("dialog[open]")) || !getSelection().isCollapsed || isFormInUse();
}

export function isFormInUse() {
  return PARTS.map((id) => document.getElementById(id)).some((part) => part && isBeingFilledIn(part));
}

function isBeingFilledIn(part) {
  if (part.querySelector("details[open] form")) return true;
  const fields = [...part.querySelectorAll("input, select, textarea")];
  return fields.some((field) => field === document.activeElement || isChanged(field));
}

function isChanged(field) {
  if (field.type === "checkbox" || field.type === "radio") return field.checked !== field.defaultChecked;
  if (!field.options) return field.value !== field.defaultValue;
  const initial = [...field.options].findIndex((option) => option.defaultSelected);
  return field.selectedIndex !== Math.max(initial, 0);
}
