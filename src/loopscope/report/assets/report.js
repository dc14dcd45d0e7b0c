"use strict";
// Draws every element with data-chart from the JSON in #charts; again when light and dark change, or when a live
// page hands over new data. Text reaches the page as data only, never as markup.
const loopscope = (() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let charts = JSON.parse(document.getElementById("charts").textContent);
  const views = new Map();

  const viridis = ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"];
  // Around a grey middle, and brighter from end to end: too little and too much differ without colour too.
  const diverging = ["#0b2f6b", "#4a6fa5", "#9a9da3", "#e0a64f", "#ffd773"];
  const themes = {
    light: {
      text: "#30363d", soft: "#5a626b", grid: "#e7eaed",
      category: ["#0164a5", "#c9681f", "#7e2403", "#3c9baa", "#936df8", "#562d5b", "#a64450", "#2024a7"],
      ordinal: { scheme: "viridis", extent: [0, 0.7] }, heatmap: viridis, diverging, alarm: "#c2210c",
    },
    dark: {
      text: "#d5dade", soft: "#a3adb7", grid: "#30363d",
      category: ["#62b1f8", "#f5ad5a", "#b45244", "#b5e5e9", "#5978fd", "#9858a1", "#a1a1a1", "#cd8731"],
      ordinal: { scheme: "viridis", extent: [0.4, 1] }, heatmap: viridis, diverging, alarm: "#ff8a7a",
    },
  };

  function config() {
    const t = dark.matches ? themes.dark : themes.light;
    const font = "system-ui, Segoe UI, Roboto, Helvetica Neue, Arial, sans-serif";
    return {
      background: null, font, padding: 4,
      autosize: { type: "fit-x", contains: "padding" },
      view: { stroke: null },
      axis: { labelColor: t.text, titleColor: t.soft, gridColor: t.grid, domainColor: t.grid, tickColor: t.grid, labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal" },
      axisX: { grid: false },
      legend: { labelColor: t.text, titleColor: t.soft, labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal", orient: "top", direction: "horizontal", columns: 0, symbolType: "stroke", symbolStrokeWidth: 2.5, symbolSize: 500 },
      range: { category: t.category, ordinal: t.ordinal, heatmap: t.heatmap, ramp: t.heatmap, diverging: t.diverging },
      line: { strokeCap: "butt" },
      style: {
        mark: { color: t.alarm, strokeWidth: 1.4 },
        bound: { color: t.alarm, strokeWidth: 1.6 },
        missing: { color: t.soft, opacity: 0.25 },
        cross: { color: "#ff5a4f", stroke: "white", strokeWidth: 0.8 },
      },
    };
  }

  // Vega draws objects; the page holds columns.
  function objects({ columns, values }) {
    return values[0].map((_, row) => Object.fromEntries(columns.map((name, i) => [name, values[i][row]])));
  }

  // Written into each channel: one that asks for a legend overrules the theme.
  function dropLegends(spec) {
    spec.layer = (spec.layer || []).map((layer) => {
      const encoding = { ...layer.encoding };
      for (const name of ["color", "strokeDash"]) if (encoding[name]) encoding[name] = { ...encoding[name], legend: null };
      return { ...layer, encoding };
    });
  }

  async function draw(element) {
    const chart = charts[element.dataset.chart];
    if (!chart) return;
    const data = objects(chart.data);
    const spec = { ...chart.spec, datasets: { ...chart.spec.datasets, data } };
    const theme = config();
    // The title says what a single line is.
    if (data.length && "series" in data[0] && data.every((row) => row.series === data[0].series)) dropLegends(spec);
    const options = { mode: "vega-lite", renderer: "svg", actions: false, config: theme, tooltip: { theme: dark.matches ? "dark" : "light" } };
    try {
      const old = views.get(element);
      const result = await vegaEmbed(element, spec, options);
      if (old) old.finalize();
      views.set(element, result.view);
      element.dataset.drawn = String(Number(element.dataset.drawn || 0) + 1);
    } catch (error) {
      element.dataset.failed = "true";
      element.textContent = "This picture could not be drawn: " + error.message;
    }
  }

  // One after the other, so that the page stays quick to the touch while it fills.
  let last = Promise.resolve();
  function drawAll(changed = () => true) {
    for (const element of document.querySelectorAll("[data-chart]")) {
      if (element.dataset.drawn && !changed(element.dataset.chart)) continue;
      // A folded section has no width to draw in; it is drawn when somebody unfolds it.
      if (element.closest("details:not([open])")) { delete element.dataset.drawn; continue; }
      last = last.then(() => draw(element)).then(() => new Promise((done) => setTimeout(done)));
    }
    last.then(() => { document.body.dataset.ready = "true"; });
    return last;
  }

  // Draws again what changed alone: most of a page stays as it is from one step to the next.
  function replace(fresh) {
    const before = charts;
    charts = fresh;
    return drawAll((name) => JSON.stringify(before[name]) !== JSON.stringify(fresh[name]));
  }

  // A live page asks its own server whether the run's files changed, and takes over the page as it is now.
  async function follow(address) {
    let known = null;
    for (;;) {
      try {
        const answer = await fetch(address);
        if (answer.ok) {
          const { version, state } = await answer.json();
          document.body.dataset.state = state;
          if (known !== null && version !== known) await takeOver();
          known = version;
        } else if (answer.status === 404) {
          return say("This run is no longer there; what you see is the last that was read.");
        }
        say("");
      } catch {
        say("The server does not answer; trying again.");
      }
      await new Promise((done) => setTimeout(done, 1500));
    }
  }

  async function takeOver() {
    const answer = await fetch(location.href);
    if (!answer.ok) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const ids = (page) => [...page.querySelectorAll("[data-chart], [data-live-block]")].map((e) => e.dataset.chart || e.id).join();
    if (ids(fresh) === ids(document)) {
      const blocks = fresh.querySelectorAll("[data-live-block]");
      document.querySelectorAll("[data-live-block]").forEach((old, i) => {
        // What somebody opened or closed stays so.
        const open = [...old.querySelectorAll("details")].map((e) => [e.className, e.open]);
        for (const [name, is] of open) for (const e of blocks[i].querySelectorAll("details")) if (e.className === name) e.open = is;
        old.replaceWith(blocks[i]);
      });
    } else {
      const folded = new Set([...document.querySelectorAll("details.section:not([open])")].map((e) => e.id));
      for (const section of fresh.querySelectorAll("details.section")) section.open = !folded.has(section.id);
      document.querySelector("main").replaceWith(fresh.querySelector("main"));
      watchSections();
    }
    await replace(JSON.parse(fresh.getElementById("charts").textContent));
    document.body.dataset.updates = String(Number(document.body.dataset.updates || 0) + 1);
  }

  function say(text) {
    const line = document.getElementById("connection");
    if (line) line.textContent = text;
  }

  // What a link leads to is unfolded first.
  function reveal() {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    let shut = false;
    for (let at = target.closest("details"); at; at = at.parentElement.closest("details")) { shut ||= !at.open; at.open = true; }
    if (shut) target.scrollIntoView();
  }

  // The navigation says where one is.
  let watched = null;
  function watchSections() {
    const links = new Map([...document.querySelectorAll(".top nav a[href^='#']")].map((a) => [a.getAttribute("href").slice(1), a]));
    const seen = new Set();
    if (watched) watched.disconnect();
    watched = new IntersectionObserver((entries) => {
      for (const entry of entries) entry.isIntersecting ? seen.add(entry.target.id) : seen.delete(entry.target.id);
      const now = [...links.keys()].find((id) => seen.has(id));
      for (const [id, link] of links) {
        if (id !== now) { link.removeAttribute("aria-current"); continue; }
        if (link.hasAttribute("aria-current")) continue;
        link.setAttribute("aria-current", "true");
        const bar = link.parentElement;
        bar.scrollTo({ left: link.offsetLeft - bar.offsetLeft - bar.clientWidth / 2 });
      }
    }, { rootMargin: "-60px 0px -70% 0px" });
    for (const id of links.keys()) { const place = document.getElementById(id); if (place) watched.observe(place); }
  }

  const fold = document.getElementById("fold");
  function sections() { return [...document.querySelectorAll("details.section")]; }
  function nameFold() { fold.textContent = sections().some((e) => e.open) ? "Fold all" : "Unfold all"; }
  if (fold && sections().length > 1) {
    fold.hidden = false;
    nameFold();
    fold.addEventListener("click", () => { const open = !sections().some((e) => e.open); for (const e of sections()) e.open = open; });
  }
  document.addEventListener("toggle", (event) => {
    if (!event.target.matches || !event.target.matches("details.section")) return;
    if (fold) nameFold();
    if (event.target.open && window.vegaEmbed) drawAll(() => false);
  }, true);
  // On paper everything is there.
  addEventListener("beforeprint", () => { for (const e of sections()) e.open = true; });
  addEventListener("hashchange", reveal);
  reveal();
  watchSections();
  dark.addEventListener("change", () => drawAll());
  if (document.body.dataset.live) follow(document.body.dataset.live);
  if (window.vegaEmbed) drawAll();
  return { replace, drawAll };
})();
