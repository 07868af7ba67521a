// Make tables sortable and filterable. Pages also work without JavaScript.
"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const rows = [...body.rows];
  const value = (row, column) => {
    const text = row.cells[column].textContent.trim();
    const number = Number.parseFloat(text.replaceAll(",", ""));
    return column === 0 || Number.isNaN(number) ? text : number;
  };
  const compare = (a, b) => {
    if (typeof a === "number" && typeof b === "number") return a - b;
    return String(a).localeCompare(String(b), undefined, { numeric: true });
  };
  const sort = (column, down) => {
    const ordered = rows
      .map((row, at) => ({ row, at, value: value(row, column) }))
      .sort((a, b) => {
        const empty = (a.value === "") - (b.value === "");
        return empty || (down ? -1 : 1) * compare(a.value, b.value) || a.at - b.at;
      });
    body.append(...ordered.map((each) => each.row));
    heads.forEach((head, at) => {
      if (at === column) head.setAttribute("aria-sort", down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
  };
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => sort(column, head.getAttribute("aria-sort") === "ascending"));
  });

  const label = document.createElement("label");
  const field = document.createElement("input");
  const count = document.createElement("span");
  field.type = "search";
  label.append("Filter by name: ", field);
  count.setAttribute("role", "status");
  const filter = document.createElement("p");
  filter.className = "filter";
  filter.append(label, count);
  table.parentElement.before(filter);
  const update = () => {
    const words = field.value.trim().toLowerCase();
    for (const row of rows) row.hidden = !row.cells[0].textContent.toLowerCase().includes(words);
    count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  };
  field.addEventListener("input", update);
  update();
}
