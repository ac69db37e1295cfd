// The page: one stream of events, drawn as panels; decisions are kept, filtered and explained on demand.

import { Figure, Panel, Table, make, textOf } from "/figures.js";

const KEPT_DECISIONS = 1000, SILENT_MS = 15000, RETRY_MS = 1000, MOST_RETRY_MS = 5000;
const byId = (id) => document.getElementById(id);
const panels = new Map();
let decisions = new Map(), table = null, columns = [], process = null;

function headers() {
  const token = sessionStorage.getItem("token");
  return token ? { Authorization: `Bearer ${token}` } : {};
}

function state(text, lost) {
  if (byId("state").textContent !== text) byId("state").textContent = text; // else it would be read out again
  byId("state").className = lost ? "lost" : "";
}

// --- what came -------------------------------------------------------------------------------------------
async function show(snapshot) {
  if (snapshot.process !== process) {
    process = snapshot.process;
    panels.clear();
    byId("panels").replaceChildren();
    decisions = new Map();
    if (snapshot.kind === "conductor") await fetchDecisions();
  }
  document.title = `kvfs: ${snapshot.name}`;
  byId("name").textContent = snapshot.name;
  const window_s = Math.round(snapshot.window_s);
  state("connected", false);
  byId("clock").textContent =
    `${textOf(snapshot.at_s, "time")}, figures ${window_s ? `of the last ${window_s} s` : "since the start"}`;
  showProblems(snapshot.problems ?? []);
  for (const panel of snapshot.panels ?? []) {
    if (!panels.has(panel.title)) {
      const made = new Panel(panel);
      panels.set(panel.title, made);
      byId("panels").append(made.element);
    }
    panels.get(panel.title).show(panel, snapshot.at_s);
  }
  if (snapshot.decisions) {
    note(snapshot.decisions);
    if (!byId("hold").checked) showDecisions();
  }
}

function showProblems(problems) {
  const list = byId("problems"), text = problems.join("\n");
  if (list.shown === text) return; // else it would be read out every second
  list.shown = text;
  list.replaceChildren(...problems.map((problem) => make("li", problem)));
}

// --- decisions -------------------------------------------------------------------------------------------
async function fetchDecisions() {
  const answer = await fetch("/v1/decisions", { headers: headers() });
  if (answer.ok) note(await answer.json());
  showDecisions();
}

function note(panel) {
  columns = panel.columns;
  for (const row of panel.rows ?? []) decisions.set(row[0], row);
  for (const id of decisions.keys()) {
    if (decisions.size <= KEPT_DECISIONS) break;
    decisions.delete(id);
  }
  byId("decisions").hidden = false;
}

function showDecisions() {
  if (!columns.length) return;
  if (!table) {
    table = new Table("Decisions", columns, whyButton);
    byId("decisions").append(table.element);
  }
  const at = (title) => columns.findIndex((column) => column.title === title);
  const text = byId("text").value.toLowerCase(), outcome = byId("outcome").value, late = byId("late").checked;
  const over = (row, value, limit) => row[at(limit)] !== null && row[at(value)] > row[at(limit)];
  const all = [...decisions.values()].reverse();
  offerOutcomes(new Set(all.map((row) => row[at("outcome")])));
  const shown = all.filter((row) =>
    (!outcome || row[at("outcome")] === outcome)
    && (!late || over(row, "TTFT", "TTFT limit") || over(row, "TBT", "TBT limit"))
    && (!text || row.some((cell) => String(cell ?? "").toLowerCase().includes(text))));
  byId("shown").textContent = `${shown.length} of ${all.length}`;
  table.show(shown);
}

function offerOutcomes(outcomes) {
  const offered = new Set([...byId("outcome").options].map((option) => option.value));
  for (const outcome of outcomes) if (!offered.has(outcome)) byId("outcome").append(new Option(outcome, outcome));
}

function whyButton(id) {
  const button = make("button", id);
  button.type = "button";
  button.setAttribute("aria-label", `why decision ${id}`);
  button.addEventListener("click", () => explain(id));
  return button;
}

async function explain(id) {
  const body = byId("why-body");
  byId("why-title").textContent = `Why: ${id}`;
  body.replaceChildren(make("p", "asking"));
  byId("why").showModal();
  const answer = await fetch(`/v1/explain/${encodeURIComponent(id)}`, { headers: headers() }).catch(() => null);
  if (!answer) {
    body.replaceChildren(make("p", "no answer"));
    return;
  }
  const found = await answer.json();
  if (!answer.ok) {
    body.replaceChildren(make("p", found.error.message));
    return;
  }
  const figures = make("dl");
  body.replaceChildren(make("p", found.words ?? ""), figures);
  for (const [name, value] of Object.entries(found)) {
    if (Array.isArray(value) && value.length && typeof value[0] === "object") {
      body.append(make("h3", name), listed(name, value));
    } else if (!["words", "id"].includes(name) && value !== "" && typeof value !== "object") {
      const figure = new Figure({ title: name });
      figure.show({ value, unit: unitOf(name) });
      figures.append(figure.element);
    }
  }
}

const unitOf = (name) => (name.endsWith("_s") ? "s" : "");

function listed(name, values) {
  const keys = Object.keys(values[0]);
  const made = new Table(name, keys.map((key) => ({ title: key, unit: unitOf(key) })));
  made.show(values.map((value) => keys.map((key) => value[key])));
  return made.element;
}

// --- the stream ------------------------------------------------------------------------------------------
// EventSource sends no Authorization, so the events are read from a fetch.
async function follow() {
  const abort = new AbortController();
  let silence = setTimeout(() => abort.abort(), SILENT_MS);
  try {
    const answer = await fetch("/v1/events", { headers: headers(), signal: abort.signal, cache: "no-store" });
    if (answer.status === 401) return "denied";
    if (!answer.ok) return "refused";
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "", came = false;
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return came ? "ended" : "refused";
      clearTimeout(silence);
      silence = setTimeout(() => abort.abort(), SILENT_MS);
      const events = (text + value).split("\n\n");
      text = events.pop();
      for (const event of events) {
        const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
        if (data.length) {
          await show(JSON.parse(data.join("\n")));
          came = true;
        }
      }
    }
  } catch {
    return "ended";
  } finally {
    clearTimeout(silence);
    abort.abort();
  }
}

async function run() {
  for (let pause = RETRY_MS; ;) {
    const end = await follow();
    if (end === "denied") {
      state("a token is needed", true);
      await askToken();
      continue;
    }
    state(end === "refused" ? "refused, trying again" : "connection lost, trying again", true);
    pause = end === "ended" ? RETRY_MS : Math.min(2 * pause, MOST_RETRY_MS);
    await new Promise((done) => setTimeout(done, pause));
  }
}

function askToken() {
  const form = byId("access");
  form.hidden = false;
  byId("token").focus();
  return new Promise((done) => {
    form.onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem("token", byId("token").value);
      byId("token").value = "";
      form.hidden = true;
      state("connecting", false);
      done();
    };
  });
}

for (const id of ["text", "outcome", "late", "hold"]) byId(id).addEventListener("input", showDecisions);
byId("filter").addEventListener("submit", (event) => event.preventDefault());
run();
