// Figures and tables as elements. Text from elsewhere becomes textContent, never markup.

const KEPT = 900; // points of a chart: 15 minutes

export function make(tag, text, name) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (name) element.className = name;
  return element;
}

const SIZES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

function bytesText(value) {
  let step = 0;
  for (; value >= 1024 && step < SIZES.length - 1; step++) value /= 1024;
  return `${Number(value.toFixed(1))} ${SIZES[step]}`;
}

function secondsText(value) {
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${Number((value * 1e6).toPrecision(3))} µs`;
  if (value < 1) return `${Number((value * 1e3).toPrecision(3))} ms`;
  return `${Number(value.toPrecision(4))} s`;
}

export function textOf(value, unit) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return value;
  switch (unit) {
    case "bytes": return bytesText(value);
    case "s": return secondsText(value);
    case "share": return `${(100 * value).toFixed(1)} %`;
    case "per_s": return `${value < 10 ? Number(value.toFixed(2)) : Math.round(value).toLocaleString("en")}/s`;
    case "time": return new Date(1000 * value).toLocaleTimeString();
    default: return value.toLocaleString("en");
  }
}

function compare(one, other) {
  if (one === other) return 0;
  if (one === null || one === undefined) return 1; // unknown comes last, whichever way
  if (other === null || other === undefined) return -1;
  if (typeof one === "number" && typeof other === "number") return one - other;
  return String(one) < String(other) ? -1 : 1;
}

// A table that keeps its elements between two pictures, so that selections and the focus stay.
export class Table {
  constructor(title, columns, link) {
    this.columns = columns;
    this.link = link; // makes the element of a row's first cell
    this.sorted = { column: -1, down: false };
    this.rows = [];
    this.element = make("div", undefined, "scroll");
    this.element.tabIndex = 0;
    this.element.setAttribute("role", "region");
    this.element.setAttribute("aria-label", `${title}, table`);
    const table = make("table"), head = table.createTHead().insertRow();
    this.heads = columns.map((column, at) => {
      const cell = make("th"), button = make("button", column.title);
      cell.scope = "col";
      button.type = "button";
      button.addEventListener("click", () => this.sortBy(at));
      cell.append(button);
      head.append(cell);
      return cell;
    });
    this.body = table.createTBody();
    this.element.append(table);
  }

  sortBy(column) {
    this.sorted = { column, down: this.sorted.column === column && !this.sorted.down };
    this.heads.forEach((head, at) => {
      if (at === column) head.setAttribute("aria-sort", this.sorted.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    this.show(this.rows);
  }

  show(rows) {
    this.rows = rows;
    const { column, down } = this.sorted;
    if (column >= 0) {
      const unknown = (row) => row[column] === null || row[column] === undefined;
      rows = [...rows].sort((one, other) =>
        (down && !unknown(one) && !unknown(other) ? -1 : 1) * compare(one[column], other[column]));
    }
    while (this.body.rows.length > rows.length) this.body.deleteRow(-1);
    rows.forEach((row, at) => this.fill(this.body.rows[at] ?? this.body.insertRow(), row));
  }

  fill(line, row) {
    this.columns.forEach((column, at) => {
      const cell = line.cells[at] ?? line.insertCell(), value = row[at], text = textOf(value, column.unit);
      if (cell.shown === text) return;
      cell.shown = text;
      const isNumber = typeof value === "number" && column.unit !== "time";
      if (isNumber) this.heads[at].className = "number";
      cell.className = isNumber || value === null ? this.heads[at].className : "";
      if (at === 0 && this.link && value) cell.replaceChildren(this.link(value));
      else cell.textContent = text;
      if (column.unit === "share" && typeof value === "number") cell.append(meter(value));
    });
  }
}

function meter(value) {
  const element = make("meter");
  element.min = 0;
  element.max = 1;
  element.value = value;
  element.setAttribute("aria-hidden", "true");
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export class Figure {
  constructor(figure) {
    this.element = make("div");
    this.value = make("span");
    this.points = [];
    this.shown = make("dd");
    this.shown.append(this.value);
    this.element.append(make("dt", figure.title), this.shown);
  }

  addChart() {
    this.line = document.createElementNS(SVG, "polyline");
    const chart = document.createElementNS(SVG, "svg");
    chart.setAttribute("viewBox", "0 0 100 20");
    chart.setAttribute("preserveAspectRatio", "none");
    chart.setAttribute("aria-hidden", "true");
    chart.append(this.line);
    this.shown.append(chart);
  }

  show(figure, seconds) {
    this.value.textContent = textOf(figure.value, figure.unit);
    if (!figure.charted || typeof figure.value !== "number") return;
    if (!this.line) this.addChart();
    this.points.push([seconds, figure.value]);
    if (this.points.length > KEPT) this.points.shift();
    const first = this.points[0][0], span = Math.max(seconds - first, 60);
    const most = Math.max(...this.points.map((point) => point[1]), figure.unit === "share" ? 1 : 1e-9);
    const placed = this.points.map(([at, value]) =>
      `${(100 - 100 * (seconds - at) / span).toFixed(2)},${(19 - 18 * value / most).toFixed(2)}`);
    this.line.setAttribute("points", placed.join(" "));
  }
}

// One panel: its title, figures, table and note.
export class Panel {
  constructor(panel) {
    this.figures = new Map();
    this.element = make("section");
    const title = make("h2", panel.title);
    title.id = `panel-${panel.title.replaceAll(/\W+/g, "-")}`;
    this.element.setAttribute("aria-labelledby", title.id);
    this.list = make("dl");
    this.note = make("p", undefined, "note");
    this.element.append(title, this.list);
    if (panel.columns) {
      this.table = new Table(panel.title, panel.columns);
      this.element.append(this.table.element);
    }
    this.element.append(this.note);
  }

  show(panel, seconds) {
    for (const figure of panel.figures ?? []) {
      if (!this.figures.has(figure.title)) {
        const made = new Figure(figure);
        this.figures.set(figure.title, made);
        this.list.append(made.element);
      }
      this.figures.get(figure.title).show(figure, seconds);
    }
    this.table?.show(panel.rows ?? []);
    const empty = panel.columns && !(panel.rows ?? []).length ? "None. " : "";
    this.note.textContent = empty + (panel.note ?? "");
  }
}
