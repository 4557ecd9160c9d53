document.querySelectorAll(".heat").forEach(figure => {
  "use strict";
  const data = JSON.parse(figure.querySelector("script").textContent), choice = figure.querySelector("select");
  const LEFT = 46, HIGH = 6, LOW = 34, HEIGHT = 360, root = document.documentElement;
  const colour = name => getComputedStyle(root).getPropertyValue(name).trim();
  const parts = name => colour(name).match(/[0-9a-f]{2}/gi).map(own => parseInt(own, 16));
  const value = letter => Math.pow(2, (data.levels.indexOf(letter) - 18) / 6);
  const said = letter => letter === "0" ? "no token" : letter === "-" ? "not known"
    : value(letter).toPrecision(2) + " × the mean";
  const span = ([first, last]) => first === last ? "step " + first : "steps " + first + " to " + last;

  // Colours by letter, mixed from those of the page: they follow its light or dark look.
  function palette() {
    const [less, even, more] = ["--less", "--even", "--more"].map(parts), found = { "0": colour("--none") };
    [...data.levels].forEach((letter, i) => {
      const far = Math.abs(i - 18) / 18, end = i < 18 ? less : more;
      found[letter] = `rgb(${even.map((tone, c) => Math.round(tone + far * (end[c] - tone)))})`;
    });
    return found;
  }

  // Rows of letters, with what stands along both axes and what a cell is.
  function chosen(map) {
    const last = map === "last", layer = choice.value;
    const rows = last ? data.last : layer === "greatest" ? data.greatest : data.experts[layer];
    const columns = layer === "greatest" ? data.steps : data.counted, of = last || layer === "greatest";
    return {
      rows, across: last ? "expert" : "step", down: of ? "layer" : "expert",
      x: i => last ? i : columns[i][0], y: i => of ? data.layers[i] : i,
      cell: (i, j) => (of ? "layer " + data.layers[i] : "expert " + i) + ", "
        + (last ? "expert " + j : span(columns[j])) + ": " + said(rows[i][j]),
    };
  }

  function ticks(count, most, put) {
    const step = [1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64].find(own => count / own <= most) || Math.ceil(count / most);
    for (let i = 0; i < count; i += step) put(i);
  }

  function draw(canvas) {
    const { rows, across, down, x, y, cell } = chosen(canvas.dataset.map), columns = rows[0].length;
    const wide = canvas.parentNode.clientWidth, ratio = devicePixelRatio, pen = canvas.getContext("2d");
    const tall = Math.min(18, HEIGHT / rows.length) * rows.length, width = (wide - LEFT) / columns;
    const step = tall / rows.length, tones = palette(), note = canvas.nextElementSibling;
    canvas.width = wide * ratio; canvas.height = (tall + HIGH + LOW) * ratio;
    canvas.style.width = wide + "px"; canvas.style.height = tall + HIGH + LOW + "px";
    const edge = at => Math.round(at * ratio), at = i => HIGH + i * step;
    rows.forEach((row, i) => [...row].forEach((letter, j) => {
      pen.fillStyle = tones[letter] || "transparent";
      const left = edge(LEFT + j * width), top = edge(at(i)), gap = Math.min(width, step) > 6 ? ratio : 0;
      pen.fillRect(left, top, edge(LEFT + (j + 1) * width) - left - gap, edge(at(i + 1)) - top - gap);
    }));
    pen.scale(ratio, ratio);
    pen.fillStyle = colour("--soft"); pen.font = "12px sans-serif"; pen.textBaseline = "middle"; pen.textAlign = "right";
    ticks(rows.length, tall / 16, i => pen.fillText(y(i), LEFT - 6, at(i + 0.5)));
    pen.textAlign = "center";
    ticks(columns, (wide - LEFT) / 60, j => pen.fillText(x(j).toLocaleString("en"), Math.min(LEFT + (j + 0.5) * width, wide - 16), at(rows.length) + 10));
    pen.fillText(across, LEFT + (wide - LEFT) / 2, at(rows.length) + 26);
    pen.translate(8, at(rows.length / 2)); pen.rotate(-Math.PI / 2); pen.fillText(down, 0, 0);
    canvas.onmousemove = seen => {
      const i = Math.floor((seen.offsetY - HIGH) / step), j = Math.floor((seen.offsetX - LEFT) / width);
      note.textContent = i >= 0 && i < rows.length && j >= 0 && j < columns ? cell(i, j) : "\u00a0";
    };
  }

  const all = () => figure.querySelectorAll("canvas").forEach(draw);
  choice.addEventListener("change", all);
  addEventListener("resize", all);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
  all();
});
