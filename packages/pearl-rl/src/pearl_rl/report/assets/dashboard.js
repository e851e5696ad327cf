"use strict";
(() => {
  const root = document.documentElement, dash = document.querySelector(".dash");
  const themes = ["", "dark", "light"];
  const nextTheme = () => {
    const now = themes[(themes.indexOf(root.dataset.theme || "") + 1) % themes.length];
    if (now) root.dataset.theme = now; else delete root.dataset.theme;
    dash.querySelector(".theme").textContent = now || "theme";
  };
  dash.querySelector(".theme").addEventListener("click", nextTheme);
  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "t") nextTheme();
  });

  // The token stands behind the # of the address, which no request carries.
  const token = new URLSearchParams(location.hash.slice(1)).get("token") || new URLSearchParams(location.search).get("token");
  const query = token && !["localhost", "127.0.0.1", "[::1]"].includes(location.hostname) ? `?token=${token}` : "";
  const letters = { prefill: "P", decode: "D", colocated: "C", training: "T" };
  let view = null;

  const make = (name, attributes = {}, ...children) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "class") made.className = value; else made.setAttribute(key, value);
    }
    made.append(...children);
    return made;
  };
  const duration = (s) => {
    if (s == null) return "none";
    if (s === 0) return "0 s";
    if (s < 0.9995) return `${(s * 1e3).toFixed(0)} ms`;
    if (s < 99.95) return `${s.toFixed(1)} s`;
    const minutes = Math.floor(Math.round(s) / 60);
    return minutes < 60 ? `${minutes} min ${String(Math.round(s) % 60).padStart(2, "0")} s`
      : `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  };
  const signed = (s) => s < 0 ? `-${duration(-s)}` : duration(s);
  const whole = (value) => Math.round(value).toLocaleString("en-US");
  const tile = (key, text) => { dash.querySelector(`.tiles [data-key="${key}"] dd`).textContent = text; };

  // Redraw a part only where its data changed, so that focus and open details stay.
  const drawn = {};
  const part = (name, data, draw) => {
    const text = JSON.stringify(data);
    if (drawn[name] !== text) { drawn[name] = text; draw(data); }
  };

  const say = (words, kind) => {
    const state = dash.querySelector(".state");
    state.textContent = words; state.dataset.state = kind;
  };
  function show(now) {
    if (now.error) { say(now.error, "died"); return; }
    view = now;
    const words = { starting: "starting", running: "running", silent: "nothing written for a while: killed?" };
    say(now.outcome || words[now.state], now.state);
    dash.querySelector('[data-key="clock"]').textContent = `at ${duration(now.now_s)} of the run's clock`;
    const last = now.last_step;
    tile("step", now.steps < 1e6 ? `${now.completed}/${now.steps}` : `${now.completed}`);
    tile("configuration", now.configuration + (now.pinned ? ` pinned` : ""));
    tile("throughput", last ? whole(last.tokens_per_s) : "–");
    tile("reward", last && last.reward !== null ? last.reward.toFixed(3) : "–");
    tile("serving", String(now.serving_gpus));
    tile("queue", `${now.decoding} + ${now.waiting}`);
    const served = now.serving_versions.filter((version) => version !== now.weight_version);
    tile("weights", (served.length ? `v${served[0]} → ` : "") + `v${now.weight_version}`);
    tile("reclaims", String(now.reclaims));
    part("batch", [now.step, now.outcome ? 0 : now.batch, now.remaining, now.training, now.outcome], batch);
    part("control", [now.control, now.pinned, now.state], controls);
    part("map", now.workers, map);
    part("more", now.more_workers, (more) => { dash.querySelector(".more").textContent = more ? `${more} more workers are not shown.` : ""; });
    part("plan", [now.plan, now.groups, now.removals, now.loose], plan);
    part("spark", now.history, spark);
    part("decisions", now.decisions, decisions);
    part("news", now.news, (news) => dash.querySelector(".news").replaceChildren(
      ...news.length ? [] : [make("li", { class: "none" }, "Nothing has happened yet.")], ...news.map((item) => make("li", {}, make("span", { class: "when" }, duration(item.at_s)), " ", item.text))));
  }

  function batch([step, size, remaining, training, outcome]) {
    const done = size ? 100 * (size - remaining) / size : 0;
    const doing = { idle: "training is idle", waiting: "training waits for its GPUs", running: "an update runs" };
    dash.querySelector(".batchwords").textContent = size
      ? `step ${step}: ${size - remaining} of ${size} trajectories complete; ${doing[training]}` : outcome ? "none under way" : "no batch yet";
    const bar = dash.querySelector(".bar");
    bar.setAttribute("aria-valuenow", done.toFixed(0));
    bar.firstElementChild.style.width = `${done}%`;
  }

  const may = () => dash.dataset.control === "true" && Boolean(token) && view && view.control;
  function controls() {
    const hint = dash.querySelector(".hint");
    if (dash.dataset.control !== "true") hint.replaceChildren("Read-only. ", make("code", {}, "pearl-rl dashboard RUN_DIR --control"), " lets you act.");
    else if (!token) hint.textContent = "Open the address that the command printed: it holds the token.";
    else if (!view.control && view.state === "starting") hint.textContent = "The run is starting and does not listen yet.";
    else if (!view.control) hint.textContent = "This run does not listen: it is over, or was started without control.http=true.";
    else hint.textContent = view.pinned ? `Pinned to ${view.pinned}.` : "The policy chooses.";
    for (const item of dash.querySelectorAll("form.controls button, form.controls input")) item.disabled = !may();
    delete drawn.map;
  }

  async function act(command) {
    const answer = dash.querySelector(".answer");
    answer.textContent = "sending …";
    try {
      const response = await fetch("/commands", {
        method: "POST", body: JSON.stringify(command),
        headers: { Authorization: `Bearer ${token}`, "Content-Type": "application/json" } });
      const result = await response.json();
      answer.textContent = response.ok
        ? Object.entries(result).map(([key, value]) => `${key}: ${value === null ? "no" : value}`).join(", ") : result.error;
      answer.dataset.ok = response.ok;
    } catch (error) {
      answer.textContent = `not sent: ${error.message}`; answer.dataset.ok = false;
    }
  }
  dash.querySelector("form").addEventListener("submit", (event) => {
    event.preventDefault();
    act({ pin: dash.querySelector(".pin").value.trim().toUpperCase() });
  });
  for (const name of ["unpin", "freeze"])
    dash.querySelector(`[data-act="${name}"]`).addEventListener("click", () => act({ [name]: true }));

  function map(workers) {
    const groups = new Map();
    for (const worker of workers) {
      if (!groups.has(worker.group)) groups.set(worker.group, []);
      groups.get(worker.group).push(worker);
    }
    const order = ["training", "borrowed", "reserved", "preemptible"].filter((name) => groups.has(name));
    const focused = document.activeElement && document.activeElement.dataset.worker;
    dash.querySelector(".map").replaceChildren(...order.map((name) => make("div", { class: "group" },
      make("h3", {}, `${name} (${groups.get(name).length})`),
      make("div", { class: "cells" }, ...groups.get(name).map(cell)))));
    if (focused) { const again = dash.querySelector(`[data-worker="${focused}"]`); if (again) again.focus(); }
  }
  function cell(worker) {
    const failed = ["failed", "retired"].includes(worker.lifecycle);
    const serving = worker.lifecycle === "active";
    const css = failed ? "failed" : worker.role;
    const made = make("div", { class: `cell ${css}${serving ? "" : " pale"}`, "data-id": worker.id, "data-lifecycle": worker.lifecycle,
      title: `worker ${worker.id}.${worker.incarnation} on ${worker.place}: ${worker.role}, ${worker.lifecycle}, weights v${worker.weight_version ?? "–"}` },
      make("b", {}, letters[worker.role]), make("span", {}, ` ${worker.id}`),
      make("small", {}, worker.place),
      make("small", {}, worker.cordoned ? `fenced, ${worker.lifecycle}` : serving ? (worker.role === "training" ? "holds its GPU" : `${worker.running} + ${worker.waiting}`) : worker.lifecycle.replace("_", " ")));
    if (worker.reclaim_at_s !== null) made.append(make("small", {}, `gone at ${duration(worker.reclaim_at_s)}`));
    if (worker.role !== "training" && may()) {
      const verb = worker.cordoned ? "uncordon" : "cordon";
      const button = make("button", { type: "button", "data-worker": worker.id, "aria-label": `${verb} worker ${worker.id}` }, verb);
      button.addEventListener("click", () => act({ [verb]: [worker.id] }));
      made.append(button);
    }
    return made;
  }

  function plan([running, groups, removals, loose]) {
    const items = [];
    if (running) items.push(make("p", { class: "running" },
      `Plan ${running.id} to ${running.target}: stage ${running.stage + 1} of ${running.stages}, workers ${running.workers.join(", ")}. `,
      make("progress", { max: running.stages, value: running.stage, "aria-label": "stages of the plan that are done" })));
    for (const group of groups) items.push(make("p", {}, `Preparing ${group.kind} ${group.id}: workers ${group.workers.join(", ")}${group.cancelled ? ", being given up" : ""}.`));
    for (const removal of removals) items.push(make("p", {}, `Removing workers ${removal.workers.join(", ")} (plan ${removal.id}).`));
    for (const [node, gpus] of Object.entries(loose)) items.push(make("p", {}, `GPU ${gpus.join(", ")}${node ? ` on ${node}` : ""}: offered, and fewer than one worker needs.`));
    if (!items.length) items.push(make("p", {}, "Nothing changes at this moment."));
    dash.querySelector(".plan").replaceChildren(...items);
  }

  const svg = (name, attributes, ...children) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  };
  // One plot: lines over the same steps and one scale, its least and largest value at the left, its steps below.
  function plot(title, steps, lines, write, fromZero) {
    const width = 340, height = 120, right = 6, top = 8, bottom = 22;
    const known = lines.flatMap(([values]) => values).filter((value) => value != null);
    if (!known.length) return make("figure", {}, make("figcaption", {}, title), make("p", { class: "none" }, "No step is complete yet."));
    const most = Math.max(...known), least = fromZero ? 0 : Math.min(...known), span = most - least || 1;
    const marked = most > least ? [least, most] : [most];
    const left = Math.max(44, 10 + 7.4 * Math.max(...marked.map((value) => write(value).length)));
    const x = (i) => left + (width - left - right) * (steps.length > 1 ? i / (steps.length - 1) : 0.5);
    const y = (value) => height - bottom - (height - top - bottom) * (value - least) / span;
    const text = (at, down, anchor, words) => svg("text", { class: "axis", x: at, y: down, "text-anchor": anchor }, words);
    const marks = [];
    for (const value of marked) {
      marks.push(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }), text(left - 5, y(value) + 4, "end", write(value)));
    }
    for (const [values, css] of lines) {
      const points = values.map((value, i) => value == null ? null : `${x(i).toFixed(1)},${y(value).toFixed(1)}`).filter(Boolean);
      marks.push(points.length > 1 ? svg("polyline", { class: `line ${css}`, points: points.join(" ") })
        : svg("circle", { class: `dot ${css}`, cx: points.join("").split(",")[0] || -9, cy: points.join("").split(",")[1] || -9, r: 3 }));
    }
    marks.push(text(x(0), height - 5, steps.length > 1 ? "start" : "middle", `step ${steps[0]}`));
    if (steps.length > 1) marks.push(text(x(steps.length - 1), height - 5, "end", `step ${steps[steps.length - 1]}`));
    return make("figure", {}, make("figcaption", {}, title), svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title }, ...marks));
  }
  function spark(history) {
    const steps = history.map((s) => s.step), last = history[history.length - 1];
    const all = (key) => history.map((s) => s[key]);
    const now = (words) => last ? ` (now ${words(last)})` : "";
    const legend = make("ul", { class: "legend" }, make("li", {}, make("i", { class: "ink" }), "measured"), make("li", {}, make("i", { class: "predicted" }), "predicted"));
    const makespan = plot(`makespan${now((s) => `${duration(s.rollout_s)}, predicted ${duration(s.predicted_s)}`)}`, steps,
      [[all("predicted_s"), "predicted"], [all("rollout_s"), "ink"]], duration, true);
    makespan.append(legend);
    dash.querySelector(".spark").replaceChildren(
      plot(`tokens/s${now((s) => whole(s.tokens_per_s))}`, steps, [[all("tokens_per_s"), "ink"]], whole, true), makespan,
      ...last && last.reward === null ? []
        : [plot(`reward${now((s) => s.reward.toFixed(3))}`, steps, [[all("reward"), "ink"]], (v) => v.toFixed(2), false)]);
  }

  function decisions(all) {
    const open = new Set([...dash.querySelectorAll(".decision[open]")].map((item) => item.dataset.number));
    const box = dash.querySelector(".decided");
    const focused = document.activeElement && document.activeElement.closest && document.activeElement.closest(".decision");
    const at = focused && focused.dataset.number;
    box.replaceChildren(...all.map((item) => {
      const changed = item.previous !== null && item.previous !== item.selected;
      const what = item.gate ? (item.gate.open ? "lend training GPUs" : "keep training GPUs")
        : item.previous === item.selected ? `stays ${item.selected}` : `${item.previous ?? "nothing"} → ${item.selected}`;
      const why = item.gate
        ? (item.gate.benefit_s === null ? "no dedicated worker serves yet" : `benefit ${signed(item.gate.benefit_s)}, cost ${duration(item.gate.toggle_s)}`)
        : `${item.why}${item.gain} · ${item.trigger}, ${item.budget_workers} workers`;
      const body = make("tbody", {}, ...item.candidates.map((c) => make("tr", c.configuration === item.selected ? { class: "chosen" } : {},
        make("td", {}, c.configuration), make("td", {}, duration(c.makespan_s)), make("td", {}, c.violated.map((v) => v.replaceAll("_", " ")).join(", ")))));
      const made = make("details", { class: "decision", "data-number": item.number, "data-kind": item.gate ? "gate" : changed ? "switch" : "stay" },
        make("summary", {}, make("span", { class: "when" }, duration(item.at_s)), make("b", {}, what), make("span", { class: "why" }, why)),
        make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, make("th", {}, "candidate"), make("th", {}, "makespan"), make("th", {}, "breaks"))), body)),
        make("p", {}, `${item.limits.map((limit) => `${limit}. `).join("")}${item.considered} considered${item.measured ? `; step ${item.measured.step} then took ${duration(item.measured.seconds)}` : ""}`));
      made.open = open.has(String(item.number));
      return made;
    }));
    if (!all.length) box.append(make("p", { class: "none" }, "Nothing was decided yet."));
    if (at) { const again = box.querySelector(`[data-number="${at}"] summary`); if (again) again.focus(); }
  }
  for (const button of dash.querySelectorAll("[data-filter]")) button.addEventListener("click", () => {
    dash.querySelector(".decided").dataset.only = button.dataset.filter;
    for (const other of dash.querySelectorAll("[data-filter]")) other.setAttribute("aria-pressed", String(other === button));
  });

  const stream = new EventSource(`/events${query}`);
  stream.onmessage = (event) => show(JSON.parse(event.data));
  stream.onerror = () => say(stream.readyState === EventSource.CLOSED
    ? "the dashboard refuses this page; open the address that the command printed"
    : "the dashboard is not reachable; trying again", "silent");
})();
