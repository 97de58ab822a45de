// CodeMirror as a component, with errors underlined.

import { html, useEffect, useRef } from "../vendor/htm-preact.js";
import * as cm from "../vendor/codemirror.js";
import { makeCompletionSource } from "./completion.js";

/** `marks`: errors [{from, to, message}]; `shown`: {from} to scroll to; `schema`: for completion. */
export function Editor({ label, text, onInput, onSubmit, schema, marks, shown }) {
  const place = useRef(null);
  const view = useRef(null);
  const latest = useRef({});
  const reported = useRef([]); // texts reported by `onInput` that have not come back as `text` yet
  latest.current = { onInput, onSubmit, schema };
  useEffect(() => {
    const source = (context) => latest.current.schema && makeCompletionSource(latest.current.schema)(context);
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
          // Tab moves the focus out of the editor.
          cm.keymap.of([submit, ...cm.completionKeymap, ...cm.defaultKeymap, ...cm.historyKeymap, ...cm.foldKeymap, ...cm.lintKeymap, ...cm.searchKeymap]),
          cm.EditorView.updateListener.of((update) => {
            if (!update.docChanged || !reported.current) return;
            reported.current.push(update.state.doc.toString());
            latest.current.onInput(reported.current.at(-1));
          }),
        ],
      }),
    });
    return () => view.current.destroy();
  }, []);
  useEffect(() => {
    const own = reported.current.lastIndexOf(text);
    if (own >= 0) {
      reported.current.splice(0, own + 1);
      return;
    }
    const { state } = view.current;
    if (state.doc.toString() === text) return;
    reported.current = null; // do not report changes from outside
    view.current.dispatch({ changes: { from: 0, to: state.doc.length, insert: text } });
    reported.current = [];
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
