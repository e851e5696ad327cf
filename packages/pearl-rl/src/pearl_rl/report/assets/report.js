"use strict";
(() => {
  const root = document.documentElement;
  const themes = ["", "dark", "light"];
  const nextTheme = () => {
    const now = themes[(themes.indexOf(root.dataset.theme || "") + 1) % themes.length];
    if (now) root.dataset.theme = now; else delete root.dataset.theme;
    for (const button of document.querySelectorAll(".theme")) button.textContent = now || "theme";
  };
  for (const button of document.querySelectorAll(".theme")) button.addEventListener("click", nextTheme);

  const duration = (s) => {
    if (s == null) return "none";
    if (s < 0.9995) return `${(s * 1e3).toFixed(0)} ms`;
    if (s < 99.95) return `${s.toFixed(1)} s`;
    const minutes = Math.floor(Math.round(s) / 60);
    return minutes < 60 ? `${minutes} min ${String(Math.round(s) % 60).padStart(2, "0")} s`
      : `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  };
  const element = (name, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };

  for (const run of document.querySelectorAll(".run")) cursor(run);
  for (const section of document.querySelectorAll(".decisions")) decisions(section);

  function cursor(run) {
    const steps = JSON.parse(run.querySelector(".data").textContent).steps;
    const readout = run.querySelector(".readout");
    const plots = [...run.querySelectorAll("svg[data-x0]")];
    if (!steps.length || !plots.length) return;
    let at = -1;
    const number = (plot, name) => Number(plot.dataset[name]);
    const place = (plot, x) => {
      const [x0, x1, left, right] = ["x0", "x1", "left", "right"].map((name) => number(plot, name));
      return left + (right - left) * (Math.min(x1, Math.max(x0, x)) - x0) / (x1 - x0);
    };
    const show = (index) => {
      at = Math.max(0, Math.min(steps.length - 1, index));
      const step = steps[at];
      for (const plot of plots) {
        for (const old of plot.querySelectorAll(".cursorband, .cursor")) old.remove();
        const a = place(plot, step.begin_s), b = place(plot, step.end_s);
        const top = number(plot, "top"), bottom = number(plot, "bottom");
        plot.append(
          element("rect", { class: "cursorband", x: a, y: top, width: Math.max(1, b - a), height: bottom - top }),
          element("line", { class: "cursor", x1: b, x2: b, y1: top, y2: bottom }));
      }
      const items = [
        ["tokens/s", step.tokens_per_s.toFixed(0)], ["rollout", duration(step.rollout_s)],
        ["predicted", duration(step.predicted_s)], ["configuration", step.configuration || "changing"],
        ["borrowed", step.borrowed ? "yes" : "no"], ...step.reward === null ? [] : [["reward", step.reward.toFixed(3)]],
        ["age", step.age.toFixed(2)], ["until", duration(step.end_s)]];
      readout.replaceChildren(Object.assign(document.createElement("b"), { textContent: `step ${step.step}` }));
      for (const [name, value] of items) {
        const span = document.createElement("span");
        span.append(Object.assign(document.createElement("i"), { textContent: name }), value);
        readout.append(span);
      }
      readout.hidden = false;
      readout.dataset.step = step.step;
    };
    const hide = () => {
      at = -1; readout.hidden = true; delete readout.dataset.step;
      for (const plot of plots) for (const old of plot.querySelectorAll(".cursorband, .cursor")) old.remove();
    };
    const under = (plot, event) => {
      const box = plot.getBoundingClientRect();
      const x = (event.clientX - box.left) * plot.viewBox.baseVal.width / box.width;
      const [x0, x1, left, right] = ["x0", "x1", "left", "right"].map((name) => number(plot, name));
      return x0 + (x1 - x0) * (x - left) / (right - left);
    };
    for (const plot of plots) {
      plot.addEventListener("pointermove", (event) => {
        const x = under(plot, event);
        const found = steps.findIndex((step) => x <= step.end_s);
        show(found < 0 ? steps.length - 1 : found);
      });
      const holder = plot.parentElement;
      if (holder.dataset.keys) continue;
      holder.dataset.keys = "1";
      holder.addEventListener("keydown", (event) => {
        const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: steps.length - 1 };
        if (event.key === "Escape") hide();
        else if (event.key in moves) { show(moves[event.key]); event.preventDefault(); }
      });
    }
  }

  function decisions(section) {
    const all = [...section.querySelectorAll(".decision")];
    const find = section.querySelector(".find"), count = section.querySelector(".count");
    let kind = "all";
    const apply = () => {
      const text = find.value.trim().toLowerCase();
      let shown = 0;
      for (const item of all) {
        const fits = (kind === "all" || item.dataset.kind === kind)
          && (!text || item.querySelector("summary").textContent.toLowerCase().includes(text));
        item.hidden = !fits;
        shown += fits;
      }
      count.textContent = `${shown} of ${all.length}`;
    };
    for (const button of section.querySelectorAll("[data-filter]")) button.addEventListener("click", () => {
      kind = button.dataset.filter;
      for (const other of section.querySelectorAll("[data-filter]"))
        other.setAttribute("aria-pressed", String(other === button));
      apply();
    });
    find.addEventListener("input", apply);
    apply();
  }

  const go = (by) => {
    // Not those of a run that is folded.
    const items = [...document.querySelectorAll(".decision:not([hidden]) > summary")]
      .filter((item) => !item.closest("details.one:not([open])"));
    const now = items.indexOf(document.activeElement);
    const next = items[now < 0 ? (by > 0 ? 0 : items.length - 1) : Math.max(0, Math.min(items.length - 1, now + by))];
    if (next) next.focus();
  };
  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "t") nextTheme();
    if (event.key === "j") go(1);
    if (event.key === "k") go(-1);
  });
})();
