// Give the API reference the portal's light or dark theme: Swagger UI switches by a class.
const darkQuery = matchMedia("(prefers-color-scheme: dark)");

function applyTheme() {
  const { classList, dataset } = document.documentElement;
  classList.toggle("dark-mode", dataset.theme ? dataset.theme === "dark" : darkQuery.matches);
}

darkQuery.addEventListener("change", applyTheme);
applyTheme();
