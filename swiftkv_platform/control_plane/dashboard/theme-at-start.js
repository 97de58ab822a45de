// The theme that was chosen, set before the first paint. No module: those run after it.

try {
  document.documentElement.dataset.theme = localStorage.getItem("swiftkv-theme") ?? "system";
} catch {
  document.documentElement.dataset.theme = "system"; // a browser that keeps nothing for pages
}
