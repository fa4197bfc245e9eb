// Asks the daemon every two seconds while somebody looks, and shows what it says. Text only ever goes in as text.

import { clock, lane } from "/timeline.js";

const POLL_MS = 2000, SLOW_MS = 10000, ANSWER_MS = 7000, EVENTS_MAX = 5000, EVENTS_SHOWN = 60, DAY_S = 86400;
const $ = (id) => document.getElementById(id);
const seen = { logId: "", last: 0, events: [], state: null, range: 0, answeredAt: null, timer: null, asking: false };

function el(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null && value !== false) element.setAttribute(key, value);
  element.append(...children.filter((child) => child !== null && child !== ""));
  return element;
}

// -- words

export function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let value = bytes, unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 2 * DAY_S) return `${(seconds / 3600).toFixed(1)} h`;
  return `${Math.round(seconds / DAY_S)} d`;
}

const age = (seconds) => (seconds < 1 ? "under 1 s" : duration(seconds));
const count = (number) => number.toLocaleString("en");
const share = (value) => (value === null ? "–" : `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)} %`);
const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
const LEVEL = { green: "well", amber: "look", red: "act" };

function speed(steps_per_s) {
  if (steps_per_s === null) return "–";
  return steps_per_s >= 100 ? count(Math.round(steps_per_s)) : steps_per_s.toPrecision(3);
}

// -- tables that become lists of pairs on a narrow screen; roles, because that takes a table's own away

function table(label, heads, rows) {
  const top = el("tr", { role: "row" }, ...heads.map(([head, kind]) => el("th", { role: "columnheader", scope: "col", class: kind ?? null }, head)));
  const body = rows.map((cells) => el("tr", { role: "row" }, ...cells.map((cell, index) => {
    const [head, kind] = heads[index];
    return el("td", { role: "cell", "data-label": head, class: kind ?? null }, el("span", {}, ...(Array.isArray(cell) ? cell : [cell])));
  })));
  return el("div", { class: "scroll" }, el("table", { role: "table", "aria-label": label },
    el("thead", { role: "rowgroup" }, top), el("tbody", { role: "rowgroup" }, ...body)));
}

const small = (text) => el("small", {}, text);
const chip = (text, level) => el("span", { class: `state ${level}` }, text);

function empty(text, code) {
  return el("p", { class: "empty" }, text, code ? el("code", {}, code) : null);
}

// -- the parts of the page

function verdict(state) {
  const training = state.runs.filter((run) => run.state === "training");
  const ages = training.filter((run) => run.newest).map((run) => state.now_unix_s - run.newest.created_unix_s);
  const doing = training.length
    ? `${plural(training.length, "run")} ${training.length === 1 ? "is" : "are"} training` +
      (ages.length ? `, the ${training.length === 1 ? "newest" : "oldest of their newest"} checkpoint${training.length === 1 ? "" : "s"} is ${age(Math.max(...ages))} old` : ", no checkpoint is durable yet")
    : "no run is training";
  const title = { green: "All is well", amber: "Worth a look", red: "Somebody should act" }[state.level];
  const head = `${title}: ${doing}.`;
  if ($("verdict-head").textContent !== head) $("verdict-head").textContent = head;
  $("verdict").className = state.level;
  const items = state.findings.map((each) => el("li", {}, chip(LEVEL[each.level], each.level), el("b", {}, each.subject), each.text,
    each.hint ? el("span", { class: "hint" }, each.hint) : null));
  const told = state.findings.map((each) => each.subject + each.text).join("\n");
  if ($("findings").dataset.told !== told) { // else it would be read aloud at every poll
    $("findings").replaceChildren(...items);
    $("findings").dataset.told = told;
  }
}

function runs(state) {
  if (!state.runs.length) {
    return empty("No run has attached since the daemon started. In the training script:",
      'with everstep.attach("my-run", model=model, optimizer=optimizer, storage=["/nvme0/everstep"]) as run:\n    run.restore()\n    …\n    run.step()');
  }
  const heads = [["Run"], ["State", "words"], ["Step"], ["Steps/s"], ["Stall"], ["Data wait"], ["Newest checkpoint"], ["Every", "words"]];
  return table("Runs", heads, state.runs.map((run) => {
    const where = run.attached_count && run.attached_count < run.world_size ? ` of ${run.world_size}` : "";
    const ranks = run.state === "training" ? `${run.attached_count}${where} rank${run.world_size === 1 ? "" : "s"}` : "";
    const said = { training: "training", waiting: "trainer lost", left: "left", ended: "ended" }[run.state];
    const level = run.state === "training" ? run.level : run.state === "waiting" ? "amber" : "quiet";
    return [
      [el("b", {}, run.name), small(`attempt ${run.attempt}${state.sees_all ? `, uid ${run.owner_uid}` : ""}`)],
      [chip(said, level), ranks ? small(ranks) : null],
      run.step ? count(run.step) : "–",
      speed(run.steps_per_s),
      share(run.stall_share),
      share(run.data_share),
      run.newest ? [`${age(state.now_unix_s - run.newest.created_unix_s)} ago`, small(`${run.newest.checkpoint}, ${size(run.newest.size_bytes)}`)] : "none yet",
      run.interval_steps ? [run.is_paused ? "paused" : plural(run.interval_steps, "step") + (run.interval_s ? ` (${duration(run.interval_s)})` : ""), small(run.reason), run.skipped_count ? small(`${count(run.skipped_count)} skipped`) : null] : "not known yet",
    ];
  }));
}

function devices(state) {
  if (!state.devices.length) return empty("No store is open. The directories that a run names in storage=, or a node daemon's [devices], are shown here.");
  return table("Devices", [["Device"], ["State", "words"], ["Writes at"], ["Queue"], ["Free"]], state.devices.map((each) => {
    const used = each.total_bytes - each.free_bytes;
    const meter = each.total_bytes ? el("meter", { min: 0, max: each.total_bytes, value: used, high: 0.9 * each.total_bytes, optimum: 0, "aria-label": `${share(used / each.total_bytes)} used` }) : null;
    return [
      [el("b", {}, each.name), each.name === each.path ? null : small(each.path), small(`${each.engine || "–"}${each.is_direct ? ", direct" : ""}`)],
      [chip(each.state, each.state === "retired" ? "quiet" : each.level), each.reason ? small(each.reason) : null],
      each.write_bytes_per_s ? `${size(each.write_bytes_per_s)}/s` : "–",
      each.queued_bytes ? size(each.queued_bytes) : "idle",
      each.total_bytes ? [size(each.free_bytes), small(`of ${size(each.total_bytes)}`), meter] : "–",
    ];
  }));
}

function caches(state) {
  if (!state.caches.length) return empty("No dataset is cached. In the training script:", 'dataset = everstep.CachedDataset(source, budget="40GB")');
  return table("Caches", [["Dataset"], ["Hits"], ["In memory"], ["Memory"], ["Readers"]], state.caches.map((each) => {
    const asked = each.hit_count + each.miss_count;
    return [
      [el("b", {}, `cache ${each.number}`), small(`${each.dataset.slice(0, 12)}, ${each.content}${state.sees_all ? `, uid ${each.uid}` : ""}`), each.reason ? small(each.reason) : null],
      asked ? [share(each.hit_count / asked), small(`of ${count(asked)} reads`)] : "–",
      [share(each.sample_count ? each.published_count / each.sample_count : 0), small(`of ${plural(each.sample_count, "sample")}`)],
      [size(each.used_bytes), small(`of ${size(each.budget_bytes)}`)],
      count(each.client_count),
    ];
  }));
}

function groups(state) {
  if (!state.groups.length) return empty("No jobs share their preparation. Jobs that train on the same data can prepare each batch once between them:", 'from everstep.dataloader import SharedLoader\n\nloader = SharedLoader(dataset, batch_size=256, group="photos")');
  return table("Groups", [["Group"], ["Jobs"], ["Batches"], ["Memory"], ["Slowest"]], state.groups.map((each) => [
    [el("b", {}, each.name), small(`batches ${each.window[0]} to ${each.window[1]}`)],
    [count(each.job_count), each.outside_count ? small(`${each.outside_count} outside`) : null],
    [`${count(each.prepared_count)} prepared`, small(`${count(each.served_count)} served, ${count(each.private_count)} alone`)],
    [size(each.used_bytes), small(`of ${size(each.budget_bytes)}`)],
    each.slowest_behind ? `${plural(each.slowest_behind, "batch").replace("batchs", "batches")} behind` : "level",
  ]));
}

function members(state) {
  return table("Nodes", [["Node"], ["State", "words"], ["Samples from it"], ["Samples to it"]], state.members.map((each) => [
    [el("b", {}, each.address), each.is_me ? small("this node") : null],
    each.problem ? [chip("left alone", "amber"), small(each.problem)] : chip("well", "green"),
    count(each.fetched_count), count(each.offered_count),
  ]));
}

function timeline(state) {
  const found = state.runs.filter((run) => run.state !== "ended" || seen.events.some((event) => event.run === `${run.owner_uid}/${run.run_id}` && event.unix_s > state.now_unix_s - seen.range));
  $("timeline-key").hidden = !found.length;
  if (!found.length) return [empty("Checkpoints appear here as they are sealed and written.")];
  return found.map((run) => {
    const mine = seen.events.filter((event) => event.run === `${run.owner_uid}/${run.run_id}`);
    const { svg, words } = lane(run, mine, state.now_unix_s, seen.range, $("timeline-body").clientWidth);
    return el("div", { class: "lane" }, el("h3", {}, run.name, el("small", {}, words)), svg);
  });
}

function news(event) {
  if (event.kind !== "checkpoint_complete" || !event.size_bytes) return event.text;
  return `${event.text}: ${size(event.size_bytes)}, ${duration(event.elapsed_s)} after it was sealed`;
}

function events() {
  const complete = new Set(seen.events.filter((event) => event.kind === "checkpoint_complete").map((event) => event.run + event.checkpoint));
  const isNews = (event) => event.kind !== "snapshot_sealed" && !(event.kind === "shard_committed" && complete.has(event.run + event.checkpoint));
  const shown = seen.events.filter(isNews).slice(-EVENTS_SHOWN).reverse();
  if (!shown.length) return empty("Nothing yet.");
  return el("ol", { class: "events", tabindex: "0", "aria-label": "Newest first" }, ...shown.map((event) => el("li", {},
    el("time", { datetime: new Date(event.unix_s * 1000).toISOString() }, clock(event.unix_s)),
    el("span", { class: event.is_warning ? "warning" : null }, news(event), event.hint ? small(event.hint) : null))));
}

function footer(state) {
  const scrub = state.scrubs.find((each) => each.started_unix_s);
  const read = !scrub ? "" : scrub.ended_unix_s ? ` All committed bytes were last read ${duration(state.now_unix_s - scrub.ended_unix_s)} ago.` : " All committed bytes are being read now.";
  return `everstep ${state.daemon.version}, ${state.daemon.kind} daemon, pid ${state.daemon.pid}.${read} ` +
    (state.sees_all ? "You see every user's runs." : "You see your own runs.") + " Times are those of this browser's clock zone.";
}

function show(state) {
  $("node").textContent = `${state.daemon.kind === "node" ? "node" : "private"} daemon, up ${duration(state.daemon.uptime_s)}` +
    (state.daemon.arena_bytes ? `, ${size(state.daemon.arena_bytes)} of arenas` : "") + (state.daemon.is_draining ? ", draining" : "");
  document.title = `${{ green: "✓", amber: "!", red: "✗" }[state.level]} everstep`;
  verdict(state);
  $("runs-body").replaceChildren(runs(state));
  $("timeline-body").replaceChildren(...timeline(state));
  $("devices-body").replaceChildren(devices(state));
  $("caches-body").replaceChildren(caches(state));
  $("groups-body").replaceChildren(groups(state));
  $("members").hidden = !state.members.length;
  $("members-body").replaceChildren(members(state));
  const list = $("events-body").querySelector("ol"), place = list ? list.scrollTop : 0, held = list === document.activeElement;
  if ($("events-body").dataset.last !== `${seen.logId}.${seen.last}`) {
    $("events-body").replaceChildren(events());
    $("events-body").dataset.last = `${seen.logId}.${seen.last}`;
    const now = $("events-body").querySelector("ol");
    if (now) { now.scrollTop = place; if (held) now.focus({ preventScroll: true }); }
  }
  $("footer").textContent = footer(state);
}

// -- asking

function remember(state) {
  if (state.log_id !== seen.logId) seen.events = [];
  seen.logId = state.log_id;
  const known = seen.events.length ? seen.events[seen.events.length - 1].sequence : 0;
  seen.events.push(...state.events.filter((event) => event.sequence > known));
  seen.events.splice(0, Math.max(0, seen.events.length - EVENTS_MAX));
  seen.last = state.last;
  seen.state = state;
}

function reveal(part) {
  $("content").hidden = part !== "content";
  $("login").hidden = part !== "login";
}

function gone(why) {
  const since = seen.answeredAt ? `no answer since ${clock(seen.answeredAt)}` : "no answer";
  $("fresh").textContent = `${since}: ${why}; asking again`;
  $("fresh").className = "gone";
  $("content").className = "stale";
}

async function ask() {
  const answer = await fetch(`/api/state?after=${seen.last}`, { cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) });
  if (answer.status === 401) {
    Object.assign(seen, { logId: "", last: 0, events: [], answeredAt: null });
    $("fresh").textContent = "";
    $("fresh").className = $("node").textContent = $("footer").textContent = "";
    reveal("login");
    return SLOW_MS;
  }
  if (!answer.ok) throw new Error((await answer.text()).trim());
  const state = await answer.json();
  if (seen.logId && state.log_id !== seen.logId && seen.last) { // another log: numbers of the old one say nothing
    Object.assign(seen, { logId: "", last: 0, events: [] });
    return 0;
  }
  remember(state);
  seen.answeredAt = Date.now() / 1000;
  $("fresh").textContent = "live";
  $("fresh").className = $("content").className = "";
  reveal("content");
  if (!seen.range) choose(state.daemon.uptime_s < 600 ? 300 : 1800);
  show(state);
  return POLL_MS;
}

async function poll() {
  clearTimeout(seen.timer);
  if (seen.asking || document.hidden) return;
  seen.asking = true;
  let wait = POLL_MS;
  try {
    wait = await ask();
  } catch (error) {
    gone(error.name === "TimeoutError" || error instanceof TypeError ? "the daemon is not there" : error.message);
  }
  seen.asking = false;
  if (!document.hidden) seen.timer = setTimeout(poll, wait);
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(seen.timer);
  else poll();
});
function choose(range) {
  seen.range = range;
  for (const each of document.querySelectorAll("[data-range]")) each.setAttribute("aria-pressed", String(Number(each.dataset.range) === range));
}

function redraw() {
  if (seen.state) $("timeline-body").replaceChildren(...timeline(seen.state));
}

for (const button of document.querySelectorAll("[data-range]")) {
  button.addEventListener("click", () => { choose(Number(button.dataset.range)); redraw(); });
}
addEventListener("resize", redraw);
poll();
