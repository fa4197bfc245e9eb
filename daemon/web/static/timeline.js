// One lane for each run: when checkpoints were sealed and durable, what failed, and which part of training stood still.

const WIDTH_MIN = 280, TOP = 34, STRIP = 26, AXIS = 22, SVG = "http://www.w3.org/2000/svg";
const FAILED = new Set(["shard_failed", "rank_lost", "damage_found", "checkpoint_skipped"]);

export function clock(unix_s, withSeconds = true) {
  const options = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
  if (withSeconds) options.second = "2-digit";
  return new Date(unix_s * 1000).toLocaleTimeString([], options);
}

function shape(name, attributes, tip) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (tip) element.appendChild(document.createElementNS(SVG, "title")).textContent = tip;
  return element;
}

function ticks(from, to, most) {
  const steps = [60, 120, 300, 600, 1800, 3600, 7200];
  const step = steps.find((each) => (to - from) / each <= most) ?? 14400;
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push(at);
  return found;
}

// Returns the lane of one run over the last `range` seconds, and what it shows in words.
export function lane(run, events, now, range, room) {
  const WIDTH = Math.max(WIDTH_MIN, room);
  const from = now - range, x = (unix_s) => ((unix_s - from) / range) * WIDTH;
  const height = TOP + STRIP + AXIS + 10;
  const svg = shape("svg", { class: "time", viewBox: `0 0 ${WIDTH} ${height}`, role: "img" });
  svg.append(shape("rect", { class: "floor", x: 0, y: 0, width: WIDTH, height: TOP, rx: 4 }));
  svg.append(shape("rect", { class: "floor", x: 0, y: TOP + 6, width: WIDTH, height: STRIP, rx: 4 }));
  let written = 0, failed = 0, restored = 0;
  const marks = [];
  for (const event of events) {
    if (event.unix_s < from) continue;
    const at = x(event.unix_s), tip = `${clock(event.unix_s)} ${event.text}`;
    if (event.kind === "shard_committed") {
      const begin = Math.max(0, x(event.unix_s - event.elapsed_s)), width = Math.max(3, at - begin);
      svg.append(shape("rect", { class: "written", x: begin.toFixed(1), y: 8, width: width.toFixed(1), height: 18, rx: 2 }, tip));
      written += 1;
    } else if (FAILED.has(event.kind)) {
      marks.push(shape("path", { class: "failed", d: `M${at - 7} 10l14 14m0-14l-14 14` }, tip));
      failed += 1;
    } else if (event.kind === "restored") {
      marks.push(shape("path", { class: "restored", d: `M${at} 6l9 20h-18z` }, tip));
      restored += 1;
    }
  }
  svg.append(...marks);
  strip(svg, run.shares, events.filter((event) => event.kind === "run_attached").map((event) => event.unix_s), from, x);
  for (const at of ticks(from, now, WIDTH < 600 ? 4 : 6)) {
    const place = x(at), anchor = place < 30 ? "start" : place > WIDTH - 30 ? "end" : "middle";
    svg.append(shape("line", { class: "rule", x1: place, x2: place, y1: TOP + STRIP + 6, y2: TOP + STRIP + 12 }));
    const label = shape("text", { x: place, y: height - 4, "text-anchor": anchor });
    label.textContent = clock(at, false);
    svg.append(label);
  }
  const words = `${written} written, ${restored} restored, ${failed} failed, lost or skipped in this time`;
  svg.setAttribute("aria-label", `Run ${run.name}: ${words}`);
  return { svg, words };
}

// Stalls as heights: the whole height is all of the time, drawn by the square root so that one percent can be seen.
// Before an attempt began nobody trained: what it says first is not of that time.
function strip(svg, shares, begun, from, x) {
  const bottom = TOP + 6 + STRIP;
  let before = null;
  for (const [at, stall, data] of shares) {
    const begin = Math.max(x(before ?? at - 5), x(at - 30), ...begun.filter((each) => each < at).map(x), 0);
    before = at;
    if (at < from) continue;
    const width = Math.max(1, x(at) - begin), high = STRIP * Math.sqrt(Math.min(1, data + stall)), low = STRIP * Math.sqrt(stall);
    const tip = `${clock(at)} checkpoints ${(100 * stall).toFixed(1)} %, data ${(100 * data).toFixed(1)} % of training`;
    if (high > low) svg.append(shape("rect", { class: "data", x: begin.toFixed(1), y: (bottom - high).toFixed(1), width: width.toFixed(1), height: high.toFixed(1) }, tip));
    if (low > 0) svg.append(shape("rect", { class: "stall", x: begin.toFixed(1), y: (bottom - low).toFixed(1), width: width.toFixed(1), height: low.toFixed(1) }, tip));
  }
}
