// SPDX-License-Identifier: Apache-2.0
// The page: what is chosen, what is computed for it, and where it is written. `explorer` is there for scripts and tests.
"use strict";

const explorer = (() => {
  const find = (id) => document.getElementById(id);
  const page = JSON.parse(find("description").textContent);
  const read = openNumbers(find("numbers").textContent);
  const fields = new Fields(page, read);
  const GROUP_NAMES = { x: "γ(x)", y: "γ(y)", "x-y": "γ(x − y)", distance: "|x − y|", u_x: "u(x)", u_y: "u(y)", "u_x*u_y": "u(x) ⊙ u(y)" };
  const QUANTITIES = [
    { id: "variation", name: "‖K_ij − mean_j K_ij‖", title: "by which the query tells its keys apart" },
    { id: "learned", name: "‖K_ij − bias‖", title: "what the pair adds to the constant kernel" },
    { id: "full", name: "‖K_ij‖", title: "the whole kernel" },
    { id: "entry", name: "K_ij[a, c]", title: "one entry of the kernel", isSigned: true },
    { id: "action", name: "‖K_ij u_j‖", title: "the action on u" },
    { id: "output", name: "ω_ij K_ij u_j along the output", title: "contributions; their sum is the length of the output", isSigned: true },
    { id: "component", name: "ω_ij (K_ij u_j)[a]", title: "contributions to one component of the output", isSigned: true },
    { id: "prediction", name: "ω_ij K_ij u_j towards the prediction", title: "contributions to the log-probability, to first order", isSigned: true },
  ];
  const state = {
    sample: 0, layer: 0, head: 0, field: page.fields[0].name, quantity: "variation", row: 0, column: 0, query: 0,
    off: new Set(), freezeX: false, freezeY: false, drawCount: 16, seed: 1,
  };
  let view = null, shown = null, pending = 0;

  // What is computed ------------------------------------------------------------------------------------------------

  const fieldInfo = (name = state.field) => page.fields.find((field) => field.name === name);
  const currentField = () => fields.find(state.sample, state.layer, state.head, state.field);
  const signal = () => fields.signals[state.sample];
  const drawn = () => ({ count: state.drawCount, seed: state.seed });
  const gradient = (layer, head) => fields.ofHead(page.samples[state.sample].predictions.gradients[layer], head).subarray(
    state.query * page.headSize, (state.query + 1) * page.headSize);

  /** The chosen quantity for all keys [n], NaN where the query does not see one, and the weights omega_ij. */
  function evaluate(chosen = state) {
    const field = fields.find(chosen.sample, chosen.layer, chosen.head, chosen.field);
    const weights = fields.signals[chosen.sample].weights(fieldInfo(chosen.field).weights, chosen.query, page.isCausal);
    const coefficients = field.coefficients(chosen.query, chosen);
    let values;
    if (["full", "learned", "variation"].includes(chosen.quantity)) {
      values = field.norms(field.part(coefficients, chosen.quantity, weights));
    } else if (chosen.quantity === "entry") values = field.entries(coefficients, chosen.row, chosen.column);
    else if (chosen.quantity === "action") values = field.actions(coefficients);
    else {
      let direction = new Float64Array(page.headSize);
      if (chosen.quantity === "component") direction[chosen.row] = 1;
      else if (chosen.quantity === "prediction") direction = gradient(chosen.layer, chosen.head);
      else {
        const out = field.integral(coefficients, weights), size = length(out) || 1;
        direction = out.map((value) => value / size);
      }
      values = field.along(coefficients, direction).map((value, j) => value * weights[j]);
    }
    for (let j = 0; j < values.length; j++) if (weights[j] === 0) values[j] = NaN;
    return { values, weights };
  }

  /** The integral of one head in one of the page's modes [d_h]. */
  function integrate(mode, head = state.head, options = EVERYTHING) {
    const out = new Float64Array(page.headSize);
    for (const term of mode.terms) {
      const field = fields.find(state.sample, state.layer, head, term.field);
      const weights = signal().weights(term.weights, state.query, page.isCausal, drawn());
      field.integral(field.coefficients(state.query, options), weights).forEach((value, a) => (out[a] += value));
    }
    return out;
  }

  /** Contributions along a direction in one mode [n], NaN for keys that take no part. */
  function contributions(mode, direction, layer = state.layer, head = state.head) {
    const out = new Float64Array(signal().count).fill(NaN);
    for (const term of mode.terms) {
      const field = fields.find(state.sample, layer, head, term.field);
      const weights = signal().weights(term.weights, state.query, page.isCausal, drawn());
      const values = field.along(field.coefficients(state.query, EVERYTHING), direction);
      for (let j = 0; j < out.length; j++) if (weights[j]) out[j] = (Number.isNaN(out[j]) ? 0 : out[j]) + weights[j] * values[j];
    }
    return out;
  }

  const modelMode = () => page.modes.find((mode) => mode.isModel);

  // What is drawn at once -------------------------------------------------------------------------------------------

  function redraw() {
    const { values, weights } = evaluate(), quantity = QUANTITIES.find((one) => one.id === state.quantity);
    const scale = colourScale(values, quantity.isSigned);
    shown = { values, weights, scale };
    view.draw(values, scale, state.query);
    const name = quantity.name.replace("a, c", `${state.row}, ${state.column}`).replace("[a]", `[${state.row}]`);
    find("mapTitle").textContent = `${name}: ${quantity.title}`;
    find("queryName").textContent = view.name(state.query);
    find("query").value = state.query;
    const unit = { action: " (units of u)", output: " (units of u)", component: " (units of u)", prediction: " (nats)" }[state.quantity];
    drawLegend(find("legend"), scale, name + (unit || " (no unit)"));
    describeMap(values, weights, name);
    const distances = Float64Array.from(values, (_, j) => signal().distance(state.query, j));
    find("distanceTitle").textContent = name;
    words("distances", drawDistances(find("distances"), distances, Array.from(values), scale, name));
    showDirections(values, scale);
    later();
  }

  function words(id, text) {
    find(id).setAttribute("aria-label", text);
    const box = find(id + "Text");
    if (box) box.textContent = text;
  }

  function describeMap(values, weights, name) {
    const order = [...values.keys()].filter((j) => Number.isFinite(values[j])).sort((a, b) => Math.abs(values[b]) - Math.abs(values[a]));
    const top = order[0], low = order.at(-1);
    find("mapText").textContent = order.length
      ? `At ${view.name(state.query)}, ${order.length} of ${values.length} keys are seen. ${name} is largest at ${view.name(top)}, ${plain(values[top])}, and smallest at ${view.name(low)}, ${plain(values[low])}.`
      : `${view.name(state.query)} sees no key.`;
    const rows = order.slice(0, 10).map((j) => element("tr", {}, element("td", { text: view.name(j) }),
      element("td", { text: plain(signal().distance(state.query, j)) }), element("td", { text: plain(weights[j]) }), element("td", { text: plain(values[j]) })));
    find("keys").replaceChildren(...rows);
  }

  function showDirections(values, scale) {
    const { size, positions } = signal(), isImage = page.samples[state.sample].parts.some((part) => part.kind === "grid");
    const { names, find: number } = directions(size, isImage), pairs = [];
    for (let j = 0; j < values.length; j++) {
      const step = Array.from({ length: size }, (_, k) => positions[j * size + k] - positions[state.query * size + k]);
      const bin = number(step);
      if (bin !== null && Number.isFinite(values[j])) pairs.push([bin, values[j]]);
    }
    const found = means(pairs, names.length);
    drawBars(find("directions"), names.map((name, k) => ({ name, value: found[k] })), scale);
  }

  // What is drawn when there is time --------------------------------------------------------------------------------

  function later() {
    const turn = ++pending, tasks = [showModes, showHeads, showPrediction, showState, showChanges];
    const next = () => {
      if (turn !== pending) return;
      const task = tasks.shift();
      if (!task) document.documentElement.dataset.settled = String(turn);
      else {
        task();
        setTimeout(next, 0);
      }
    };
    setTimeout(next, 60);
  }

  function showChanges() {
    const field = currentField(), { weights } = shown, { source } = fieldInfo();
    const base = field.norms(field.part(field.coefficients(state.query, EVERYTHING), "learned", weights));
    const root = (values) => Math.sqrt(values.reduce((sum, value, j) => sum + weights[j] * value * value, 0));
    const inputs = source === "kernel" ? page.inputs : ["x", "y", "u_x", "u_y"], whole = root(base) || 1;
    const cases = inputs.map((name) => ({ name: `without ${GROUP_NAMES[name]}`, off: new Set([name]) }));
    cases.push({ name: "u(x) frozen", freezeX: true }, { name: "u(y) frozen", freezeY: true }, { name: "both frozen", freezeX: true, freezeY: true });
    const entries = cases.map((one) => {
      const value = root(field.changes(state.query, { off: one.off || new Set(), freezeX: !!one.freezeX, freezeY: !!one.freezeY })) / whole;
      return { name: one.name, value, text: `${(100 * value).toFixed(1)} %` };
    });
    drawBars(find("changes"), entries);
    const both = entries.at(-1).value;
    find("changesText").textContent = `With both features frozen the kernel changes by ${(100 * both).toFixed(1)} %: here it is ${both < 0.1 ? "nearly a function of positions alone" : both < 0.5 ? "a function of positions above all, with a part that content makes" : "made by content to a large part"}.`;
  }

  function small(title, lines, label) {
    const canvas = element("canvas", { role: "img", "aria-label": label });
    return { canvas, content: [canvas, element("strong", { text: title }), ...lines.map((line) => element("span", { text: line }))] };
  }

  function showModes() {
    const reference = integrate(modelMode()), size = length(reference) || 1, direction = reference.map((value) => value / size);
    const tiles = page.modes.map((mode) => {
      const out = integrate(mode), error = length(out.map((value, a) => value - reference[a])) / size;
      const values = contributions(mode, direction), keys = values.reduce((sum, value) => sum + !Number.isNaN(value), 0);
      const state = mode.isModel ? "what the model computes" : `error ${(100 * error).toFixed(2)} %`;
      const label = `${mode.title}: contributions of ${keys} keys; ${state}`;
      return { mode, values, error, ...small(mode.title, [state, ` · ${keys} keys`], label) };
    });
    find("modes").replaceChildren(...tiles.map((tile) => element("div", { class: "small" }, ...tile.content)));
    const scale = colourScale(tiles.find((tile) => tile.mode.isModel).values, true);
    const bounded = { ...scale, colour: (value) => scale.colour(Math.max(scale.low, Math.min(scale.high, value))) };
    for (const tile of tiles) view.drawSmall(tile.canvas, tile.values, bounded, state.query);
    find("modesText").textContent = tiles.filter((tile) => !tile.mode.isModel).map((tile) => `${tile.mode.title}: ${(100 * tile.error).toFixed(2)} %`).join("; ") + ".";
    shown.modes = tiles.map(({ mode, error }) => ({ title: mode.title, error }));
  }

  function showHeads() {
    const tiles = page.heads.map((number, head) => {
      const { values } = evaluate({ ...state, head });
      const top = values.reduce((best, value, j) => (Math.abs(value) > Math.abs(values[best]) || !Number.isFinite(values[best]) ? j : best), 0);
      const label = `Head ${number + 1}: largest at ${view.name(top)}, ${plain(values[top])}`;
      return { head, values, label, ...small(`Head ${number + 1}`, [`up to ${plain(values[top])}`], label) };
    });
    const isSigned = QUANTITIES.find((one) => one.id === state.quantity).isSigned;
    find("heads").replaceChildren(...tiles.map((tile) => element("button", {
      type: "button", class: "small", "aria-pressed": String(tile.head === state.head), onclick: () => set({ head: tile.head }),
    }, ...tile.content)));
    for (const tile of tiles) view.drawSmall(tile.canvas, tile.values, colourScale(tile.values, isSigned), state.query);
    find("headsText").textContent = tiles.map((tile) => tile.label).join("; ") + ".";
  }

  function showPrediction() {
    const predictions = page.samples[state.sample].predictions, n = signal().count;
    find("predictionCard").hidden = !predictions;
    if (!predictions) return;
    const isPerPosition = predictions.labels.length > 1, row = isPerPosition ? state.query : 0, top = predictions.labels[row];
    const probabilities = read(predictions.probabilities).subarray(row * top.length, (row + 1) * top.length);
    const named = (label) => (predictions.areTokens ? label.replace(/[Ġ▁]/g, "␣").replace("Ċ", "↵") : page.labels[label] ?? String(label));
    find("predictionTitle").textContent = isPerPosition && page.isCausal ? "The next prediction" : "The prediction";
    drawBars(find("predictions"), top.map((label, k) => ({ name: named(label), value: probabilities[k], text: `${(100 * probabilities[k]).toFixed(1)} %` })));
    const adds = new Float64Array(page.layers.length * n);
    page.layers.forEach((_, layer) => {
      const sum = new Float64Array(n);
      page.heads.forEach((_, head) => contributions(modelMode(), gradient(layer, head), layer, head).forEach((value, j) => (sum[j] += value)));
      adds.set(sum, layer * n);
    });
    const scale = colourScale(adds, true), layers = page.layers.map((layer) => `layer ${layer.number + 1}`);
    const target = named(top[0]);
    find("addsTitle").textContent = `What each key adds to log p(${target})`;
    drawMatrix(find("adds"), adds, page.layers.length, n, scale, { rows: layers, columns: isPerPosition ? "tokens →" : "positions →" }, state.query);
    drawLegend(find("addsLegend"), scale, "change of the log-probability (nats)");
    const order = [...adds.keys()].filter((k) => Number.isFinite(adds[k])).sort((a, b) => Math.abs(adds[b]) - Math.abs(adds[a])).slice(0, 3);
    words("adds", order.length ? `The largest: ${order.map((k) => `${view.name(k % n)} through ${layers[Math.floor(k / n)]}, ${plain(adds[k])}`).join("; ")}.` : "No key adds anything.");
    shown.adds = adds;
  }

  function showState() {
    find("stateCard").hidden = !page.isCausal;
    if (!page.isCausal) return;
    const far = page.fields.find((field) => field.source === "factors"), n = signal().count;
    find("stateBox").hidden = !far;
    if (far) {
      const field = fields.find(state.sample, state.layer, state.head, far.name), states = field.states();
      const turned = new Float64Array(states.length);
      for (let t = 0; t < n; t++) for (let r = 0; r < field.rank; r++) turned[r * n + t] = states[t * field.rank + r];
      const scale = colourScale(turned, false);
      find("stateTitle").textContent = `Length of the ${field.rank} parts of the ${far.title}'s state, after each token`;
      drawMatrix(find("state"), turned, field.rank, n, scale, { rows: Array.from({ length: field.rank }, (_, r) => `part ${r + 1}`), columns: "tokens →" }, state.query);
      drawLegend(find("stateLegend"), scale, "length of the state, relative to the mass of the tokens so far");
      const last = Array.from({ length: field.rank }, (_, r) => states[(n - 1) * field.rank + r]);
      words("state", `After the last token the parts have lengths from ${plain(Math.min(...last))} to ${plain(Math.max(...last))}.`);
    }
    const parts = modelMode().terms.map((term) => {
      const field = fields.find(state.sample, state.layer, state.head, term.field);
      return { field, coefficients: field.coefficients(state.query, EVERYTHING), weights: signal().weights(term.weights, state.query, true) };
    });
    const curve = [], steps = Math.min(state.query + 1, 128);
    for (let k = 1; k <= steps; k++) {
      const end = Math.round((k * (state.query + 1)) / steps), out = new Float64Array(page.headSize);
      for (const { field, coefficients, weights } of parts) {
        field.integral(coefficients, weights.map((weight, j) => (j < end ? weight : 0))).forEach((value, a) => (out[a] += value));
      }
      curve.push(length(out));
    }
    drawCurve(find("build"), curve, `tokens up to the query, ‖Σ ω K u‖ so far`, curve.length - 1);
    words("build", `The output of ${view.name(state.query)} grows to ${plain(curve.at(-1))} over ${state.query + 1} tokens.`);
  }

  const FIGURES = {
    locality: "share of |K|² within the radius", convolution: "1: a function of x − y alone", invariance: "1: shifting both points changes nothing",
    content: "share of the variance that features cause", causality: "1 past, −1 future", entropy: "1 global, towards 0 a few keys",
  };

  function showDiagnosis() {
    const { diagnosis } = page;
    if (typeof diagnosis === "string") {
      find("diagnosisHint").textContent = diagnosis;
      return find("diagnosis").replaceChildren();
    }
    const layer = page.layers[state.layer].number, head = page.heads[state.head];
    const own = diagnosis.heads.find((one) => one.layer === layer && one.head === head);
    find("diagnosisHint").textContent = `Over all samples of this page, layer ${layer + 1}, head ${head + 1}. Locality counts up to a distance of ${plain(diagnosis.radius)}, where a constant kernel has ${plain(diagnosis.uniformLocality)}.`;
    drawBars(find("diagnosis"), Object.entries(FIGURES).map(([name, hint]) => ({ name: `${name}: ${hint}`, hint, value: own[name], text: own[name] === null ? "not defined" : plain(own[name]) })));
  }

  // What the reader chooses -----------------------------------------------------------------------------------------

  function set(changes) {
    const isOther = changes.sample !== undefined && changes.sample !== state.sample;
    Object.assign(state, changes);
    if (isOther) openSample();
    state.query = Math.min(Math.max(state.query, 0), signal().count - 1);
    for (const id of ["sample", "layer", "head", "field", "quantity", "row", "column"]) find(id).value = state[id];
    const hasRow = ["entry", "component"].includes(state.quantity);
    for (const box of document.querySelectorAll(".entry")) box.hidden = !hasRow;
    find("columnBox").hidden = state.quantity !== "entry";
    for (const box of find("switches").querySelectorAll("input")) {
      box.checked = !state.off.has(box.value);
      const isFactor = fieldInfo().source === "factors";
      box.disabled = isFactor ? !["x", "y", "u_x", "u_y"].includes(box.value) : !page.inputs.includes(box.value);
    }
    find("freezeX").checked = state.freezeX;
    find("freezeY").checked = state.freezeY;
    redraw();
    showDiagnosis();
  }

  function openSample() {
    const sample = page.samples[state.sample];
    view = new SampleView(find("view"), sample, read, (query) => query !== state.query && set({ query }));
    find("query").max = sample.count - 1;
    find("turnHint").hidden = !sample.parts.some((part) => part.kind === "points" && part.places.shape[1] === 3);
    find("drawCount").max = sample.count;
    state.drawCount = Math.min(state.drawCount, Math.max(1, Math.floor(sample.count / 2)));
    find("drawCount").value = state.drawCount;
  }

  function fill(id, entries) {
    find(id).replaceChildren(...entries.map(([value, text]) => element("option", { value, text })));
    find(id).closest("label").hidden = entries.length < 2;
    find(id).addEventListener("change", () => set({ [id]: ["field", "quantity"].includes(id) ? find(id).value : Number(find(id).value) }));
  }

  function check(box, id, value, text, act) {
    const input = element("input", { type: "checkbox", id, value });
    input.addEventListener("change", () => act(input.checked));
    find(box).append(element("label", {}, input, text));
  }

  function start() {
    const layers = page.layers.length, heads = page.heads.length;
    find("title").textContent = page.title;
    find("about").textContent = `${page.modality[0].toUpperCase() + page.modality.slice(1)} · mode ${page.samples[0].mode} · ${page.totalLayers} layers of ${page.totalHeads} heads, d_h = ${page.headSize} · ${page.samples.map((sample) => sample.count).join(", ")} positions`;
    const left = layers < page.totalLayers || heads < page.totalHeads ? ` Of ${page.totalLayers} layers and ${page.totalHeads} heads it holds ${layers} and ${heads}, to stay small.` : "";
    find("notes").textContent = `This page computes κ in your browser from the model's own weights and features, in ${page.precision === "float16" ? "half" : "single"} precision.${left} It loads nothing from elsewhere.`;
    fill("sample", page.samples.map((sample, k) => [k, `${k + 1} of ${page.samples.length}`]));
    fill("layer", page.layers.map((layer, k) => [k, `${layer.number + 1} of ${page.totalLayers}`]));
    fill("head", page.heads.map((head, k) => [k, `${head + 1} of ${page.totalHeads}`]));
    fill("field", page.fields.map((field) => [field.name, field.title]));
    const hasGradients = page.samples.every((sample) => sample.predictions);
    fill("quantity", QUANTITIES.filter((one) => one.id !== "prediction" || hasGradients).map((one) => [one.id, one.name]));
    for (const id of ["row", "column"]) {
      find(id).max = page.headSize - 1;
      find(id).addEventListener("change", () => set({ [id]: Math.min(Math.max(Number(find(id).value) | 0, 0), page.headSize - 1) }));
    }
    for (const name of page.groups) {
      check("switches", null, name, GROUP_NAMES[name], (isOn) => {
        const off = new Set(state.off);
        if (isOn) off.delete(name);
        else off.add(name);
        set({ off });
      });
    }
    check("freezes", "freezeX", "x", "freeze u(x)", (isOn) => set({ freezeX: isOn }));
    check("freezes", "freezeY", "y", "freeze u(y)", (isOn) => set({ freezeY: isOn }));
    find("query").addEventListener("input", () => set({ query: Number(find("query").value) }));
    find("drawCount").addEventListener("change", () => set({ drawCount: Math.max(1, Number(find("drawCount").value) | 0) }));
    find("drawAgain").addEventListener("click", () => set({ seed: state.seed + 1 }));
    find("view").addEventListener("keydown", (event) => view.key(event, state.query));
    find("modesHint").textContent = `Contributions along the model's output, on its scale. Errors are those of the output of this head at this query, relative to the model's. Near keys are ${page.nearName}.`;
    find("drawBox").hidden = !page.modes.some((mode) => mode.terms.some((term) => term.weights === "samples"));
    openSample();
    const text = page.samples[0].parts.find((part) => part.kind === "tokens");
    set({ query: page.isCausal ? signal().count - 1 : text ? text.start : Math.floor(signal().count / 2) });
    theme.addEventListener("change", () => set({}));
    let width = window.innerWidth;
    window.addEventListener("resize", () => {
      if (window.innerWidth !== width) set({});
      width = window.innerWidth;
    });
  }

  start();
  return { page, state, set, evaluate, integrate, modelMode, fields, shown: () => shown };
})();
