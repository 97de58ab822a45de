// The theme switch. The browser stores the choice; theme-at-start.js applies it before the first paint.

import { html, useEffect, useState } from "./vendor/htm-preact.js";

const KEPT = "swiftkv-theme";
const CHANGED = "swiftkv-theme-changed";
const THEMES = {
  system: ["System theme", html`<rect x="2" y="3" width="12" height="8" rx="1" /><path d="M6 14h4M8 11v3" />`],
  light: ["Light", html`<circle cx="8" cy="8" r="3" /><path d="M8 1v2M8 13v2M1 8h2M13 8h2M3 3l1.4 1.4M11.6 11.6 13 13M13 3l-1.4 1.4M4.4 11.6 3 13" />`],
  dark: ["Dark", html`<path d="M13.5 9.5A6 6 0 0 1 6.5 2.5a6 6 0 1 0 7 7z" />`],
};
const normalizeTheme = (name) => (name in THEMES ? name : "system");

function applyTheme(name) {
  document.documentElement.dataset.theme = name;
  dispatchEvent(new Event(CHANGED));
}

function storeTheme(name) {
  try {
    localStorage.setItem(KEPT, name);
  } catch {
    // Storage is disabled: the choice lasts until the page is closed.
  }
}

/** Call `react` when colors change, by the switch or the system; returns a function that stops it. */
export function onThemeChange(react) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  addEventListener(CHANGED, react);
  system.addEventListener("change", react);
  return () => {
    removeEventListener(CHANGED, react);
    system.removeEventListener("change", react);
  };
}

export function ThemeSwitch() {
  const [theme, setTheme] = useState(normalizeTheme(document.documentElement.dataset.theme));
  const applyChoice = (name) => {
    applyTheme(name);
    setTheme(name);
  };
  useEffect(() => {
    const follow = ({ key, newValue }) => key === KEPT && applyChoice(normalizeTheme(newValue)); // chosen in another tab
    addEventListener("storage", follow);
    return () => removeEventListener("storage", follow);
  }, []);
  const choose = (name) => () => {
    storeTheme(name);
    applyChoice(name);
  };
  return html`<fieldset class="themes">
    <legend class="sr">Theme</legend>
    ${Object.entries(THEMES).map(
      ([name, [words, drawing]]) => html`<label title=${words}>
        <input class="sr" type="radio" name="theme" value=${name} checked=${theme === name} onChange=${choose(name)} />
        <svg viewBox="0 0 16 16" aria-hidden="true">${drawing}</svg><span class="sr">${words}</span>
      </label>`,
    )}
  </fieldset>`;
}
