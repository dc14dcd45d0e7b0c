"use strict";
// Fills the rows of the list one after the other; live runs again every two seconds. Text only, never markup.
(async () => {
  const words = { critical: "✕ critical", warn: "! warning", ok: "✓ ok", young: "… young", empty: "– no rows" };
  const pause = (ms) => new Promise((done) => setTimeout(done, ms));
  const show = (value) => (typeof value === "number" ? Number(value.toPrecision(5)).toLocaleString("en") : value ?? "–");
  async function fill(row) {
    if (row.dataset.state === "unreadable") return;
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
  const listed = document.body.dataset.newest;
  // Where a run has begun since, the list is read again, unless somebody is choosing.
  async function again() {
    const answer = await fetch("/api/runs?limit=1");
    if (!answer.ok) return;
    const { runs, total } = await answer.json();
    const newest = `${runs.length ? runs[0].key : ""} ${total}`;
    if (newest === listed || !document.body.dataset.first) return;
    if (document.querySelector("input[name=run]:checked")) document.getElementById("connection").textContent = "The runs changed since this list was made.";
    else location.reload();
  }
  let first = true;
  for (;;) {
    for (const row of document.querySelectorAll("tr[data-run]")) {
      if (!first && row.dataset.state !== "running") continue;
      try { await fill(row); document.getElementById("connection").textContent = ""; }
      catch { document.getElementById("connection").textContent = "The server does not answer; trying again."; break; }
    }
    try { if (!first) await again(); } catch { /* said above the next time */ }
    first = false;
    document.body.dataset.ready = "true";
    await pause(2000);
  }
})();
