document.querySelectorAll(".heat").forEach(figure => {
  "use strict";
  const { levels, maps } = JSON.parse(figure.querySelector("script").textContent);
  const LEFT = 46, HIGH = 6, LOW = 34, HEIGHT = 360;
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const parts = name => colour(name).match(/[0-9a-f]{2}/gi).map(own => parseInt(own, 16));
  const said = letter => letter === "0" ? "no token" : letter === "-" ? "not known"
    : Math.pow(2, (levels.indexOf(letter) - 18) / 6).toPrecision(2) + " × the mean";

  // Colours by letter, mixed from those of the page: they follow its light or dark look.
  function palette() {
    const [less, even, more] = ["--less", "--even", "--more"].map(parts), found = { "0": colour("--none") };
    [...levels].forEach((letter, i) => {
      const far = Math.abs(i - 18) / 18, end = i < 18 ? less : more;
      found[letter] = `rgb(${even.map((tone, c) => Math.round(tone + far * (end[c] - tone)))})`;
    });
    return found;
  }

  function ticks(count, most, put) {
    const step = [1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64].find(own => count / own <= most) || Math.ceil(count / most);
    for (let i = 0; i < count; i += step) put(i);
  }

  function draw(canvas, choice) {
    const { rows, across, down, x, y } = maps[choice.selectedIndex], tones = palette();
    const wide = canvas.parentNode.clientWidth, ratio = devicePixelRatio, pen = canvas.getContext("2d");
    const step = Math.min(18, HEIGHT / y.length), tall = step * y.length, width = (wide - LEFT) / x.length;
    canvas.width = wide * ratio; canvas.height = (tall + HIGH + LOW) * ratio;
    canvas.style.width = wide + "px"; canvas.style.height = tall + HIGH + LOW + "px";
    const edge = at => Math.round(at * ratio), at = i => HIGH + i * step, note = canvas.nextElementSibling;
    rows.forEach((row, i) => [...row].forEach((letter, j) => {
      pen.fillStyle = tones[letter] || "transparent";
      const left = edge(LEFT + j * width), top = edge(at(i)), gap = Math.min(width, step) > 6 ? ratio : 0;
      pen.fillRect(left, top, edge(LEFT + (j + 1) * width) - left - gap, edge(at(i + 1)) - top - gap);
    }));
    pen.scale(ratio, ratio);
    pen.fillStyle = colour("--soft"); pen.font = "12px sans-serif"; pen.textBaseline = "middle"; pen.textAlign = "right";
    ticks(y.length, tall / 16, i => pen.fillText(y[i], LEFT - 6, at(i + 0.5)));
    pen.textAlign = "center";
    ticks(x.length, (wide - LEFT) / 60, j => pen.fillText(x[j].toLocaleString("en"), Math.min(LEFT + (j + 0.5) * width, wide - 16), at(y.length) + 10));
    pen.fillText(across, LEFT + (wide - LEFT) / 2, at(y.length) + 26);
    pen.translate(8, at(y.length / 2)); pen.rotate(-Math.PI / 2); pen.fillText(down, 0, 0);
    canvas.onmousemove = seen => {
      const i = Math.floor((seen.offsetY - HIGH) / step), j = Math.floor((seen.offsetX - LEFT) / width);
      note.textContent = (rows[i] || "")[j] ? `${down} ${y[i]}, ${across} ${x[j]}: ${said(rows[i][j])}` : "\u00a0";
    };
  }

  const choices = figure.querySelectorAll("select");
  const all = () => figure.querySelectorAll("canvas").forEach((canvas, n) => draw(canvas, choices[n]));
  choices.forEach(own => own.addEventListener("change", all));
  addEventListener("resize", all);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
  all();
});
