// SPDX-License-Identifier: Apache-2.0
// A sample as its reader sees it: grids of patches, tokens, points. Each part draws the input and the map, and moves the query.
"use strict";

class SampleView {
  /** Builds the parts of a sample inside of a box; move(i) is called when the reader moves the query. */
  constructor(box, sample, read, move) {
    this.move = move;
    this.parts = sample.parts.map((part) => new PARTS[part.kind](part, read, (i) => move(i)));
    box.replaceChildren(...this.parts.map((part) => part.box));
  }

  draw(values, scale, query) {
    for (const part of this.parts) part.draw(values, scale, query);
  }

  partOf(i) {
    return this.parts.find((part) => i >= part.start && i < part.start + part.count);
  }

  /** What position i is called. */
  name(i) {
    return this.partOf(i).name(i);
  }

  /** The map alone, small: for a row of heads or modes. */
  drawSmall(canvas, values, scale, query) {
    const part = this.parts.reduce((a, b) => (b.count > a.count ? b : a));
    part.drawSmall(canvas, values, scale, query);
  }

  key(event, query) {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    const last = this.parts.at(-1).start + this.parts.at(-1).count - 1;
    let next = null;
    if (event.key === "Home") next = 0;
    else if (event.key === "End") next = last;
    else if (event.key === "PageUp" || event.key === "PageDown") next = query + (event.key === "PageUp" ? -1 : 1);
    else if (step) next = this.partOf(query).step(query, ...step, event.shiftKey);
    if (next === null || next === undefined) return;
    event.preventDefault();
    this.move(Math.min(Math.max(next, 0), last));
  }
}

class Part {
  constructor(part, read, move) {
    Object.assign(this, { start: part.start, count: part.count, labels: part.labels, move });
  }

  own(values) {
    return values.subarray ? values.subarray(this.start, this.start + this.count) : values.slice(this.start, this.start + this.count);
  }

  name(i) {
    return `“${this.labels[i - this.start]}”`;
  }

  step(query, across, down) {
    return query + (across || down);
  }

  /** A canvas under a title, on which the pointer does something while it is down. */
  canvas(title, label, act) {
    const canvas = element("canvas", { tabindex: "0", role: "img", "aria-label": label, class: "field" });
    let isDown = false;
    canvas.addEventListener("pointerdown", (event) => {
      isDown = true;
      canvas.setPointerCapture(event.pointerId);
      act(event, canvas, true);
    });
    canvas.addEventListener("pointermove", (event) => isDown && act(event, canvas, false));
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => (isDown = false));
    return { canvas, box: element("div", { class: "pane" }, element("h3", { text: title }), canvas) };
  }
}

/** Patches of a picture. */
class GridPart extends Part {
  constructor(part, read, move) {
    super(part, read, move);
    Object.assign(this, { rows: part.rows, columns: part.columns });
    const size = `${part.rows} × ${part.columns} patches`;
    const act = (event, canvas) => {
      const box = canvas.getBoundingClientRect();
      const row = Math.floor(((event.clientY - box.top) / box.height) * this.rows);
      const column = Math.floor(((event.clientX - box.left) / box.width) * this.columns);
      if (row >= 0 && row < this.rows && column >= 0 && column < this.columns) move(this.start + row * this.columns + column);
    };
    this.input = this.canvas("Input; drag the query", `The picture, ${size}; the query is framed`, act);
    this.map = this.canvas("Map over the keys", `Map over ${size}`, act);
    this.box = element("div", { class: "panes" }, this.input.box, this.map.box);
    if (part.picture) {
      this.picture = new Image();
      this.picture.onload = () => this.last && this.draw(...this.last);
      this.picture.src = part.picture;
    }
  }

  name(i) {
    const k = i - this.start;
    return `patch (${Math.floor(k / this.columns)}, ${k % this.columns})`;
  }

  step(query, across, down) {
    const k = query - this.start, row = Math.floor(k / this.columns) + down, column = (k % this.columns) + across;
    if (row < 0 || column < 0 || column >= this.columns) return row < 0 && this.start > 0 ? this.start - 1 : query;
    return row >= this.rows ? this.start + this.count : this.start + row * this.columns + column;
  }

  height(width) {
    return (width * this.rows) / this.columns;
  }

  draw(values, scale, query) {
    this.last = [values, scale, query];
    const { context, width, height } = prepare(this.input.canvas, (w) => this.height(w));
    context.imageSmoothingEnabled = false;
    if (this.picture?.complete && this.picture.naturalWidth) context.drawImage(this.picture, 0, 0, width, height);
    this.frame(context, width, height, query);
    this.fill(this.map.canvas, values, scale, query, (w) => this.height(w));
  }

  fill(canvas, values, scale, query, tall) {
    const { context, width, height } = prepare(canvas, tall), own = this.own(values);
    for (let k = 0; k < this.count; k++) {
      const colour = scale.colour(own[k]), row = Math.floor(k / this.columns), column = k % this.columns;
      if (!colour) continue;
      const left = Math.floor((column * width) / this.columns), top = Math.floor((row * height) / this.rows);
      context.fillStyle = colour;
      context.fillRect(left, top, Math.ceil(width / this.columns) + 1, Math.ceil(height / this.rows) + 1);
    }
    this.frame(context, width, height, query);
  }

  frame(context, width, height, query) {
    const k = query - this.start;
    if (k < 0 || k >= this.count) return;
    const w = width / this.columns, h = height / this.rows;
    ring(context, (line) => context.strokeRect((k % this.columns) * w + line, Math.floor(k / this.columns) * h + line, w - 2 * line, h - 2 * line));
  }

  drawSmall(canvas, values, scale, query) {
    this.fill(canvas, values, scale, query, (w) => this.height(w));
  }
}

/** A frame in two colours, which shows on any ground. */
function ring(context, stroke) {
  context.lineWidth = 4;
  context.strokeStyle = "#000";
  stroke(1);
  context.lineWidth = 2;
  context.strokeStyle = "#00d0ff";
  stroke(1);
}

/** Tokens of a text, or a single position such as [CLS]: buttons on the colour of their value. */
class TokensPart extends Part {
  constructor(part, read, move) {
    super(part, read, move);
    this.box = element("div", { class: "tokens" });
    this.buttons = this.labels.map((label, k) => {
      const button = element("button", { type: "button", class: "token", tabindex: "-1", text: label });
      button.addEventListener("pointerenter", (event) => event.buttons && move(this.start + k));
      button.addEventListener("pointerdown", (event) => {
        if (button.hasPointerCapture?.(event.pointerId)) button.releasePointerCapture(event.pointerId);
        move(this.start + k);
      });
      button.addEventListener("focus", () => move(this.start + k));
      return button;
    });
    this.box.append(...this.buttons);
  }

  draw(values, scale, query) {
    const own = this.own(values);
    this.buttons.forEach((button, k) => {
      const colour = scale.colour(own[k]), isQuery = this.start + k === query;
      button.style.background = colour || "transparent";
      button.style.color = colour ? readableOn(colour) : "";
      button.classList.toggle("unseen", !colour);
      button.tabIndex = isQuery ? 0 : -1;
      button.setAttribute("aria-pressed", isQuery);
      button.setAttribute("aria-label", `${this.labels[k]}: ${colour ? plain(own[k]) : "not seen"}`);
      button.title = colour ? `${this.labels[k]}: ${plain(own[k])}` : `${this.labels[k]}: not seen`;
    });
  }

  drawSmall(canvas, values, scale, query) {
    const { context, width, height } = prepare(canvas, 40), own = this.own(values), step = width / this.count;
    for (let k = 0; k < this.count; k++) {
      const colour = scale.colour(own[k]);
      if (!colour) continue;
      context.fillStyle = colour;
      context.fillRect(k * step, 0, Math.max(step - 0.5, 1), height);
    }
    const k = query - this.start;
    if (k >= 0 && k < this.count) ring(context, (line) => context.strokeRect(k * step + line, line, Math.max(step - 2 * line, 2), height - 2 * line));
  }
}

function readableOn(colour) {
  const [r, g, b] = colour.match(/\d+/g).map(Number);
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#111" : "#fff";
}

/** Points in one, two or three dimensions; nodes of a graph with their edges. */
class PointsPart extends Part {
  constructor(part, read, move) {
    super(part, read, move);
    const places = read(part.places), size = part.places.shape[1];
    Object.assign(this, { size, edges: part.edges, yaw: 0.6, pitch: 0.35 });
    this.shade = part.shade ? read(part.shade) : null;
    this.places = centred(places, this.count, size);
    const shape = part.edges.length ? `${this.count} nodes and ${part.edges.length} edges` : `${this.count} points`;
    const input = part.shade_name ? `Input (${part.shade_name}); drag the query` : "Input; drag the query";
    this.input = this.canvas(input, `${shape}; the query is ringed`, (event, canvas) => this.pick(event, canvas));
    const title = size === 3 ? "Map over the keys; drag to turn" : "Map over the keys";
    this.map = this.canvas(title, `Map over ${shape}`, (event, canvas, isFirst) => {
      if (size === 3) this.turn(event, isFirst);
      else this.pick(event, canvas);
    });
    this.map.canvas.addEventListener("dblclick", (event) => this.pick(event, this.map.canvas));
    this.box = element("div", { class: "panes" }, this.input.box, this.map.box);
  }

  name(i) {
    return `${this.edges.length ? "node" : "point"} ${i - this.start}`;
  }

  turn(event, isFirst) {
    if (!isFirst) {
      this.yaw += (event.clientX - this.from[0]) / 120;
      this.pitch = Math.max(-1.5, Math.min(1.5, this.pitch + (event.clientY - this.from[1]) / 120));
      if (this.last) this.draw(...this.last);
    }
    this.from = [event.clientX, event.clientY];
  }

  /** Where points are on a canvas: x and y in pixels, and depth, larger in front. */
  project(width, height) {
    const n = this.count, out = { x: new Float32Array(n), y: new Float32Array(n), depth: new Float32Array(n) };
    const cy = Math.cos(this.yaw), sy = Math.sin(this.yaw), cp = Math.cos(this.pitch), sp = Math.sin(this.pitch);
    const reach = this.size === 3 ? 0.5 * Math.min(width, height) - 8 : 1;
    for (let k = 0; k < n; k++) {
      const a = this.places[k * 3], b = this.places[k * 3 + 1], c = this.places[k * 3 + 2];
      if (this.size === 3) {
        const forward = -a * sy + b * cy;
        out.x[k] = width / 2 + reach * (a * cy + b * sy);
        out.y[k] = height / 2 - reach * (c * cp - forward * sp);
        out.depth[k] = -(forward * cp + c * sp);
      } else {
        out.x[k] = width / 2 + a * (width / 2 - 14);
        out.y[k] = this.size === 1 ? height / 2 - this.level(k) * (height / 2 - 14) : height / 2 - b * (height / 2 - 14);
      }
    }
    return out;
  }

  /** Height of a point on a line: its input, from -1 to 1. */
  level(k) {
    if (!this.shade) return 0;
    if (!this._levels) this._levels = centred(this.shade, this.count, 1);
    return this._levels[k * 3];
  }

  pick(event, canvas) {
    const box = canvas.getBoundingClientRect(), seen = this.project(box.width, box.height);
    const x = event.clientX - box.left, y = event.clientY - box.top;
    let best = 0, least = Infinity;
    for (let k = 0; k < this.count; k++) {
      const across = seen.x[k] - x, down = this.size === 1 ? 0 : seen.y[k] - y;
      const far = across * across + down * down - 9 * seen.depth[k];
      if (far < least) [best, least] = [k, far];
    }
    this.move(this.start + best);
  }

  step(query, across, down, turns) {
    if (turns && this.size === 3) {
      this.yaw += across / 8;
      this.pitch = Math.max(-1.5, Math.min(1.5, this.pitch + down / 8));
      if (this.last) this.draw(...this.last);
      return query;
    }
    const seen = this.project(400, 400), k = query - this.start;
    let best = k, least = Infinity;  // the closest point in that direction
    for (let j = 0; j < this.count; j++) {
      const x = seen.x[j] - seen.x[k], y = this.size === 1 ? 0 : seen.y[j] - seen.y[k];
      const ahead = x * across + (this.size === 1 ? x * down : y * down), aside = Math.abs(x * down) + Math.abs(y * across);
      const far = ahead + 2 * (this.size === 1 ? 0 : aside);
      if (ahead > 1e-3 && far < least) [best, least] = [j, far];
    }
    return this.start + best;
  }

  height(width) {
    return this.size === 1 ? Math.min(160, width / 2) : Math.min(width, 420);
  }

  draw(values, scale, query) {
    this.last = [values, scale, query];
    const shades = this.shade ? colourScale(this.shade, false) : null;
    this.scatter(this.input.canvas, (k) => (shades ? shades.colour(this.shade[k]) : null), query, (w) => this.height(w));
    const own = this.own(values);
    this.scatter(this.map.canvas, (k) => scale.colour(own[k]), query, (w) => this.height(w));
  }

  scatter(canvas, colour, query, tall) {
    const { context, width, height } = prepare(canvas, tall), seen = this.project(width, height);
    const radius = Math.max(2, Math.min(9, (0.3 * Math.min(width, height)) / Math.sqrt(this.count))), muted = css("--muted");
    context.strokeStyle = muted;
    context.lineWidth = 1;
    for (const [i, j] of this.edges) {
      context.beginPath();
      context.moveTo(seen.x[i], seen.y[i]);
      context.lineTo(seen.x[j], seen.y[j]);
      context.stroke();
    }
    const order = Array.from({ length: this.count }, (_, k) => k);
    if (this.size === 3) order.sort((a, b) => seen.depth[a] - seen.depth[b]);
    for (const k of order) {
      const filled = colour(k);
      context.globalAlpha = filled ? 1 : 0.45;
      context.fillStyle = filled || muted;
      context.beginPath();
      context.arc(seen.x[k], seen.y[k], filled ? radius : 0.7 * radius, 0, 7);
      context.fill();
    }
    context.globalAlpha = 1;
    const k = query - this.start;
    if (k < 0 || k >= this.count) return;
    ring(context, () => {
      context.beginPath();
      context.arc(seen.x[k], seen.y[k], radius + 4, 0, 7);
      context.stroke();
    });
  }

  drawSmall(canvas, values, scale, query) {
    const own = this.own(values);
    this.scatter(canvas, (k) => scale.colour(own[k]), query, (w) => (this.size === 1 ? 50 : w));
  }
}

/** Places [n, 3] from -1 to 1, lengths as they are in three dimensions, each axis by itself in fewer. */
function centred(places, count, size) {
  const out = new Float32Array(count * 3), low = [], high = [];
  for (let c = 0; c < size; c++) {
    low.push(Infinity);
    high.push(-Infinity);
    for (let k = 0; k < count; k++) {
      low[c] = Math.min(low[c], places[k * size + c]);
      high[c] = Math.max(high[c], places[k * size + c]);
    }
  }
  const middles = low.map((value, c) => (value + high[c]) / 2), spans = low.map((value, c) => (high[c] - value) / 2 || 1);
  const widest = size === 3 ? Math.hypot(...spans) : null;
  for (let k = 0; k < count; k++) {
    for (let c = 0; c < size; c++) out[k * 3 + c] = (places[k * size + c] - middles[c]) / (widest || spans[c]);
  }
  return out;
}

const PARTS = { grid: GridPart, tokens: TokensPart, single: TokensPart, points: PointsPart };
