(function () {
  "use strict";
  var data = JSON.parse(document.getElementById("curves").textContent);
  var root = document.documentElement, plots = [], axis = "step", moving = false;
  var units = { step: "steps", tokens: "tokens", hours: "hours since the start" };
  var glyphs = { spike: "○", skipped: "×", non_finite: "!", good: "▲", saved: "△", failed: "▽" };
  var tones = { spike: "--duplicate", skipped: "--dropped", non_finite: "--dropped", good: "--kept", saved: "--soft",
    failed: "--dropped", restart: "--soft", rollback: "--dropped" };

  function colour(name) { return getComputedStyle(root).getPropertyValue(name).trim(); }
  function told(values) { return values.some(function (value) { return value !== null; }); }
  function short(value) {
    var size = Math.abs(value), units = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]];
    for (var i = 0; i < units.length; i++)
      if (size >= units[i][0] * 0.9995) return +(value / units[i][0]).toPrecision(4) + units[i][1];
    return String(+value.toPrecision(4));
  }
  function format(chart, value) {
    if (value === null || value === undefined) return "–";
    return chart.percent ? (100 * value).toFixed(1) + " %" : short(value);
  }

  // Lines have places of their own on the axis: uPlot wants one column of them, with gaps.
  function table(chart) {
    return uPlot.join(chart.series.map(function (line) {
      var x = line.x[axis], keep = [];
      for (var i = 0; i < x.length; i++) if (x[i] !== null) keep.push(i);
      return [keep.map(function (i) { return x[i]; }), keep.map(function (i) { return line.y[i]; })];
    }));
  }

  function series(chart, line) {
    var faint = line.look === "faint", branch = line.look === "branch", dots = line.look === "dots";
    function tone() {
      var base = colour("--c" + line.colour % 8);
      return faint || branch ? base + (branch ? "80" : "59") : base;
    }
    return {
      label: line.label, stroke: tone, width: faint ? 1 : branch ? 1.2 : 1.8, spanGaps: true,
      dash: branch ? [4, 3] : undefined, points: { show: dots, size: 6, fill: tone },
      value: function (plot, value) { return format(chart, value); },
    };
  }

  // Of each line the value nearest to the cursor: a line has none at the places of another.
  function nearest(plot, index, at) {
    var values = plot.data[index];
    if (values[at] !== null && values[at] !== undefined) return at;
    var low = at, high = at;
    while (low >= 0 || high < values.length) {
      low--; high++;
      var below = low >= 0 && values[low] !== null && values[low] !== undefined;
      var above = high < values.length && values[high] !== null && values[high] !== undefined;
      if (below || above) {
        var x = plot.data[0];
        return below && (!above || x[at] - x[low] <= x[high] - x[at]) ? low : high;
      }
    }
    return at;
  }

  function mark(chart, plot) {
    if (!chart.marked) return;
    var box = plot.bbox, draw = plot.ctx, ratio = devicePixelRatio || 1;
    draw.save();
    draw.beginPath(); draw.rect(box.left, box.top, box.width, box.height); draw.clip();
    draw.textAlign = "center"; draw.textBaseline = "middle"; draw.font = 600 + " " + 12 * ratio + "px sans-serif";
    data.marks.forEach(function (own) {
      var place = own.x[axis][0];
      if (place === null || place < plot.scales.x.min || place > plot.scales.x.max) return;
      var x = plot.valToPos(place, "x", true), line = own.kind === "restart" || own.kind === "rollback";
      draw.fillStyle = draw.strokeStyle = colour(tones[own.kind]);
      if (line) {
        draw.lineWidth = ratio; draw.setLineDash(own.kind === "restart" ? [2 * ratio, 3 * ratio] : []);
        draw.beginPath(); draw.moveTo(x, box.top); draw.lineTo(x, box.top + box.height); draw.stroke();
        return;
      }
      var low = own.kind === "good" || own.kind === "saved" || own.kind === "failed";
      var y = low ? box.top + box.height - 7 * ratio : box.top + 8 * ratio;
      if (!low && own.y !== undefined) y = Math.max(y, Math.min(plot.valToPos(own.y, "y", true), box.top + box.height));
      draw.fillText(glyphs[own.kind], x, y);
    });
    draw.restore();
  }

  function make(chart) {
    var place = document.getElementById(chart.key), log = chart.log && positive(chart);
    function ink() { return colour("--soft"); }
    function rule() { return { stroke: function () { return colour("--line"); }, width: 1 }; }
    var plot = new uPlot({
      width: place.clientWidth || 320, height: 250, padding: [10, 8, 0, 0],
      scales: { x: { time: false }, y: log ? { distr: 3 } : {} },
      cursor: { sync: { key: "run", setSeries: false }, dataIdx: nearest, drag: { x: true, y: false },
        points: { size: 6 } },
      legend: { live: true },
      series: [{ label: units[axis], value: function (plot, value) { return value === null ? "–" : value.toLocaleString("en", { maximumFractionDigits: 3 }); } }]
        .concat(chart.series.map(function (line) { return series(chart, line); })),
      axes: [
        { stroke: ink, grid: rule(), ticks: rule(), size: 30, space: 70, values: function (plot, all) { return all.map(short); } },
        { stroke: ink, grid: rule(), ticks: rule(), size: 52, space: log ? 24 : 34,
          filter: log ? decades : undefined,
          values: function (plot, all) { return all.map(function (v) { return v === null ? "" : format(chart, v); }); } },
      ],
      hooks: {
        draw: [function (plot) { mark(chart, plot); }],
        setScale: [function (plot, key) { if (key === "x") follow(plot); }],
      },
    }, table(chart), place);
    return { plot: plot, chart: chart, place: place };
  }

  // Of a logarithmic axis all ticks where it is short, decades with 2 and 5 where it is longer.
  function decades(plot, ticks) {
    var span = Math.log10(plot.scales.y.max / plot.scales.y.min);
    return ticks.map(function (tick) {
      var digit = Math.round(tick / Math.pow(10, Math.floor(Math.log10(tick) + 1e-9)));
      return span < 1 || digit === 1 || (span < 2.2 && (digit === 2 || digit === 5)) ? tick : null;
    });
  }

  function positive(chart) {
    return chart.series.every(function (line) { return line.y.every(function (v) { return v === null || v > 0; }); });
  }

  function follow(from) {
    if (moving) return;
    moving = true;
    plots.forEach(function (own) {
      if (own.plot !== from) own.plot.setScale("x", { min: from.scales.x.min, max: from.scales.x.max });
    });
    moving = false;
  }

  function whole() {
    var least = Infinity, most = -Infinity;
    plots.forEach(function (own) {
      var x = own.plot.data[0];
      if (x.length) { least = Math.min(least, x[0]); most = Math.max(most, x[x.length - 1]); }
    });
    moving = true;
    plots.forEach(function (own) { own.plot.setScale("x", { min: least, max: most }); });
    moving = false;
  }

  function build() {
    plots.forEach(function (own) { own.plot.destroy(); });
    moving = true;
    plots = data.charts.map(make);
    plots.forEach(function (own) {
      own.place.addEventListener("dblclick", function () { setTimeout(whole); });
      if (!own.chart.scaled && positive(own.chart)) {
        var button = document.createElement("button");
        button.type = "button"; button.className = "scale"; own.chart.scaled = true;
        var say = function () { button.textContent = own.chart.log ? "log" : "linear"; };
        button.title = "the scale of the y axis";
        button.addEventListener("click", function () { own.chart.log = !own.chart.log; say(); build(); });
        say();
        own.place.parentNode.insertBefore(button, own.place);
      }
    });
    moving = false;
    whole();
  }

  var form = document.getElementById("axes"), set = form.querySelector("fieldset");
  Object.keys(units).forEach(function (name) {
    if (!data.charts.some(function (chart) { return chart.series.some(function (line) { return told(line.x[name]); }); })) return;
    var label = document.createElement("label"), choice = document.createElement("input");
    choice.type = "radio"; choice.name = "axis"; choice.value = name; choice.checked = name === axis;
    choice.addEventListener("change", function () { axis = name; build(); });
    label.append(choice, " " + units[name]);
    set.append(label);
  });
  form.querySelector("button").addEventListener("click", whole);
  form.hidden = false;
  build();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", build);
  var wait;
  addEventListener("resize", function () {
    clearTimeout(wait);
    wait = setTimeout(function () {
      plots.forEach(function (own) { own.plot.setSize({ width: own.place.clientWidth, height: 250 }); });
    }, 100);
  });
})();
