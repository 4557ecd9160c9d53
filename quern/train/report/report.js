(function () {
  "use strict";
  const data = JSON.parse(document.getElementById("curves").textContent), HEIGHT = 250, plots = [];
  const form = document.getElementById("axes"), places = document.querySelectorAll(".chart");
  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });

  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const short = value => value && Math.abs(value) < 1e-3
    ? (+value.toPrecision(3)).toExponential() : compact.format(value);
  const shown = (chart, value) => value == null ? "–"
    : chart.percent ? +(100 * value).toFixed(1) + " %" : short(value);

  // Lines have places of their own on the axis: uPlot wants one column of them, with gaps. All charts span the run.
  function columns(chart, axis) {
    const lines = chart.series.map(line => {
      const known = [...line.y.keys()].filter(i => line.x[axis][i] !== null);
      return [known.map(i => line.x[axis][i]), known.map(i => line.y[i])];
    });
    const joined = uPlot.join([[data.ranges[axis], [null, null]], ...lines]);
    joined.splice(1, 1);
    return joined;
  }

  function series(chart, line) {
    const tone = () => colour("--c" + line.colour % 8) + ({ faint: "59", branch: "80" }[line.look] || "");
    return {
      label: line.label, stroke: tone, width: { faint: 1, branch: 1.2 }[line.look] || 1.8, spanGaps: true,
      dash: line.look === "branch" ? [4, 3] : undefined, value: (plot, value) => shown(chart, value),
      points: { show: line.look === "dots", size: 6, fill: tone },
    };
  }

  function mark(plot, axis) {
    const box = plot.bbox, draw = plot.ctx, ratio = devicePixelRatio, low = box.top + box.height - 7 * ratio;
    const lines = { restart: [2 * ratio, 3 * ratio], rollback: [] };
    draw.save();
    draw.textAlign = "center"; draw.textBaseline = "middle"; draw.font = "600 " + 12 * ratio + "px sans-serif";
    data.marks.forEach(own => own.y.forEach((y, i) => {
      const place = own.x[axis][i], [sign, tone] = data.signs[own.label];
      if (place === null || place < plot.scales.x.min || place > plot.scales.x.max) return;
      const x = plot.valToPos(place, "x", true);
      draw.fillStyle = draw.strokeStyle = colour(tone);
      if (lines[own.label]) {
        draw.lineWidth = ratio; draw.setLineDash(lines[own.label]);
        draw.beginPath(); draw.moveTo(x, box.top); draw.lineTo(x, box.top + box.height); draw.stroke();
      } else if (["good", "saved", "failed"].includes(own.label)) {
        draw.fillText(sign, x, low);
      } else {
        const high = y === null ? 0 : Math.min(plot.valToPos(y, "y", true) - 9 * ratio, low);
        draw.fillText(sign, x, Math.max(box.top + 8 * ratio, high));
      }
    }));
    draw.restore();
  }

  function make(chart, place) {
    const axis = form.elements.axis.value, positive = line => line.y.every(y => y === null || y > 0);
    const log = chart.log && chart.series.every(positive);
    const rule = { stroke: () => colour("--line"), width: 1 };
    const axes = { stroke: () => colour("--soft"), grid: rule, ticks: rule };
    const spread = (plot, least, most) => {
      const margin = Math.pow(Math.max(most / least, 1.02), 0.06);
      return least > 0 ? [least / margin, most * margin] : [1, 10];
    };
    const even = (plot, axis, least, most) =>
      [0, 1, 2, 3, 4, 5, 6].map(i => +(least * Math.pow(most / least, i / 6)).toPrecision(3));
    return new uPlot({
      width: place.clientWidth, height: HEIGHT, padding: [10, 16, 0, 0],
      scales: { x: { time: false }, y: log ? { distr: 3, range: spread } : {} },
      cursor: { sync: { key: "run", setSeries: false }, hover: { skip: [null] }, points: { size: 6 } },
      series: [{ label: data.units[axis], value: (plot, x) => x === null ? "–" : x.toLocaleString("en") },
        ...chart.series.map(line => series(chart, line))],
      axes: [
        { ...axes, size: 30, space: 70, values: (plot, all) => all.map(short) },
        { ...axes, size: 68, space: 34, splits: log ? even : undefined, filter: (plot, all) => all,
          values: (plot, all) => all.map(y => shown(chart, y)) },
      ],
      hooks: { draw: chart.marked ? [plot => mark(plot, axis)] : [] },
    }, columns(chart, axis), place);
  }

  function draw() {
    plots.splice(0).forEach(plot => plot.destroy());
    data.charts.forEach((chart, i) => plots.push(make(chart, places[i])));
  }

  form.elements.axis.forEach(choice => choice.disabled = !data.ranges[choice.value]);
  form.hidden = false;
  form.addEventListener("change", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("resize", () => plots.forEach((plot, i) =>
    plot.setSize({ width: places[i].clientWidth, height: HEIGHT })));
  draw();
})();
