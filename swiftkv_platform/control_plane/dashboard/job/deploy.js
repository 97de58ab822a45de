// The form that deploys a model. Knows a deployment's fields, no route.

import { html } from "../vendor/htm-preact.js";
import { Problem, useAction } from "../parts.js";

/** Calls `onDeploy` with the body of POST /deployments without its model; shows its error below the button. */
export function DeployForm({ name, route, button = "Deploy", onDeploy }) {
  const [act, busy, problem] = useAction();
  const submit = (event) => {
    event.preventDefault();
    const fields = new FormData(event.target);
    act(() =>
      onDeploy({
        route_prefix: fields.get("route"),
        min_replicas: Number(fields.get("min")),
        max_replicas: Number(fields.get("max")),
        engine: fields.get("mode") === "teacher" ? { swiftkv: false } : {},
      }),
    );
  };
  return html`<form class="row" onSubmit=${submit} aria-label="Deploy ${name}">
      <label>Route <input name="route" defaultValue=${route} required size="12" title="With API keys, the route is below /t/TENANT" /></label>
      <label>Serve <select name="mode"><option value="student">student</option><option value="teacher">teacher</option></select></label>
      <label>Min replicas <input name="min" type="number" min="1" value="1" /></label>
      <label>Max replicas <input name="max" type="number" min="1" value="1" /></label>
      <button disabled=${busy}>${button}</button>
    </form>
    <${Problem} problem=${problem} />`;
}
