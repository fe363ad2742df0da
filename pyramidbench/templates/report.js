// Sorts a table by the column whose header is pressed: numbers first, largest first; missing values stay last.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const falling = head.getAttribute("aria-sort") ? head.getAttribute("aria-sort") === "ascending" : column > 0;
    const rows = [...table.tBodies].flatMap((body) => [...body.rows]);
    const value = (row) => row.cells[column].dataset.v;
    const compare = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === "" || y === "") return (x === "") - (y === "");
      const order = column === 0 ? x.localeCompare(y) : Number(x) - Number(y);
      return falling ? -order : order;
    };
    rows.sort(compare);
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", falling ? "descending" : "ascending");
    const body = document.createElement("tbody");
    body.append(...rows);
    table.querySelectorAll("tbody").forEach((old) => old.remove());
    table.append(body);
  }));
}
