"use strict";
// Draws the charts of a report from the figures in #charts, in the page's own colours, and says how that went:
// <html data-ready data-charts data-drawn data-scheme data-errors>, and on every chart data-marks or data-failed.
(function () {
  const root = document.documentElement;
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const safe = echarts.format.encodeHTML;
  const live = new Map();
  let errors = 0;
  window.addEventListener("error", () => { root.dataset.errors = ++errors; });
  root.dataset.errors = 0;

  // --- figures for people ---------------------------------------------------------------------------------------

  const UNITS = {
    seconds: [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]],
    bytes: [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]],
    joules: [[1e6, "MJ"], [1e3, "kJ"], [1, "J"]],
    ops: [[1, "ops"]], steps: [[1, ""]], money: [[1, "$"]], "": [[1, ""]],
  };
  const unitFor = (unit, most) => UNITS[unit].find(([size]) => Math.abs(most) >= size * 0.9995) || UNITS[unit].at(-1);
  const digits = (value) => {
    const size = Math.abs(value);
    if (!size) return "0";
    if (size >= 100) return Math.round(value).toLocaleString("en-US");
    return size >= 10 ? value.toFixed(1) : size >= 1 ? value.toFixed(2) : String(Number(value.toPrecision(2)));
  };
  const tick = (value, step) => {
    const places = [0, 1, 2, 3, 4, 5, 6].find((each) => Math.abs(step * 10 ** each - Math.round(step * 10 ** each)) < 1e-6 * step * 10 ** each) || 0;
    return value.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places });
  };
  const show = (value, unit) => {
    if (value === null || value === undefined) return "not known";
    const [size, name] = unitFor(unit, value);
    return unit === "money" ? "$" + digits(value) : (digits(value / size) + " " + name).trim();
  };
  const percent = (share) => (share > 1e-9 ? "+" : share < -1e-9 ? "−" : "") + tick(Math.abs(100 * share), Math.abs(share) < 0.0995 && Math.abs(100 * share - Math.round(100 * share)) > 0.01 ? 0.1 : 1) + " %";

  // --- the look all charts share --------------------------------------------------------------------------------

  function look() {
    const style = getComputedStyle(root);
    const get = (name) => style.getPropertyValue("--" + name).trim();
    const colours = Array.from({ length: 12 }, (_, place) => get("c" + (place + 1)));
    return { colours, ink: get("ink"), soft: get("soft"), line: get("line"), faint: get("faint"), ground: get("ground"),
      band: get("band"), raised: get("raised"), font: getComputedStyle(document.body).fontFamily };
  }

  const axis = (at, more) => Object.assign({
    axisLine: { show: false }, axisTick: { show: false }, nameTextStyle: { color: at.soft, fontSize: 12 },
    axisLabel: { color: at.soft, fontSize: 12, hideOverlap: true }, splitLine: { lineStyle: { color: at.faint } },
  }, more);

  // An axis from zero (or `least`) to `most` in round figures of the unit that is shown, not of the one that is stored.
  function measure(at, unit, most, { least = 0, parts = 5, whole = true, named = false } = {}) {
    const [size, name] = unitFor(unit, most);
    const step = nice((most - least) / size / parts) * size;
    const made = axis(at, { type: "value", name: named ? "" : name, nameLocation: "end", nameGap: 10, interval: step,
      min: Math.floor(least / step + 1e-9) * step, max: whole ? Math.ceil(most / step - 1e-9) * step : most });
    made.axisLabel = Object.assign({}, made.axisLabel, { showMaxLabel: whole ? null : false,
      formatter: (value) => tick(value / size, step / size) + (named && name ? " " + name : "") });
    return made;
  }
  function nice(value) {
    const power = 10 ** Math.floor(Math.log10(value || 1));
    return [1, 2, 2.5, 5, 10].find((each) => each * power >= value * 0.999) * power;
  }

  const tip = (at, more) => Object.assign({
    confine: true, backgroundColor: at.ground, borderColor: at.line, borderWidth: 1, padding: [7, 10],
    textStyle: { color: at.ink, fontSize: 13, fontFamily: at.font }, extraCssText: "box-shadow:none;white-space:normal;max-width:320px",
  }, more);
  const rowsOf = (title, rows) => `<b>${safe(title)}</b>` + rows.map(([colour, name, value]) =>
    `<div style="display:flex;gap:14px;justify-content:space-between"><span><span style="display:inline-block;width:9px;height:9px;` +
    `border-radius:2px;margin-right:7px;background:${colour}"></span>${safe(name)}</span><span>${safe(value)}</span></div>`).join("");

  // --- one function for every kind ------------------------------------------------------------------------------

  const kinds = {
    bands(spec, at, wide) {
      const names = spec.rows.map((row) => row.name);
      const ends = spec.rows.flatMap((row) => [row.low, row.high, row.error]).filter((one) => one !== null);
      const far = Math.max(0.02, ...ends.map(Math.abs)) * 1.05;
      const step = nice(far / (wide ? 4 : 2)), reach = Math.ceil(far / step - 1e-9) * step;
      return {
        legend: [["expected", at.band], ["error", at.colours[0]]],
        palette: [at.band, at.colours[0]],
        option: {
          grid: { left: wide ? 130 : 96, right: 24, top: 26, bottom: 30 },
          tooltip: tip(at, { trigger: "item", formatter: (item) => safe(spec.rows[item.dataIndex].told) }),
          xAxis: axis(at, { type: "value", min: 1 - reach, max: 1 + reach, interval: step,
            axisLabel: { color: at.soft, fontSize: 12, hideOverlap: true, formatter: (value) => percent(value - 1) } }),
          yAxis: axis(at, { type: "category", inverse: true, data: names, axisLabel: { color: at.ink, fontSize: 13 } }),
          series: [
            { type: "bar", stack: "band", silent: true, barWidth: 16, itemStyle: { color: "transparent" },
              data: spec.rows.map((row) => (row.low === null ? 0 : 1 + Math.max(row.low, -reach))) },
            { type: "bar", stack: "band", barWidth: 16, itemStyle: { color: at.band, borderRadius: 3 },
              data: spec.rows.map((row) => (row.low === null ? 0 : row.high - Math.max(row.low, -reach))),
              markLine: { silent: true, symbol: "none", precision: 12, lineStyle: { color: at.soft, type: "solid", width: 1 }, data: [{ xAxis: 1 }],
                label: { color: at.soft, fontSize: 12, formatter: "as predicted", position: "start", distance: 4 } } },
            { type: "scatter", symbolSize: 12, z: 5, itemStyle: { color: at.colours[0], borderColor: at.ground, borderWidth: 2 },
              data: spec.rows.map((row, place) => [1 + row.error, place]) },
          ],
        },
      };
    },

    lines(spec, at, wide) {
      const all = spec.series.flatMap((one) => one.points.map((point) => point[1])).concat(spec.band || []).filter((one) => one !== null);
      const most = Math.max(...all), least = Math.min(...all);
      const y = measure(at, spec.unit, most, { least: !spec.zero && least > 0.35 * most ? least - 0.05 * (most - least) : 0 });
      const last = Math.max(...spec.series.flatMap((one) => one.points.map((point) => point[0])));
      const along = spec.x || "step";
      const legend = spec.series.map((one, place) => [one.name, at.colours[place]]);
      if (spec.band) legend.push([spec.band_name, at.band]);
      return {
        legend, palette: legend.map((one) => one[1]),
        option: {
          grid: { left: 52, right: 20, top: 26, bottom: 34 },
          tooltip: tip(at, { trigger: "axis", axisPointer: { lineStyle: { color: at.line } },
            formatter: (items) => rowsOf(spec.x ? digits(items[0].value[0]) + " " + along : along + " " + items[0].value[0], items.map((item) => [item.color, item.seriesName, show(item.value[1], spec.unit)])) }),
          xAxis: axis(at, { type: "value", min: 0, max: last, name: wide ? along : "", nameLocation: "end", splitLine: { show: false }, minInterval: spec.x ? 0 : 1,
            axisLabel: { color: at.soft, fontSize: 12, hideOverlap: true, showMaxLabel: false } }),
          yAxis: y,
          series: spec.series.map((one, place) => ({
            type: one.dots ? "scatter" : "line", name: one.name, data: one.points, showSymbol: one.points.length < 3, symbolSize: one.dots ? 10 : 5,
            lineStyle: { width: 1.75 }, itemStyle: { color: at.colours[place], borderColor: at.ground, borderWidth: one.dots ? 1.5 : 0 }, color: at.colours[place], z: one.dots ? 5 : 3,
            markArea: spec.band && !place ? { silent: true, itemStyle: { color: at.band }, data: [[{ yAxis: spec.band[0] }, { yAxis: spec.band[1] }]] } : undefined,
            markLine: spec.mark && !place ? { silent: true, symbol: "none", precision: 12, lineStyle: { color: at.soft, type: "dashed", width: 1 }, label: { show: false },
              data: [{ yAxis: spec.mark }] } : undefined,
          })),
        },
      };
    },

    bars(spec, at, wide) {
      const totals = spec.names.map((_, place) => spec.stacked ? spec.series.reduce((sum, one) => sum + (one.values[place] || 0), 0)
        : Math.max(...spec.series.map((one) => one.values[place] || 0)));
      const value = measure(at, spec.unit, Math.max(...totals), spec.across ? { named: true, parts: wide ? 5 : 3 } : {});
      const colour = (one, place) => at.colours[one.colour === undefined ? place : one.colour];
      const flat = spec.across;
      const category = axis(at, { type: "category", data: spec.names, inverse: flat, splitLine: { show: false },
        axisLabel: Object.assign({ color: flat ? at.ink : at.soft, fontSize: wide && flat ? 13 : 12, hideOverlap: true },
          flat ? { interval: 0, width: wide ? 150 : 108, overflow: "break", lineHeight: 14 } : { interval: "auto" }) });
      return {
        legend: spec.series.length > 1 ? spec.series.map((one, place) => [one.name, colour(one, place)]) : [],
        palette: spec.series.map(colour),
        option: {
          grid: flat ? { left: wide ? 168 : 118, right: 30, top: 8, bottom: 30 } : { left: 52, right: 12, top: 26, bottom: 34 },
          tooltip: tip(at, { trigger: "axis", axisPointer: { type: "shadow", shadowStyle: { color: at.band } },
            formatter: (items) => rowsOf(spec.names[items[0].dataIndex], items.filter((item) => item.value !== null && item.value !== undefined)
              .map((item) => [item.color, item.seriesName, show(item.value, spec.unit)])) }),
          xAxis: flat ? value : category,
          yAxis: flat ? category : value,
          series: spec.series.map((one, place) => ({
            type: "bar", name: one.name, data: one.values, stack: spec.stacked ? "all" : undefined, barMaxWidth: flat ? 15 : 26,
            barGap: "15%", barCategoryGap: spec.names.length > 40 ? "10%" : "34%", itemStyle: { color: colour(one, place) },
          })),
        },
      };
    },

    areas(spec, at, wide) {
      const totals = spec.at.map((_, moment) => spec.values.reduce((sum, one) => sum + one[moment], 0));
      const most = Math.max(...totals, spec.limit && spec.limit < 1.6 * Math.max(...totals) ? spec.limit : 0);
      const x = measure(at, spec.x, spec.end, { parts: wide ? 8 : 4, whole: false, named: true });
      x.splitLine = { show: false };
      const few = spec.phases.length > 6 ? [] : spec.phases.filter((phase) => (phase[2] - phase[1]) / spec.end > (wide ? 0.07 : 0.16));
      const top = spec.names.length - 1;
      const tint = (place) => at.colours[spec.colours[place]];
      return {
        legend: spec.names.map((name, place) => [name, tint(place)]),
        palette: spec.names.map((_, place) => tint(place)),
        option: {
          grid: { left: 52, right: 16, top: 30, bottom: 34 },
          tooltip: tip(at, { trigger: "axis", axisPointer: { lineStyle: { color: at.soft } },
            formatter: (items) => rowsOf(show(items[0].value[0], spec.x) + " into the step, " + show(totals[items[0].dataIndex], "bytes"),
              items.filter((item) => item.value[1]).reverse().map((item) => [item.color, item.seriesName, show(item.value[1], "bytes")])) }),
          xAxis: x, yAxis: measure(at, "bytes", most * 1.08),
          series: spec.names.map((name, place) => ({
            type: "line", name, stack: "bytes", showSymbol: false, symbol: "none", color: tint(place), data: spec.at.map((moment, row) => [moment, spec.values[place][row]]),
            lineStyle: { width: 0 }, areaStyle: { color: tint(place), opacity: 0.85 }, emphasis: { disabled: true },
            markArea: place === 0 ? { silent: true, itemStyle: { color: "transparent", borderColor: at.faint, borderWidth: 1 },
              label: { color: at.soft, fontSize: 12, position: "insideTop", distance: 4 },
              data: few.map((phase) => [{ name: phase[0], xAxis: phase[1] }, { xAxis: phase[2] }]) } : undefined,
            markLine: place === top ? { silent: true, symbol: "none", precision: 12, data: [
              { xAxis: spec.at[spec.peak], lineStyle: { color: at.ink, width: 1, type: "dashed" }, label: { show: false } },
              ...(spec.limit && spec.limit <= most ? [{ yAxis: spec.limit, lineStyle: { color: at.colours[3], width: 1.5, type: "solid" },
                label: { formatter: "memory ends here", color: at.ink, position: "insideStartTop", fontSize: 12 } }] : [])] } : undefined,
            markPoint: place === top ? { silent: true, symbol: "circle", symbolSize: 9, itemStyle: { color: at.ink, borderColor: at.ground, borderWidth: 2 },
              data: [{ coord: [spec.at[spec.peak], totals[spec.peak]] }],
              label: { show: true, color: at.ink, fontSize: 13, fontWeight: 600, formatter: "peak " + show(totals[spec.peak], "bytes"),
                position: spec.at[spec.peak] > 0.7 * spec.end ? "left" : "right", distance: 8, backgroundColor: at.ground, padding: [2, 5], borderRadius: 3 } } : undefined,
          })),
        },
      };
    },

    gantt(spec, at, wide, element) {
      const grid = { left: 62, right: 14, top: 8, bottom: 34 };
      const across = element.clientWidth - grid.left - grid.right;
      const tall = Math.min(26, (spec.height - grid.top - grid.bottom) / spec.rows.length * 0.78);
      const colour = Object.fromEntries(spec.kinds.map((kind) => [kind.key, at.colours[kind.colour]]));
      const used = new Set(spec.slots.map((slot) => slot[3]));
      const x = measure(at, "seconds", spec.end, { parts: wide ? 8 : 4, whole: false, named: true });
      return {
        legend: spec.kinds.filter((kind) => used.has(kind.key)).map((kind) => [kind.name, at.colours[kind.colour]]),
        palette: spec.kinds.map((kind) => at.colours[kind.colour]),
        canvas: spec.slots.length > 2500,
        option: {
          grid,
          tooltip: tip(at, { trigger: "item", formatter: (item) => { const slot = spec.slots[item.dataIndex];
            return rowsOf(slot[4], [[colour[slot[3]], "from " + show(slot[1], "seconds") + " to " + show(slot[2], "seconds"), show(slot[2] - slot[1], "seconds")]]); } }),
          xAxis: x, yAxis: axis(at, { type: "category", inverse: true, data: spec.rows, axisLabel: { color: at.ink, fontSize: 13 }, splitLine: { show: false } }),
          series: [{
            type: "scatter", symbol: "rect", large: false, data: spec.slots.map((slot) => ({ value: [(slot[1] + slot[2]) / 2, slot[0]],
              symbolSize: [Math.max(0.75, (slot[2] - slot[1]) / spec.end * across - 0.75), tall], itemStyle: { color: colour[slot[3]], opacity: 1 } })),
          }],
        },
      };
    },

    heat(spec, at, wide, element) {
      const grid = { left: 62, right: 14, top: 8, bottom: 34 };
      const across = (element.clientWidth - grid.left - grid.right) / spec.columns.length;
      const tall = (spec.height - grid.top - grid.bottom) / spec.rows.length;
      const hot = at.colours[3];
      return {
        legend: [], palette: [hot], canvas: spec.cells.length > 2500,
        option: {
          grid,
          tooltip: tip(at, { trigger: "item", formatter: (item) => { const cell = spec.cells[item.dataIndex];
            return rowsOf(spec.rows[cell[1]], [[hot, "steps " + spec.columns[cell[0]], cell[3]]]); } }),
          xAxis: axis(at, { type: "category", data: spec.columns, splitLine: { show: false }, axisLabel: { color: at.soft, fontSize: 12, hideOverlap: true } }),
          yAxis: axis(at, { type: "category", inverse: true, data: spec.rows, axisLabel: { color: at.ink, fontSize: 13 }, splitLine: { show: false } }),
          series: [{ type: "scatter", symbol: "rect", large: false, data: spec.cells.map((cell) => ({ value: [cell[0], cell[1]],
            symbolSize: [Math.max(1, across - 1), Math.max(2, tall - 2)], itemStyle: { color: hot, opacity: 0.06 + 0.94 * cell[2] } })) }],
        },
      };
    },

    scatter(spec, at, wide) {
      const xs = spec.points.map((point) => point.x), ys = spec.points.map((point) => point.y);
      const group = (test) => spec.points.map((point, place) => Object.assign({ place }, point)).filter(test).map((point) => ({ value: [point.x, point.y], place: point.place }));
      const series = [["chosen", (point) => point.chosen, 0, 15], ["on the front", (point) => !point.chosen && point.front, 2, 11],
        ["bettered by another", (point) => !point.chosen && !point.front, 7, 9]].map(([name, test, colour, size]) => ({ name, data: group(test), colour: at.colours[colour], size })).filter((one) => one.data.length);
      const fit = (unit, values) => {
        const most = Math.max(...values), least = Math.min(...values), span = most - least || most || 1;
        return measure(at, unit, most + 0.12 * span, { least: Math.max(0, least - 0.12 * span), parts: 4 });
      };
      const x = fit("seconds", xs), [, unit] = unitFor("seconds", Math.max(...xs));
      Object.assign(x, { name: unit + " for " + spec.for, nameLocation: "middle", nameGap: 26 });
      return {
        legend: series.map((one) => [one.name, one.colour]), palette: series.map((one) => one.colour),
        option: {
          grid: { left: 58, right: 18, top: 26, bottom: 44 },
          tooltip: tip(at, { trigger: "item", formatter: (item) => { const point = spec.points[item.data.place];
            return rowsOf(point.name, [[item.color, "time", show(point.x, "seconds")], [item.color, spec.what, show(point.y, spec.unit)]]) + (point.why ? `<div>${safe(point.why)}</div>` : ""); } }),
          xAxis: x, yAxis: fit(spec.unit, ys),
          series: series.map((one) => ({ type: "scatter", name: one.name, data: one.data, symbolSize: one.size, z: 5, itemStyle: { color: one.colour, opacity: 1, borderColor: at.ground, borderWidth: 2 },
            label: { show: true, position: "right", distance: 4, color: at.ink, fontSize: 12, formatter: (item) => spec.points[item.data.place].label }, labelLayout: { hideOverlap: true } })),
        },
      };
    },
  };

  // --- drawing --------------------------------------------------------------------------------------------------

  function legendOf(element, entries) {
    const before = element.previousElementSibling;
    if (before && before.className === "legend") before.remove();
    if (entries.length < 2) return;
    const list = document.createElement("ul");
    list.className = "legend";
    list.setAttribute("aria-hidden", "true");
    for (const [name, colour] of entries) {
      const item = document.createElement("li"), swatch = document.createElement("span");
      swatch.style.background = colour;
      item.append(swatch, name);
      list.append(item);
    }
    element.before(list);
  }

  function marksOf(element, palette) {
    const canvas = element.querySelector("canvas");
    if (canvas) {
      const found = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      let count = 0;
      for (let place = 3; place < found.length; place += 4) count += found[place] > 0;
      return count;
    }
    const plain = (colour) => { const made = document.createElement("i"); made.style.color = colour; return made.style.color; };
    const wanted = new Set(palette.map((colour) => plain(colour).replace(/rgba\((.*), [\d.]+\)/, "rgb($1)")));
    return Array.from(element.querySelectorAll("svg path, svg rect, svg circle, svg polyline")).filter((shape) =>
      ["fill", "stroke"].some((name) => { const value = shape.getAttribute(name); return value && wanted.has(plain(value).replace(/rgba\((.*), [\d.]+\)/, "rgb($1)")); })).length;
  }

  function draw(spec, at) {
    const element = document.getElementById("chart-" + spec.name);
    const old = live.get(spec.name);
    if (old) old.dispose();
    try {
      const made = kinds[spec.kind](spec, at, element.clientWidth > 560, element);
      legendOf(element, made.legend);
      const chart = echarts.init(element, null, { renderer: made.canvas ? "canvas" : "svg" });
      live.set(spec.name, chart);
      chart.setOption(Object.assign({ animation: false, textStyle: { fontFamily: at.font } }, made.option));
      const marks = marksOf(element, made.palette);
      element.dataset.marks = marks;
      return marks > 0;
    } catch (problem) {
      element.dataset.failed = String(problem);
      const table = element.parentElement.querySelector("details");
      if (table) table.open = true;
      element.textContent = "This chart could not be drawn; its figures are in the table below.";
      root.dataset.errors = ++errors;
      console.error("chart " + spec.name + ": " + problem);
      return false;
    }
  }

  function drawAll() {
    const at = look();
    const drawn = charts.filter((spec) => draw(spec, at)).length;
    Object.assign(root.dataset, { charts: charts.length, drawn, scheme: dark.matches ? "dark" : "light", ready: "true" });
  }

  // --- commands to copy -----------------------------------------------------------------------------------------

  for (const block of document.querySelectorAll("pre")) {
    const around = document.createElement("div"), button = document.createElement("button");
    around.className = "copied";
    button.className = "copy";
    button.type = "button";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      let done = false;
      try {
        await navigator.clipboard.writeText(block.textContent);
        done = true;
      } catch (refused) {
        const range = document.createRange();
        range.selectNodeContents(block);
        getSelection().removeAllRanges();
        getSelection().addRange(range);
        done = document.execCommand("copy");
      }
      button.textContent = done ? "Copied" : "Press Ctrl-C";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
    block.before(around);
    around.append(block, button);
  }

  drawAll();
  dark.addEventListener("change", drawAll);
  const main = document.querySelector("main");
  let width = main.clientWidth;
  new ResizeObserver(() => {
    if (main.clientWidth === width) return;
    width = main.clientWidth;
    drawAll();
  }).observe(main);
})();
