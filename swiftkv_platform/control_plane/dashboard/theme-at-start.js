// Sets the chosen theme before the first paint. Not a module, since modules run later.

try {
  document.documentElement.dataset.theme = localStorage.getItem("swiftkv-theme") ?? "system";
} catch {
  document.documentElement.dataset.theme = "system"; // storage is disabled
}
