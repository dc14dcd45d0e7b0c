"use strict";
// Fills the rows of the list one after the other; live runs again every two seconds. Text only, never markup.
(async () => {
  const words = { critical: "✕ critical", warn: "! warning", ok: "✓ ok", young: "… young", empty: "– no rows" };
  const pause = (ms) => new Promise((done) => setTimeout(done, ms));
  const show = (value) => (typeof value === "number" ? Number(value.toPrecision(5)).toLocaleString("en") : value ?? "–");
  async function fill(row) {
    const answer = await fetch(`/api/runs/${row.dataset.run}`);
    if (!answer.ok) {
      if (answer.status === 404) { row.dataset.state = "gone"; row.querySelector('[data-cell="state"]').textContent = "gone"; }
      return;
    }
    const run = await answer.json();
    row.dataset.state = run.state;
    for (const cell of row.querySelectorAll("[data-cell]")) {
      const name = cell.dataset.cell;
      cell.textContent = name === "state" ? run.state : name === "health" ? words[run.headline.health] ?? "" : show(run.headline[name]);
    }
  }
  let first = true;
  for (;;) {
    for (const row of document.querySelectorAll("tr[data-run]")) {
      if (!first && row.dataset.state !== "live") continue;
      try { await fill(row); document.getElementById("connection").textContent = ""; }
      catch { document.getElementById("connection").textContent = "The server does not answer; trying again."; break; }
    }
    first = false;
    document.body.dataset.ready = "true";
    await pause(2000);
  }
})();
