// CodeMirror as a component: text in, text out, marks under what is at fault.

import { html, useEffect, useRef } from "../vendor/htm-preact.js";
import * as cm from "../vendor/codemirror.js";
import { complete } from "./completion.js";

/** `marks` are [{from, to, message}]; `shown` is {from} of a place to go to; `schema` completes what is written. */
export function Editor({ label, text, onInput, onSubmit, schema, marks, shown }) {
  const place = useRef(null);
  const view = useRef(null);
  const latest = useRef({});
  const told = useRef([]); // texts of the editor's own that have not come back yet: several are under way while one types
  latest.current = { onInput, onSubmit, schema };
  useEffect(() => {
    const source = (context) => latest.current.schema && complete(latest.current.schema)(context);
    const submit = { key: "Mod-Enter", run: () => (latest.current.onSubmit(), true) };
    view.current = new cm.EditorView({
      parent: place.current,
      state: cm.EditorState.create({
        doc: text,
        extensions: [
          cm.lineNumbers(), cm.foldGutter(), cm.history(), cm.drawSelection(), cm.indentOnInput(), cm.bracketMatching(),
          cm.highlightActiveLine(), cm.lintGutter(), cm.yaml(), cm.indentUnit.of("  "),
          cm.syntaxHighlighting(cm.classHighlighter), cm.EditorView.lineWrapping,
          cm.autocompletion({ override: [source], icons: false }),
          cm.EditorView.contentAttributes.of({ "aria-label": label, "aria-multiline": "true", tabindex: "0" }),
          // Tab leaves the editor, as it leaves every other field.
          cm.keymap.of([submit, ...cm.completionKeymap, ...cm.defaultKeymap, ...cm.historyKeymap, ...cm.foldKeymap, ...cm.lintKeymap, ...cm.searchKeymap]),
          cm.EditorView.updateListener.of((update) => {
            if (!update.docChanged || !told.current) return;
            told.current.push(update.state.doc.toString());
            latest.current.onInput(told.current.at(-1));
          }),
        ],
      }),
    });
    return () => view.current.destroy();
  }, []);
  useEffect(() => {
    const own = told.current.lastIndexOf(text);
    if (own >= 0) {
      told.current.splice(0, own + 1);
      return;
    }
    const { state } = view.current;
    if (state.doc.toString() === text) return;
    told.current = null; // what comes from outside is not told again
    view.current.dispatch({ changes: { from: 0, to: state.doc.length, insert: text } });
    told.current = [];
  }, [text]);
  useEffect(() => {
    const { state } = view.current;
    const within = (position) => Math.min(Math.max(position, 0), state.doc.length);
    const found = marks.map(({ from, to, message }) => ({ from: within(from), to: within(Math.max(to, from)), severity: "error", message }));
    view.current.dispatch(cm.setDiagnostics(state, found));
  }, [marks]);
  useEffect(() => {
    if (!shown) return;
    const anchor = Math.min(shown.from, view.current.state.doc.length);
    view.current.dispatch({ selection: { anchor }, scrollIntoView: true });
    view.current.focus();
  }, [shown]);
  return html`<div ref=${place}></div>`;
}
