// The charts: drawn one after another while the page stays usable, explained on hover, and picked out by the keys.
const source = document.getElementById("data");
const report = source ? JSON.parse(source.textContent) : { charts: {}, cells: [] };
const views = [];
const tip = document.getElementById("tip");

function element(name, text, style) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  if (style) made.className = style;
  return made;
}

// Everything is set as text: a method called <script> shows as text.
function explain(handler, event, item, value) {
  const datum = item && item.datum;
  if (value === null || value === undefined || value === "" || !datum || datum.cell === undefined) {
    tip.hidden = true;
    return;
  }
  const cell = report.cells[datum.cell];
  tip.replaceChildren(element("b", cell.title));
  if (datum.part && datum.part !== "end") {
    const { unit } = event.target.closest("[data-figure]").dataset;
    tip.append(element("p", `${datum.part}: ${format(datum.x)} ${unit}`));
  }
  if (datum.value !== undefined) tip.append(element("p", `layer ${datum.y}, head ${datum.x}: ${format(datum.value)}`));
  if (cell.status !== "ok") tip.append(element("p", cell.reason ? `${cell.status}: ${cell.reason}` : cell.status, "status"));
  const list = element("dl");
  for (const [name, text] of cell.numbers) list.append(element("dt", name), element("dd", text));
  tip.append(list, element("code", cell.command));
  if (cell.remark) tip.append(element("p", cell.remark));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 16 + box.width > innerWidth ? event.clientX - 16 - box.width : event.clientX + 16;
  tip.style.left = `${Math.max(8, Math.min(left, innerWidth - box.width - 8))}px`;
  tip.style.top = `${Math.max(8, Math.min(event.clientY + 16, innerHeight - box.height - 8))}px`;
}

const format = (number) => Number(number.toPrecision(4)).toString();

async function loadLibrary() {
  const packed = Uint8Array.from(atob(document.getElementById("library").textContent), (sign) => sign.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const script = element("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

const pause = () => new Promise((go) => setTimeout(go));

async function drawAll() {
  await loadLibrary();
  for (const place of document.querySelectorAll(".chart")) {
    const specs = report.charts[place.closest("[data-figure]").dataset.figure];
    const options = { mode: "vega-lite", renderer: "svg", actions: false, ast: true, tooltip: explain };
    const { view } = await vegaEmbed(place, specs[Number(place.dataset.chart)], options);
    views.push(view);
    await pause();
  }
  document.body.dataset.drawn = views.length;
}

function fail(error) {
  for (const place of document.querySelectorAll(".chart")) {
    if (!place.firstChild) place.append(element("p", "This chart needs a browser of 2023 or later; the PNG beside this page shows it."));
  }
  console.error(error);
}

function pick(name) {
  for (const button of document.querySelectorAll("button[data-pick]")) {
    button.setAttribute("aria-pressed", String(button.dataset.pick === name));
  }
  for (const view of views) view.signal("picked", name).runAsync();
}

for (const button of document.querySelectorAll("button[data-pick]")) {
  button.addEventListener("click", () => pick(button.getAttribute("aria-pressed") === "true" ? "" : button.dataset.pick));
}
addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    tip.hidden = true;
    pick("");
  }
});
addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

// A figure's data as a table, made when it is asked for.
const NAMES = { shown: "method", part: "part", x: "x", y: "y", low: "low", high: "high", value: "value", status: "status", note: "note" };
for (const details of document.querySelectorAll("details.data")) {
  details.addEventListener("toggle", () => {
    if (details.childElementCount > 1) return;
    const rows = report.charts[details.dataset.of].flatMap((spec) => spec.datasets.rows);
    const keys = Object.keys(NAMES).filter((key) => rows.some((row) => row[key] !== undefined));
    const table = element("table", "", "small"), head = element("thead"), body = element("tbody");
    const line = (texts, name) => {
      const made = element("tr");
      made.append(...texts.map((text) => element(name, text)));
      return made;
    };
    head.append(line(keys.map((key) => NAMES[key]), "th"));
    body.append(...rows.map((row) => line(keys.map((key) => (row[key] === undefined ? "–" : String(row[key]))), "td")));
    table.append(head, body);
    const wide = element("div", "", "wide");
    wide.tabIndex = 0;
    wide.setAttribute("role", "region");
    wide.setAttribute("aria-label", "Data of this figure");
    wide.append(table);
    details.append(wide);
  });
}

if (source) drawAll().catch(fail);
