"use strict";
// Fetches /state.json once a second and redraws the page. Text from the run is inserted as text, never as HTML.

const PERIOD_MS = 1000;
const COLORS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c6bb1", "#999933"];
const ANCHOR = "var(--ink)";
const PHASES = { stepping: "good", evaluating: "info", draining: "info", joining: "info", left: "", stalled: "warn", lapsed: "bad" };
const $ = (id) => document.getElementById(id);

function element(tag, options = {}, ...children) {
  const { css, ...rest } = options;
  const made = Object.assign(document.createElement(tag), rest);
  for (const [name, value] of Object.entries(css || {})) made.style.setProperty(name, value);
  made.append(...children);
  return made;
}

const known = (value) => value !== null && value !== undefined;

function count(value) {
  if (!known(value)) return "–";
  const [unit, size] = [["G", 1e9], ["M", 1e6], ["k", 1e3]].find(([, size]) => Math.abs(value) >= size) || ["", 1];
  return `${Number((value / size).toPrecision(3))}${unit}`;
}

// 8.69 MB, 900 B
function quantity(value, unit) {
  const [, digits, prefix] = count(value).match(/^(.*?)([kMG]?)$/);
  return `${digits} ${prefix}${unit}`;
}

const percent = (share) => (known(share) ? `${(100 * share).toFixed(1)} %` : "–");
const number = (value, digits) => (known(value) ? value.toFixed(digits) : "–");

function duration(seconds) {
  if (!known(seconds)) return "–";
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes} min ${Math.floor(seconds % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

const clock = (t) => new Date(1000 * t).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });

const colors = new Map();
function colorOf(name) {
  if (!colors.has(name)) colors.set(name, COLORS[colors.size % COLORS.length]);
  return colors.get(name);
}

// ------------------------------------------------------------------------------------------------------------- charts

function ticks(low, high, wanted) {
  const rough = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) found.push(k * step);
  return found;
}

// series: [{color, points: [[x, y]...], dots}]; axes: {x, y}, functions that format a tick, and {low, high} of y, if fixed.
function chart(place, series, axes) {
  const points = series.flatMap((one) => one.points);
  if (points.length < 2) return place.replaceChildren(element("div", { className: "empty" }, "nothing to draw yet"));
  const width = place.clientWidth || 600, height = place.clientHeight || 200;
  const [left, right, top, bottom] = [46, 8, 6, 22];
  const xs = points.map((point) => point[0]), ys = points.map((point) => point[1]);
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  let [y0, y1] = [axes.low ?? Math.min(...ys), axes.high ?? Math.max(...ys)];
  if (y1 <= y0) y1 = y0 + (Math.abs(y0) || 1);
  const pad = axes.low === undefined ? 0.06 * (y1 - y0) : 0;
  [y0, y1] = [y0 - pad, axes.high === undefined ? y1 + 0.06 * (y1 - y0) : y1];
  const px = (x) => left + ((x - x0) / (x1 - x0 || 1)) * (width - left - right);
  const py = (y) => height - bottom - ((y - y0) / (y1 - y0)) * (height - top - bottom);
  const parts = [];
  for (const y of ticks(y0, y1, height > 200 ? 5 : 3)) {
    parts.push(`<line class="grid" x1="${left}" x2="${width - right}" y1="${py(y)}" y2="${py(y)}"/>`);
    parts.push(`<text x="${left - 7}" y="${py(y) + 4}" text-anchor="end">${axes.y(y)}</text>`);
  }
  for (const x of ticks(x0, x1, width > 500 ? 6 : 3)) {
    parts.push(`<text x="${px(x)}" y="${height - 5}" text-anchor="middle">${axes.x(x)}</text>`);
  }
  for (const { color, points, dots } of series) {
    if (!points.length) continue;
    const line = points.map(([x, y]) => `${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("L");
    parts.push(`<path d="M${line}" style="stroke:${color}"/>`);
    const marked = dots ? points : points.slice(-1);
    parts.push(...marked.map(([x, y]) => `<circle cx="${px(x)}" cy="${py(y)}" r="3" style="fill:${color}"/>`));
  }
  place.innerHTML = `<svg viewBox="0 0 ${width} ${height}" role="img">${parts.join("")}</svg>`; // contains only numbers and fixed colours
}

function legend(place, series) {
  place.replaceChildren(...series.filter((one) => one.points.length).map((one) =>
    element("span", {}, element("i", { css: { background: one.color } }), one.name,
      element("b", {}, one.last(one.points.at(-1)[1])))));
}

function losses(rows) {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row.losses)))].sort();
  const last = (loss) => loss.toFixed(3);
  const lines = names.map((name) => ({
    name, color: colorOf(name), last,
    points: rows.filter((row) => known(row.losses[name]?.[0])).map((row) => [row.fleet_tokens, row.losses[name][0]]),
  }));
  const anchor = [];
  for (const row of rows) {
    const found = Object.values(row.losses).map((pair) => pair[1]).filter(known);
    const fresh = found.filter((loss) => !anchor.seen?.has(loss)); // a loss stays in the status until the next one
    anchor.seen = new Set([...(anchor.seen || []), ...found]);
    if (fresh.length) anchor.push([row.fleet_tokens, fresh.reduce((a, b) => a + b) / fresh.length]);
  }
  return [...lines, { name: "anchor, validation", color: ANCHOR, last, points: anchor, dots: true }];
}

function rates(rows, name) {
  const points = [];
  for (let k = 1; k < rows.length; k++) {
    const passed = rows[k].t - rows[k - 1].t, grown = rows[k][name] - rows[k - 1][name];
    if (passed > 0 && grown >= 0) points.push([rows[k].t - rows[0].t, grown / passed]); // a new syncer counts from zero
  }
  return points.map(([t], k) => {
    const near = points.slice(Math.max(0, k - 2), k + 3);
    return [t, near.reduce((sum, point) => sum + point[1], 0) / near.length];
  });
}

// -------------------------------------------------------------------------------------------------------------- parts

function health(state, age) {
  const { status, summary, problem } = state;
  if (summary) {
    const tone = summary.status === "finished" ? "info" : "warn";
    const loss = known(summary.eval_loss) ? ` The final anchor's loss is ${summary.eval_loss.toFixed(4)}.` : "";
    const end = summary.status === "interrupted"
      ? `The run was interrupted after ${duration(summary.wall_s)}; the same command with the same --run-dir continues it.`
      : `The run is over after ${duration(summary.wall_s)}.`;
    return [tone, summary.status, `${end}${loss}`];
  }
  if (problem) {
    const since = known(age) ? ` for ${duration(age)}` : "";
    return ["bad", "no answer", `The syncer has not answered${since}; learners continue training and will reconnect. ${problem}`];
  }
  if (!status) return ["", "connecting", null];
  if (status.state === "suspended") return ["bad", "suspended", `Nothing is committed: ${status.reason}`];
  return [status.state === "open" ? "good" : "info", { open: "training", idle: "waiting for learners" }[status.state] ?? status.state, null];
}

const rateOf = (learners) =>
  learners.filter((one) => one.phase === "stepping").reduce((sum, one) => sum + one.tokens_per_s, 0);

function standing({ silent_s, records_behind }) {
  const behind = records_behind ? `${count(records_behind)} behind` : "";
  return silent_s > 3 ? `silent ${duration(silent_s)}${behind && `, ${behind}`}` : behind || "in step";
}

function figures(told) {
  const learners = told.learners || [];
  const all = new Set(learners.map((one) => one.id)).size;
  const there = learners.filter((one) => !["left", "lapsed"].includes(one.phase)).length;
  const rate = known(told.wall_s)
    ? told.fleet_tokens / told.wall_s // mean of the whole run
    : rateOf(learners);
  const rounds = told.num_commits ?? told.rounds;
  const shown = {
    learners: known(told.wall_s) ? all : `${there} of ${all}`, // wall_s is known only when the run is over
    "fleet tokens": count(told.fleet_tokens),
    "tokens/s": rate ? count(rate) : "–",
    rounds: Array.isArray(rounds) ? "–" : count(rounds),
    participation: percent(told.participation),
    goodput: percent(told.goodput),
    received: quantity(told.bytes_up, "B"),
    sent: quantity(told.bytes_down, "B"),
    ...(told.shards?.length && { shards: `${1 + told.shards.filter((one) => one.away_s === null).length} of ${1 + told.shards.length}` }),
    ...(told.standby && { standby: standing(told.standby) }),
  };
  $("figures").replaceChildren(...Object.entries(shown).map(([name, value]) =>
    element("div", { className: "figure" }, element("b", {}, value), element("span", {}, name))));
}

function learners(told) {
  const ago = (seconds) => `${duration(seconds)} ${known(told.wall_s) ? "before the end" : "ago"}`;
  const cardOf = (one) => {
    const rows = {
      step: count(one.trainer_step), loss: number(one.metrics.loss, 3), "tokens/s": count(one.tokens_per_s),
      staleness: one.staleness_versions, stall: duration(one.metrics["diloco/stall_s"]),
      merged: known(one.last_contribution_s_ago) ? ago(one.last_contribution_s_ago) : "–",
    };
    const facts = Object.entries(rows).flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, String(value))]);
    const name = element("span", { title: one.where ?? "" }, element("i", { css: { background: colorOf(one.id) } }), one.id);
    const [word, tone] = one.quarantined ? ["quarantine", "bad"] : [one.phase, PHASES[one.phase] ?? ""];
    const phase = element("span", { className: `phase ${tone}`, title: one.quarantined ?? "" }, word);
    const away = one.phase === "lapsed" ? " away" : "";
    return element("div", { className: `learner${away}` }, element("div", {}, name, phase), element("dl", {}, ...facts));
  };
  const all = (told.learners || []).slice().sort((a, b) => (a.id < b.id ? -1 : 1));
  const sites = [...new Set(all.map((one) => one.site ?? ""))].sort((a, b) => !a - !b || (a < b ? -1 : 1));
  const made = sites.flatMap((site) => {
    const there = all.filter((one) => (one.site ?? "") === site);
    const heading = element("h3", {}, site || "no site given", element("small", {}, `${count(rateOf(there))} tokens/s`));
    return [...(sites.some(Boolean) ? [heading] : []), ...there.map(cardOf)];
  });
  $("learners").replaceChildren(...(made.length ? made : [element("p", { className: "faint" }, "nobody yet")]));
}

function waits(status) {
  const made = (status?.waits || []).map((wait) => {
    const since = known(wait.since_s) ? `for ${duration(wait.since_s)}` : "";
    const until = known(wait.until_s) ? `, at most ${duration(wait.until_s)} more` : "";
    return element("li", {}, element("b", {}, wait.for.join(", ") || "nobody"), ` ${since}${until}`,
      element("span", { className: "faint" }, `${wait.what}; then: ${wait.then}`));
  });
  $("waits").replaceChildren(...(made.length ? made : [element("li", { className: "faint" }, "nobody")]));
}

function fragments(told, status) {
  const versions = told.versions || [], open = new Map((status?.rounds || []).map((one) => [one.fragment, one]));
  const low = Math.min(...versions), spread = Math.max(...versions) - low || 1;
  $("fragments").replaceChildren(...versions.map((version, p) => {
    const opened = open.get(p);
    const look = opened ? (opened.stage === "suspended" ? " suspended" : " open") : "";
    const title = opened ? `round ${opened.round}, ${opened.stage}; ready: ${opened.ready.join(", ") || "nobody"}` : "";
    return element("div", { className: `fragment${look}`, title, css: { "--ahead": (version - low) / spread } },
      `v${version}`, element("small", {}, `f${p}`));
  }));
}

function places(found) {
  $("processes").hidden = !Object.keys(found).length;
  $("places").replaceChildren(...Object.entries(found).map(([name, place]) =>
    element("li", {}, element("b", {}, name), ` ${place}`)));
}

function events(found) {
  $("events").replaceChildren(...(found.length ? found.slice().reverse().map((event) =>
    element("li", { className: event.level }, element("time", {}, clock(event.t)), element("span", {}, event.text)))
    : [element("li", { className: "faint" }, "nothing yet")]));
}

function draw(state) {
  const told = state.summary || state.status || {}, live = state.summary ? null : state.status;
  const age = known(state.answered) ? state.now - state.answered : null;
  const [tone, word, text] = health(state, age);
  document.title = `${word} · ${state.run}`;
  $("run").textContent = state.run;
  $("state").textContent = word;
  $("state").className = `pill ${tone}`;
  banner(tone, text);
  document.body.classList.toggle("stale", Boolean(state.problem) && !state.summary);
  const start = state.rows[0]?.t;
  $("since").textContent = known(start) ? `${duration(state.rows.at(-1).t - start)} of training, since ${clock(start)}` : "no learner has begun";
  figures(told);
  const lines = losses(state.rows);
  chart($("loss"), lines, { x: count, y: (y) => Number(y.toPrecision(3)) });
  legend($("loss-legend"), lines);
  learners(told);
  places(state.places);
  waits(live);
  fragments(told, live);
  const [unit, size] = (state.rows.at(-1)?.t ?? 0) - start < 180 ? ["s", 1] : ["min", 60];
  const time = (x) => `${Number(x.toPrecision(3))} ${unit}`, scaled = ([x, y]) => [x / size, y];
  const goodput = state.rows.filter((row) => known(row.goodput)).map((row) => scaled([row.t - start, row.goodput]));
  chart($("goodput"), [{ color: COLORS[2], points: goodput }], { x: time, y: (y) => `${Math.round(100 * y)} %`, low: 0, high: Math.max(1, ...goodput.map((point) => point[1])) });
  const bandwidth = [["up", "bytes_up", COLORS[0]], ["down", "bytes_down", COLORS[4]]].map(([name, key, color]) =>
    ({ name, color, points: rates(state.rows, key).map(scaled), last: (rate) => (live ? quantity(8 * rate, "bit/s") : "") }));
  chart($("bandwidth"), bandwidth, { x: time, y: (y) => count(8 * y), low: 0 });
  legend($("bandwidth-legend"), bandwidth);
  events(state.events);
}

function banner(tone, text) {
  $("banner").hidden = !text;
  $("banner").className = tone;
  $("banner").textContent = text || "";
}

let latest = null;
async function update() {
  try {
    const answer = await fetch("state.json", { cache: "no-store" });
    if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
    latest = await answer.json();
    draw(latest);
  } catch (error) {
    if (!latest?.summary) {
      const as = latest ? ` What follows is as of ${clock(latest.now)}.` : "";
      document.body.classList.add("stale");
      $("state").textContent = "page gone";
      $("state").className = "pill bad";
      banner("bad", `What served this page has ended (${error.message}).${as} Bring it back with: diloco status RUN_DIR --serve`);
    }
  }
  setTimeout(update, PERIOD_MS);
}
addEventListener("resize", () => latest && draw(latest));
update();
