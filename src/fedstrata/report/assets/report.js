"use strict";
// Draws the figures of a report from the data in the page, and keeps all of them at what the reader has chosen.
(() => {
  const root = document.documentElement;
  const live = "live" in root.dataset;
  let data = JSON.parse(document.getElementById("data").textContent);
  const hidden = new Set(); // lines, by place
  const chosen = {}; // control → its value, as text, so that it stays the same when there are more
  let logarithmic = false;
  let printing = false;
  const drawn = new Set(); // plots that Plotly has drawn

  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const plain = (text) => String(text).replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&#34;/g, '"')
    .replace(/&#x27;/g, "'").replace(/&amp;/g, "&");
  const make = (name, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(name), properties);
    element.append(...children);
    return element;
  };
  const say = (text) => {
    const status = document.querySelector(".status");
    status.textContent = text;
    status.classList.add("shown");
    setTimeout(() => status.classList.remove("shown"), 1800);
  };

  // ---- light and dark

  const store = {
    get: () => { try { return localStorage.getItem("fedstrata-theme"); } catch { return null; } },
    set: (theme) => { try { localStorage.setItem("fedstrata-theme", theme); } catch { /* a private window */ } },
  };
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => !printing && (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);
  if (["light", "dark"].includes(store.get())) root.dataset.theme = store.get();

  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const template = () => {
    const axis = { gridcolor: colour("--grid"), linecolor: colour("--rule"), zerolinecolor: colour("--rule"),
      tickcolor: colour("--rule"), title: { standoff: 12, font: { size: 12.5 } } };
    return { layout: {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colour("--ink"), size: 12.5, family: getComputedStyle(document.body).fontFamily },
      hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--rule"), font: { color: colour("--ink") }, namelength: -1 },
      xaxis: axis, yaxis: axis,
      legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", tracegroupgap: 0, font: { size: 12 } },
    } };
  };
  const onGround = (value) => {
    if (typeof value === "string") return isDark() ? data.dark[value] ?? value : value;
    if (Array.isArray(value) || value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, inner]) => [name, name === "colorscale" && Array.isArray(inner)
      ? inner.map(([at, own]) => [at, onGround(own)]) : onGround(inner)]));
  };

  // ---- what a figure shows, given what is chosen

  const place = (name) => {
    const { values, start } = data.controls[name];
    const at = values.indexOf(chosen[name]);
    return at < 0 ? start : at;
  };
  const traces = (figure) => {
    if (!figure.by.length) return figure.data;
    const patches = figure.frames[figure.by.map(place).join(",")] ?? [];
    return patches.map((patch, at) => ({ ...figure.data[at], ...patch }));
  };
  const logs = (figure) => // axes that can be logarithmic: what is shown now may be negative
    (figure.by.some((name) => figure.linear.includes(data.controls[name].values[place(name)])) ? [] : figure.log);
  const log10 = (value) => (value > 0 ? Math.log10(value) : null);
  const warm = (trace) => ({ // a heat-map whose colours go with the logarithm
    ...trace, z: trace.z.map((row) => row.map(log10)), customdata: trace.z,
    zmin: log10(trace.zmin) ?? undefined, zmax: log10(trace.zmax) ?? undefined,
    hovertemplate: trace.hovertemplate.replace("%{z", "%{customdata"), colorbar: { ...trace.colorbar, ...logTicks(trace) },
  });
  const logTicks = (trace) => { // 1, 2 and 5, and their tenfold
    const held = trace.z.flat().filter((value) => value > 0);
    const powers = Array.from({ length: 25 }, (_, at) => at - 15).flatMap((n) => [1, 2, 5].map((d) => Number(`${d}e${n}`)));
    const shown = powers.filter((value) => value >= Math.min(...held) && value <= Math.max(trace.zmax, ...held));
    return { tickvals: shown.map(log10), ticktext: shown.map(String) };
  };
  const composedTraces = (figure) => traces(figure).map((trace) => {
    const shown = onGround(logarithmic && logs(figure).includes("z") && trace.type === "heatmap" ? warm(trace) : trace);
    return hidden.has(trace.meta?.line) ? { ...shown, visible: "legendonly" } : shown;
  });
  const HEIGHT = 330; // of a figure that does not say
  const PAPER = 640; // width of a figure on paper
  const legendHeight = (named, width) => { // legends take no room from the picture
    const longest = Math.max(...named.map((trace) => 48 + 6.6 * plain(trace.name).length));
    return 20 * Math.ceil(named.length / Math.max(1, Math.floor(width / longest)));
  };
  const sizeOf = (figure, plot, width) => { // known before anything is drawn, so that nothing moves when it is
    const named = traces(figure).filter((t) => t.name && t.showlegend !== false && t.type !== "heatmap");
    const showlegend = (figure.layout.showlegend ?? (named.length > 1 && named.length <= 8)) && named.length > 0; // more are told apart in the toolbar
    const legend = showlegend ? legendHeight(named, width - 60) : 0;
    if (plot.dataset.most) return { showlegend, height: Number(plot.dataset.most) };
    if (figure.panels > 1) { // squares
      const rows = Math.ceil(figure.panels / figure.columns);
      return { showlegend, height: legend + 40 + rows * (34 + 0.92 * (width - 90) / figure.columns) };
    }
    const height = Math.min(figure.layout.height ?? HEIGHT, printing ? 480 : Infinity) - (printing && !figure.layout.height ? 60 : 0);
    return { showlegend, height: legend + height };
  };
  const reserve = () => all(".plot").filter((plot) => !drawn.has(plot) && figureOf(plot)).forEach((plot) => {
    plot.style.height = `${sizeOf(figureOf(plot), plot, plot.clientWidth).height}px`;
  });
  const composedLayout = (figure, plot) => {
    const shapes = [...(figure.layout.shapes ?? [])];
    if (figure.cursor) {
      const x = Number(data.controls[figure.cursor].values[place(figure.cursor)]);
      shapes.push({ type: "line", x0: x, x1: x, xref: "x", y0: 0, y1: 1, yref: "paper",
        line: { color: colour("--ink"), width: 1.5, dash: "dot" } });
    }
    // Plotly writes zooms into what it is given
    const shown = { ...structuredClone(figure.layout), shapes, template: template(), uirevision: `zoom${plot.dataset.zoom ?? 0}`, dragmode: "zoom" };
    shown.margin = { l: 60, r: 12, t: 12, b: 46, ...figure.layout.margin };
    const naming = figure.by.find((name) => ["Quantity", "Curves"].includes(data.controls[name].label));
    if (naming && shown.yaxis?.title?.text === "" && shown.yaxis.type !== "category") { // what is chosen is what it is of
      shown.yaxis.title.text = data.controls[naming].values[place(naming)];
    }
    if (naming && shown.xaxis?.title?.text === "" && shown.yaxis?.type === "category") {
      shown.xaxis.title.text = data.controls[naming].values[place(naming)];
    }
    const width = printing ? PAPER : plot.clientWidth;
    Object.assign(shown, sizeOf(figure, plot, width));
    plot.style.height = `${shown.height}px`;
    shown.width = width;
    if (width < 480 && shown.yaxis?.type === "category") shown.yaxis.tickfont = { size: 10.5 }; // names leave room for numbers
    const span = ({ x, y }) => (x ? Math.max(...x) - Math.min(...x) : (y?.length ?? 1) - 1);
    if (shown.xaxis.tickformat === "d" && traces(figure).every((trace) => span(trace) < 8)) shown.xaxis.dtick = 1; // no halves
    if (logarithmic) {
      for (const name of logs(figure).filter((name) => name !== "z")) {
        const { title, ticksuffix } = shown[name];
        const unit = ticksuffix ? { ticksuffix: "", title: { text: `${title.text} (${ticksuffix})` } } : {};
        shown[name] = { ...shown[name], ...unit, type: "log", rangemode: "normal", uirevision: "log" };
        if (shown[name].nticks) shown[name].dtick = "D2";
      }
    }
    return shown;
  };

  // ---- drawing

  const config = { displayModeBar: false, displaylogo: false };
  const figureOf = (plot) => data.figures[plot.closest("[data-figure]").dataset.figure];
  const draw = (plot) => {
    const figure = figureOf(plot);
    if (!figure) return;
    const fresh = !drawn.has(plot);
    stale.delete(plot);
    Plotly.react(plot, composedTraces(figure), composedLayout(figure, plot), config);
    if (fresh) {
      drawn.add(plot);
      if (!plot.dataset.most) setButtons(plot); // the small copies have none
      setKeys(plot);
      plot.on("plotly_legendclick", (event) => legendClick(event, toggle));
      plot.on("plotly_legenddoubleclick", (event) => legendClick(event, alone));
    }
    const table = plot.parentElement.querySelector("details.data");
    if (table?.open) tabulate(table);
  };
  const setButtons = (plot) => {
    const caption = plot.parentElement.querySelector("figcaption");
    const title = caption.textContent;
    const button = (text, what, act) => {
      const made = make("button", { type: "button", textContent: text, title: what });
      made.setAttribute("aria-label", `${what}: ${title}`);
      made.addEventListener("click", act);
      return made;
    };
    caption.append(
      button("Reset", "Undo zooming", () => { plot.dataset.zoom = Number(plot.dataset.zoom ?? 0) + 1; draw(plot); }),
      button("PNG", "Save as a picture", () => Plotly.downloadImage(plot, { format: "png", scale: 2,
        width: plot.clientWidth, height: plot.clientHeight, filename: plot.parentElement.dataset.figure })));
  };
  // Arrow keys go through the cells of a heat-map, and what a pointer would be told is told.
  const setKeys = (plot) => {
    if (figureOf(plot).panels > 1 || plot.data[0]?.type !== "heatmap" || plot.dataset.most) return;
    const told = make("p", { className: "spoken" });
    told.setAttribute("aria-live", "polite");
    plot.after(told);
    plot.tabIndex = 0;
    plot.setAttribute("role", "application");
    plot.setAttribute("aria-roledescription", "heat-map; arrow keys go through its cells");
    let at = [0, 0]; // row, column
    const tell = () => {
      const { x, y, z, customdata } = plot.data[0];
      at = [Math.min(at[0], y.length - 1), Math.min(at[1], x.length - 1)];
      const [row, column] = at;
      const where = (names, place) => (typeof names[place] === "number" ? names[place] : place); // names stand at their places
      Plotly.Fx.hover(plot, { xval: where(x, column), yval: where(y, row) }, "xy");
      const value = (customdata ?? z)[row][column];
      told.textContent = `${plain(y[row])}, ${plain(x[column])}: ${value === null ? "nothing" : shownNumber(value)}`;
    };
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!step) return;
      event.preventDefault();
      at = told.textContent ? at.map((place, axis) => Math.max(0, place + step[axis])) : [0, 0];
      tell();
    });
    plot.addEventListener("blur", () => { told.textContent = ""; Plotly.Fx.unhover(plot); });
  };
  const legendClick = (event, act) => {
    const line = event.data[event.curveNumber]?.meta?.line;
    if (line === undefined) return true; // classes and layers are this figure's own
    act(line);
    return false;
  };
  const toggle = (line) => { hidden.has(line) ? hidden.delete(line) : hidden.add(line); linesChanged(); };
  const alone = (line) => {
    const others = data.lines.map((_, at) => at).filter((at) => at !== line);
    const already = others.every((at) => hidden.has(at));
    hidden.clear();
    if (!already) others.forEach((at) => hidden.add(at));
    linesChanged();
  };
  const linesChanged = () => {
    all("input[data-line]").forEach((box) => { box.checked = !hidden.has(Number(box.dataset.line)); });
    redraw((figure) => traces(figure).some((trace) => trace.meta?.line !== undefined));
  };

  // What is in sight, or nearly, is drawn, the nearest first; the rest when a reader comes near it. So a page is there at
  // once, however long it is, and what is passed by quickly is not drawn.
  const NEAR = 500; // pixels
  const near = new Set();
  const stale = new Set(); // drawn before something was chosen, and out of sight since
  let drawing = false;
  const observer = new IntersectionObserver((entries) => {
    entries.forEach(({ target, isIntersecting }) => { isIntersecting ? near.add(target) : near.delete(target); });
    drawSoon();
  }, { rootMargin: `${NEAR}px` });
  const idle = (act) => (window.requestIdleCallback ? requestIdleCallback(act, { timeout: 200 }) : setTimeout(act, 10));
  const drawSoon = () => { if (!drawing) { drawing = true; idle(drawNearest); } };
  const distance = (plot) => {
    const { top, bottom } = plot.getBoundingClientRect();
    return Math.max(0, top - innerHeight, -bottom);
  };
  const drawNearest = () => {
    const waiting = [...near].filter((plot) => plot.isConnected && (!drawn.has(plot) || stale.has(plot)));
    if (!waiting.length) { drawing = false; root.dataset.ready = "true"; return; }
    const found = waiting.map((plot) => [distance(plot), plot]);
    draw(found.reduce((best, one) => (one[0] < best[0] ? one : best))[1]);
    idle(drawNearest);
  };
  const redraw = (wanted = () => true) => drawn.forEach((plot) => {
    if (!wanted(figureOf(plot))) return;
    if (distance(plot) <= NEAR) draw(plot); else stale.add(plot);
  });

  // ---- controls

  const choose = (name, at) => {
    const { values, start } = data.controls[name];
    chosen[name] = at === start && data.controls[name].slides ? undefined : values[at]; // where it began, mostly at the end, is followed
    redraw((figure) => figure.by.includes(name) || figure.cursor === name);
  };
  const control = (name) => {
    const { label, values, slides } = data.controls[name];
    const input = slides ? make("input", { type: "range", min: 0, max: values.length - 1, step: 1 }) : make("select");
    if (slides) {
      const output = make("output");
      const show = () => {
        output.textContent = data.controls[name].values[input.value];
        input.setAttribute("aria-valuetext", `${label.toLowerCase()} ${output.textContent}`);
      };
      input.value = place(name);
      input.addEventListener("input", () => { show(); choose(name, Number(input.value)); });
      show();
      const box = make("label", { className: "slide" }, make("span", { textContent: label }), input, output);
      box.dataset.control = name;
      return box;
    }
    input.append(...values.map((value, at) => make("option", { value: at, textContent: value })));
    input.value = place(name);
    input.addEventListener("change", () => choose(name, Number(input.value)));
    const box = make("label", {}, make("span", { textContent: label }), input);
    box.dataset.control = name;
    return box;
  };
  const setControls = () => all("[data-controls]").forEach((box) => {
    const names = box.dataset.controls.split(" ").filter((name) => data.controls[name]?.values.length > 1);
    const signature = JSON.stringify(names.map((name) => [name, data.controls[name].values]));
    if (box.dataset.signature === signature) return;
    const focused = box.contains(document.activeElement) && document.activeElement.closest("[data-control]").dataset.control;
    box.replaceChildren(...names.map(control));
    box.dataset.signature = signature;
    if (focused) box.querySelector(`[data-control="${focused}"] :is(input, select)`)?.focus();
  });

  const setToolbar = () => {
    const bar = document.querySelector(".toolbar");
    const inner = make("div", { className: "inner" });
    if (data.lines.length > 1) {
      const boxes = data.lines.map(({ name, colour: own }, at) => {
        const box = make("input", { type: "checkbox", checked: !hidden.has(at) });
        box.dataset.line = at;
        box.addEventListener("change", () => toggle(at));
        const spot = make("span", { className: "swatch" });
        spot.style.background = own;
        return make("label", { title: name }, box, spot, make("span", { className: "name", textContent: name }));
      });
      inner.append(make("fieldset", {}, make("legend", { textContent: "Methods shown in all figures" }), ...boxes));
    }
    const log = make("input", { type: "checkbox", id: "log", checked: logarithmic });
    log.addEventListener("change", () => { logarithmic = log.checked; redraw((figure) => figure.log.length); });
    const theme = make("button", { type: "button", id: "theme" });
    theme.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      store.set(root.dataset.theme);
      themeChanged();
    });
    if (live) inner.append(make("span", { className: "live", textContent: "live" }));
    inner.append(make("label", {}, log, "Log axes"), theme);
    bar.replaceChildren(inner);
    nameTheme();
  };
  const nameTheme = () => {
    const other = isDark() ? "light" : "dark";
    Object.assign(document.getElementById("theme"), { textContent: `${other[0].toUpperCase()}${other.slice(1)}`, title: `Show on ${other} ground` });
  };
  const themeChanged = () => { nameTheme(); redraw(); };
  prefersDark.addEventListener("change", themeChanged);

  // ---- tables

  const shownNumber = (value, form) => {
    if (value === null || value === undefined) return "";
    if (typeof value !== "number") return plain(value);
    if (form?.endsWith("%")) return `${(100 * value).toFixed(2)} %`;
    return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(5)));
  };
  const gridOf = (trace, title) => ({ title, head: ["", ...trace.x], rows: trace.y.map((name, at) =>
    [name, ...(trace.customdata && !Array.isArray(trace.customdata[0]?.[0]) ? trace.customdata : trace.z)[at]]) });
  const pairs = (shown) => ({ head: shown.flatMap((t) => [`${t.name}: x`, "y"]),
    rows: Array.from({ length: Math.max(...shown.map((t) => t.x.length)) }, (_, at) => shown.flatMap((t) => [t.x[at], t.y[at]])) });
  const columns = (shown, figure) => {
    const [key, value] = figure.layout.yaxis?.type === "category" ? ["y", "x"] : ["x", "y"];
    const keys = (t) => t[key] ?? t[value].map((_, at) => at);
    const places = [...new Set(shown.flatMap(keys))];
    if (places.every((p) => typeof p === "number")) places.sort((a, b) => a - b);
    const maps = shown.map((t) => new Map(keys(t).map((p, at) => [p, (t.meta?.told ?? t[value])?.[at]]))); // some lines are drawn by shares
    return { head: [figure.layout[`${key}axis`].title?.text ?? "", ...shown.map((t) => t.name)],
      rows: places.map((p) => [p, ...maps.map((map) => map.get(p))]) };
  };
  const tablesOf = (figure) => {
    const shown = traces(figure).filter((t) => !t.meta?.band && !hidden.has(t.meta?.line));
    if (!shown.length) return [];
    if (shown[0].type === "heatmap") return shown.map((t, at) => gridOf(t, figure.layout.annotations?.[at]?.text));
    const own = figure.layout.xaxis.tickformat === "~s" || shown[0].mode === "markers" && shown.length > 1;
    return [own ? pairs(shown) : columns(shown, figure)];
  };
  const tabulate = (details) => {
    const figure = data.figures[details.closest("[data-figure]").dataset.figure];
    const choice = figure.by.map((name) => data.controls[name]).map((c, at) => `${c.label.toLowerCase()} ${c.values[place(figure.by[at])]}`);
    const form = figure.layout.yaxis?.tickformat;
    all(".table", details).forEach((old) => old.remove());
    for (const { title, head, rows } of tablesOf(figure)) {
      const caption = [figure.title, title && plain(title), ...choice].filter(Boolean).join(", ");
      const cells = (row) => row.map((cell, at) => at
        ? make("td", { className: "n", textContent: shownNumber(cell, form) })
        : make("th", { scope: "row", textContent: shownNumber(cell) }));
      const table = make("table", {}, make("caption", { textContent: caption }),
        make("thead", {}, make("tr", {}, ...head.map((name, at) => make("th", { scope: "col", className: at ? "n" : "", textContent: plain(name) || figure.title })))),
        make("tbody", {}, ...rows.map((row) => make("tr", {}, ...cells(row)))));
      details.append(make("div", { className: "table" }, make("div", { className: "scroll", tabIndex: 0, role: "group", ariaLabel: caption }, table)));
    }
    setCopies(details);
    setHints(details);
  };
  const markdown = (table) => {
    const rows = all("tr", table).map((row) => [...row.cells].map((cell) => cell.textContent.trim().replace(/\s+/g, " ").replace(/\|/g, "\\|")));
    const line = (cells) => `| ${cells.join(" | ")} |`;
    const rule = [...table.rows[0].cells].map((cell) => (cell.classList.contains("n") ? "--:" : ":--"));
    return [line(rows[0]), line(rule), ...rows.slice(1).map(line)].join("\n") + "\n";
  };
  const copy = async (text) => {
    try { await navigator.clipboard.writeText(text); return; } catch { /* not allowed here: the old way */ }
    const area = make("textarea", { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  };
  const bound = new WeakSet(); // buttons that copy
  const setCopies = (within = document) => all(".table", within).forEach((box) => {
    const table = box.querySelector("table");
    let button = box.querySelector("button.copy");
    if (!button) {
      button = make("button", { type: "button", className: "copy", textContent: "Copy Markdown" });
      button.setAttribute("aria-label", `Copy as Markdown: ${table.caption.textContent}`);
      box.append(button);
    }
    if (bound.has(button)) return;
    bound.add(button);
    button.addEventListener("click", async () => { await copy(markdown(table)); say("Copied as Markdown"); });
  });
  // Tables that are wider than their place say so, and can be scrolled by keys; the others need no stop for the tabulator.
  const wider = (box) => {
    const hidden = box.scrollWidth - box.clientWidth;
    if (hidden > 2 || box.scrollHeight - box.clientHeight > 2) box.tabIndex = 0; else box.removeAttribute("tabindex");
    box.parentElement.classList.toggle("more", hidden - box.scrollLeft > 2);
  };
  const sizes = new ResizeObserver((entries) => entries.forEach(({ target }) => wider(target)));
  const setHints = (within = document) => all(".table > .scroll", within).forEach((box) => {
    sizes.observe(box);
    box.addEventListener("scroll", () => wider(box), { passive: true });
  });
  document.addEventListener("toggle", (event) => {
    if (event.target.matches("details.data") && event.target.open) tabulate(event.target);
  }, true);

  // ---- printing: light, all figures, at the width of a page

  let before;
  addEventListener("beforeprint", () => {
    printing = true;
    before = root.dataset.theme;
    root.dataset.theme = "light";
    if (typeof Plotly === "undefined") return;
    all(".plot").forEach(draw);
  });
  addEventListener("afterprint", () => {
    printing = false;
    if (before) root.dataset.theme = before; else delete root.dataset.theme;
    redraw();
  });

  let settled = 0;
  let wide = innerWidth;
  addEventListener("resize", () => { // a telephone's bars come and go: only widths count
    clearTimeout(settled);
    settled = setTimeout(() => { if (innerWidth !== wide && !printing) { wide = innerWidth; redraw(); } }, 120);
  });

  // ---- news of a run that goes on

  const element = (html) => make("template", { innerHTML: html }).content.firstElementChild;
  const parts = new Map(); // what each part was last replaced by
  const replacePart = (name, html) => {
    const old = document.querySelector(`[data-part="${name}"]`);
    if (!old || parts.get(name) === html) return;
    const open = all("details", old).map((details) => details.open);
    old.innerHTML = html;
    parts.set(name, html);
    all("details", old).forEach((details, at) => { details.open = open[at] ?? false; });
  };
  const receive = (fresh) => {
    const count = data.lines.length;
    data = fresh;
    replacePart("header", element(fresh.header).innerHTML);
    document.querySelector(".contents").replaceWith(element(fresh.contents));
    const main = document.getElementById("main");
    let after = null;
    for (const { name, html, part } of fresh.sections) {
      let section = document.getElementById(name);
      const next = element(html);
      const names = (within) => all("[data-figure]", within).map((f) => f.dataset.figure).join();
      const bodies = (within) => all(`[data-part="${name}"]`, within).length;
      if (!section || names(section) !== names(next) || bodies(section) !== bodies(next)) { // new, or with what it had not yet
        section?.remove();
        section = next;
        after ? after.after(section) : main.prepend(section);
      } else if (part) replacePart(name, part);
      after = section;
    }
    drawn.forEach((plot) => { if (!plot.isConnected) { Plotly.purge(plot); [drawn, near, stale].forEach((held) => held.delete(plot)); } });
    if (fresh.lines.length !== count) setToolbar();
    setControls();
    setCopies();
    setHints();
    reserve();
    redraw();
    watch();
  };
  const poll = async (tag) => {
    const note = document.querySelector(".toolbar .live");
    try {
      const answer = await fetch("/data.json", { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
      if (answer.status === 200) {
        tag = answer.headers.get("ETag");
        receive(await answer.json());
      }
      note.textContent = "live";
    } catch {
      note.textContent = "no connection; trying again";
    }
    setTimeout(poll, 2000, tag);
  };

  // ---- Plotly, unpacked after the first paint

  const decode = (text) => {
    if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
    const signs = atob(text);
    const bytes = new Uint8Array(signs.length);
    for (let at = 0; at < signs.length; at += 1) bytes[at] = signs.charCodeAt(at);
    return bytes;
  };
  const watch = () => { // an observer that knows a plot is asked again in vain
    const plots = all(".plot");
    plots.forEach((plot) => observer.observe(plot));
    if (!plots.length) root.dataset.ready = "true";
  };
  const unpack = async () => {
    const packed = decode(document.getElementById("plotly").textContent);
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    document.head.append(make("script", { textContent: await new Response(stream).text() }));
    document.getElementById("plotly").remove();
    if (typeof Plotly === "undefined") throw new Error("Plotly.js did not start");
  };
  const begin = async () => {
    try {
      await unpack();
    } catch (error) {
      all(".plot").forEach((plot) => plot.replaceChildren(make("p", { className: "failed",
        textContent: `Figures cannot be drawn here (${error.message}). A browser since 2023 can; the tables are whole.` })));
      return;
    }
    watch();
    if (live) setTimeout(poll, 500, null);
  };
  setToolbar();
  setControls();
  setCopies();
  setHints();
  reserve();
  root.dataset.scripted = "";
  requestAnimationFrame(() => setTimeout(begin, 0));
})();
