// A post-mortem: adds a print button, and scrolls the lanes to where things go wrong.

const print = document.querySelector('[data-do="print"]');
if (print) {
  print.hidden = false;
  print.addEventListener("click", () => window.print());
}

// On a phone the lanes are wider than the screen: start shortly before the first sign of failure.
const lanes = document.querySelector(".lanes");
const first = lanes?.querySelector(".first");
if (first && lanes.scrollWidth > lanes.clientWidth) {
  const x = first.getBoundingClientRect().left - lanes.getBoundingClientRect().left;
  lanes.scrollLeft = Math.max(0, x - lanes.clientWidth * 0.45);
}
