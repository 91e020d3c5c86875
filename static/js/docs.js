// Give the API reference the portal's light or dark theme: Swagger UI switches by a class.
const night = matchMedia("(prefers-color-scheme: dark)");

function dress() {
  const { classList, dataset } = document.documentElement;
  classList.toggle("dark-mode", dataset.theme ? dataset.theme === "dark" : night.matches);
}

night.addEventListener("change", dress);
dress();
