// The API's own description by day or by night, as the portal's pages: Swagger has both, by a class.
const night = matchMedia("(prefers-color-scheme: dark)");

function dress() {
  const { classList, dataset } = document.documentElement;
  classList.toggle("dark-mode", dataset.theme ? dataset.theme === "dark" : night.matches);
}

night.addEventListener("change", dress);
dress();
