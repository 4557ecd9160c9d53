(function () {
  "use strict";
  var data = JSON.parse(document.getElementById("curves").textContent);
  var root = document.documentElement, plots = [], axis = "step", range = [0, 1], moving = false, HEIGHT = 250;
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
    return size && size < 1e-3 ? (+value.toPrecision(3)).toExponential() : String(+value.toPrecision(4));
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
    draw.beginPath(); draw.rect(box.left - 6 * ratio, box.top, box.width + 12 * ratio, box.height); draw.clip();
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

  function make(chart, place) {
    var log = chart.log && positive(chart);
    function ink() { return colour("--soft"); }
    function rule() { return { stroke: function () { return colour("--line"); }, width: 1 }; }
    return new uPlot({
      width: place.clientWidth || 320, height: HEIGHT, padding: [10, 16, 0, 0],
      scales: { x: { time: false }, y: log ? { distr: 3, range: close } : {} },
      cursor: { sync: { key: "run", setSeries: false }, dataIdx: nearest, drag: { x: true, y: false },
        points: { size: 6 } },
      legend: { live: true },
      series: [{ label: units[axis], value: function (plot, value) { return value === null ? "–" : value.toLocaleString("en", { maximumFractionDigits: 3 }); } }]
        .concat(chart.series.map(function (line) { return series(chart, line); })),
      axes: [
        { stroke: ink, grid: rule(), ticks: rule(), size: 30, space: 70, values: function (plot, all) { return all.map(short); } },
        { stroke: ink, grid: rule(), ticks: rule(), size: 58, space: 34, splits: log ? rounds : undefined, filter: function (plot, all) { return all; },
          values: function (plot, all) { return all.map(function (v) { return chart.percent ? +(100 * v).toFixed(1) + " %" : short(v); }); } },
      ],
      hooks: {
        draw: [function (plot) { mark(chart, plot); }],
        setScale: [function (plot, key) { if (key === "x") follow(plot); }],
      },
    }, table(chart), place);
  }

  // Round values of a logarithmic axis: even steps where it is short, else 1, 2 and 5 or powers of ten.
  function rounds(plot, axis, least, most) {
    var found = [], span = Math.log10(most / least);
    if (span < 0.7) {
      var step = Math.pow(10, Math.floor(Math.log10(most - least)));
      step = (most - least) / step < 2.5 ? step / 2 : (most - least) / step > 6 ? step * 2 : step;
      for (var v = Math.ceil(least / step) * step; v <= most; v += step) found.push(+v.toPrecision(6));
      return found;
    }
    var digits = span < 2.5 ? [1, 2, 5] : [1], every = Math.max(1, Math.round(span / 6));
    for (var power = Math.floor(Math.log10(least)); power <= Math.log10(most); power++)
      digits.forEach(function (digit) {
        var value = +(digit * Math.pow(10, power)).toPrecision(6);
        if (value >= least && value <= most && power % every === 0) found.push(value);
      });
    return found;
  }

  function close(plot, least, most) {
    if (least === null || !(least > 0)) return [1, 10];
    var margin = Math.pow(Math.max(most / least, 1.02), 0.06);
    return [least / margin, most * margin];
  }

  function positive(chart) {
    return chart.series.every(function (line) { return line.y.every(function (v) { return v === null || v > 0; }); });
  }

  function follow(from) {
    if (moving) return;
    range = [from.scales.x.min, from.scales.x.max];
    moving = true;
    plots.forEach(function (own) { if (own.plot && own.plot !== from) own.plot.setScale("x", { min: range[0], max: range[1] }); });
    moving = false;
  }

  function whole() {
    var least = Infinity, most = -Infinity;
    data.charts.forEach(function (chart) {
      chart.series.forEach(function (line) {
        line.x[axis].forEach(function (x) { if (x !== null) { least = Math.min(least, x); most = Math.max(most, x); } });
      });
    });
    range = least < most ? [least, most] : [least - 1, least + 1];
    moving = true;
    plots.forEach(function (own) { if (own.plot) own.plot.setScale("x", { min: range[0], max: range[1] }); });
    moving = false;
  }

  // A chart is drawn when it comes near the window, or is to be printed.
  function draw(own) {
    if (own.plot) return;
    moving = true;
    own.plot = make(own.chart, own.place);
    own.plot.setScale("x", { min: range[0], max: range[1] });
    moving = false;
  }

  function again() {
    plots.forEach(function (own) {
      if (!own.plot) return;
      own.plot.destroy();
      own.plot = null;
      draw(own);
    });
  }

  data.charts.forEach(function (chart) {
    var own = { chart: chart, place: document.getElementById(chart.key), plot: null };
    plots.push(own);
    own.place.addEventListener("dblclick", function () { setTimeout(whole); });
    if (!positive(chart)) return;
    var button = document.createElement("button");
    function say() { button.setAttribute("aria-pressed", chart.log); }
    button.type = "button";
    button.className = "scale";
    button.textContent = "log scale";
    button.addEventListener("click", function () { chart.log = !chart.log; say(); again(); });
    say();
    own.place.parentNode.insertBefore(button, own.place);
  });

  var form = document.getElementById("axes"), set = form.querySelector("fieldset");
  Object.keys(units).forEach(function (name) {
    if (!data.charts.some(function (chart) { return chart.series.some(function (line) { return told(line.x[name]); }); })) return;
    var label = document.createElement("label"), choice = document.createElement("input");
    choice.type = "radio"; choice.name = "axis"; choice.value = name; choice.checked = name === axis;
    choice.addEventListener("change", function () { axis = name; whole(); again(); });
    label.append(choice, " " + units[name]);
    set.append(label);
  });
  form.querySelector("button").addEventListener("click", whole);
  form.hidden = false;
  whole();
  var watch = new IntersectionObserver(function (seen) {
    seen.forEach(function (one) {
      if (one.isIntersecting) plots.forEach(function (own) { if (own.place === one.target) draw(own); });
    });
  }, { rootMargin: "500px" });
  plots.forEach(function (own) {
    if (own.place.getBoundingClientRect().top < innerHeight) draw(own);
    else watch.observe(own.place);
  });
  addEventListener("beforeprint", function () { plots.forEach(draw); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  var wait;
  addEventListener("resize", function () {
    clearTimeout(wait);
    wait = setTimeout(function () {
      plots.forEach(function (own) { if (own.plot) own.plot.setSize({ width: own.place.clientWidth, height: HEIGHT }); });
    }, 100);
  });
})();
