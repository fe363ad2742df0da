// The table: sorts by the column whose head is pressed (missing values stay last), filters, and downloads what is shown.
"use strict";
const tables = [...document.querySelectorAll("table.results")];
const rowsOf = (table) => [...table.tBodies].flatMap((body) => [...body.rows]);

for (const table of tables) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const falling = head.getAttribute("aria-sort") ? head.getAttribute("aria-sort") === "ascending" : column > 0;
    const value = (row) => row.cells[column].dataset.v;
    const compare = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === "" || y === "") return (x === "") - (y === "");
      const order = column === 0 ? x.localeCompare(y) : Number(x) - Number(y);
      return falling ? -order : order;
    };
    const rows = rowsOf(table).sort(compare);
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", falling ? "descending" : "ascending");
    const body = document.createElement("tbody");
    body.append(...rows);
    table.querySelectorAll("tbody").forEach((old) => old.remove());
    table.append(body);
  }));
}

const words = document.getElementById("filter");
const choices = [...document.querySelectorAll("select[data-filter]")];

for (const choice of choices) {
  const column = Number(choice.dataset.filter);
  const known = new Map(tables.flatMap(rowsOf).map((row) => [row.cells[column].textContent, row.cells[column].dataset.v]));
  const order = ([a, x], [b, y]) => (column === 0 ? a.localeCompare(b) : Number(x) - Number(y));
  choice.append(...[...known].sort(order).map(([text]) => new Option(text, text)));
}

function filter() {
  const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0, all = 0;
  for (const table of tables) {
    for (const row of rowsOf(table)) {
      const texts = [...row.cells].map((cell) => cell.textContent);
      const found = wanted.every((word) => texts.some((text) => text.toLowerCase().includes(word)));
      row.hidden = !(found && choices.every((choice) => !choice.value || texts[Number(choice.dataset.filter)] === choice.value));
      shown += !row.hidden;
      all += 1;
    }
  }
  document.getElementById("shown").textContent = shown === all ? `${all} rows` : `${shown} of ${all} rows`;
}

function csv() {
  const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const keys = [...new Set([...document.querySelectorAll("table.results th[data-key]")].map((head) => head.dataset.key))];
  const lines = [[...keys, "setting"]];
  for (const table of tables) {
    const heads = [...table.tHead.rows[0].cells].map((head) => head.dataset.key);
    for (const row of rowsOf(table).filter((each) => !each.hidden)) {
      const known = new Map(heads.map((key, column) => [key, row.cells[column].dataset.v]));
      lines.push([...keys.map((key) => known.get(key) ?? ""), table.dataset.setting]);
    }
  }
  return lines.map((line) => line.map(quoted).join(",") + "\r\n").join("");
}

if (words) {
  words.form.addEventListener("submit", (event) => event.preventDefault());
  [words, ...choices].forEach((field) => field.addEventListener("input", filter));
  document.getElementById("download").addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([csv()], { type: "text/csv" }));
    link.download = "results-shown.csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
  filter();
}

// The theme: as the system has it until the button is pressed.
const root = document.documentElement, theme = document.getElementById("theme");
const systemDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : systemDark.matches);
const nameTheme = () => { theme.textContent = isDark() ? "Light theme" : "Dark theme"; };
const remembered = (value) => {
  // Some browsers refuse storage to a page that comes from a file.
  try {
    if (value) localStorage.setItem("pyramidbench-theme", value);
    return localStorage.getItem("pyramidbench-theme");
  } catch { return null; }
};
if (["light", "dark"].includes(remembered())) root.dataset.theme = remembered();
theme.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  remembered(root.dataset.theme);
  nameTheme();
});
systemDark.addEventListener("change", nameTheme);
nameTheme();
