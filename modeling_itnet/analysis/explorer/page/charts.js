// SPDX-License-Identifier: Apache-2.0
// The small charts beside the map: values against distance and direction, bars, and maps of rows and columns.
"use strict";

/** Value against distance: every key a dot, and the mean of equal bins of distance. Returns what it shows in words. */
function drawDistances(canvas, distances, values, scale, name) {
  const { context, width, height } = prepare(canvas, 190), left = 46, bottom = height - 30, top = 10, right = width - 10;
  const seen = values.map((value, j) => [distances[j], value]).filter((pair) => Number.isFinite(pair[1]));
  if (!seen.length) return "No key is seen.";
  const far = Math.max(...seen.map((pair) => pair[0])) || 1, span = scale.high - scale.low || 1;
  const x = (d) => left + ((right - left) * d) / far, y = (v) => bottom - ((bottom - top) * (v - scale.low)) / span;
  axes(context, { left, right, top, bottom }, ["0", plain(far)], [plain(scale.low), plain(scale.high)], "distance |x − y|");
  context.globalAlpha = 0.7;
  for (const [distance, value] of seen) {
    context.fillStyle = scale.colour(value);
    context.beginPath();
    context.arc(x(distance), y(value), 3, 0, 7);
    context.fill();
    context.strokeStyle = css("--muted");
    context.lineWidth = 0.5;
    context.stroke();
  }
  context.globalAlpha = 1;
  const bins = means(seen.map(([distance, value]) => [Math.min(7, Math.floor((8 * distance) / far)), value]), 8);
  context.strokeStyle = css("--text");
  context.lineWidth = 2;
  context.beginPath();
  bins.forEach((mean, k) => mean !== null && context.lineTo(x(((k + 0.5) * far) / 8), y(mean)));
  context.stroke();
  const known = bins.filter((mean) => mean !== null);
  return `Mean ${name}: ${plain(known[0])} at the nearest keys, ${plain(known.at(-1))} at the farthest, ${plain(far)} away.`;
}

/** Means of the values of each bin, null for an empty one. */
function means(pairs, count) {
  const sums = new Float64Array(count), sizes = new Float64Array(count);
  for (const [bin, value] of pairs) {
    sums[bin] += value;
    sizes[bin] += 1;
  }
  return Array.from(sums, (sum, k) => (sizes[k] ? sum / sizes[k] : null));
}

function axes(context, { left, right, top, bottom }, across, up, name) {
  context.strokeStyle = context.fillStyle = css("--muted");
  context.lineWidth = 1;
  context.strokeRect(left, top, right - left, bottom - top);
  context.textBaseline = "top";
  context.textAlign = "left";
  context.fillText(across[0], left, bottom + 4);
  context.textAlign = "right";
  context.fillText(across[1], right, bottom + 4);
  context.textAlign = "center";
  context.fillText(name, (left + right) / 2, bottom + 14);
  context.textAlign = "right";
  context.textBaseline = "alphabetic";
  context.fillText(up[0], left - 4, bottom);
  context.fillText(up[1], left - 4, top + 10);
}

const COMPASS = ["→ right", "↘ right, down", "↓ down", "↙ left, down", "← left", "↖ left, up", "↑ up", "↗ right, up"];  // rows of an image count downwards

/** Names of the directions from a query to its keys, and direction(step) -> its number, or null at the query itself. */
function directions(size, isImage) {
  if (size === 1) return { names: ["before", "after"], find: (v) => (v[0] === 0 ? null : v[0] > 0 ? 1 : 0) };
  if (size === 2) {
    const names = isImage ? COMPASS : ["+x", "+x −y", "−y", "−x −y", "−x", "−x +y", "+y", "+x +y"];
    const find = (v) => {
      if (v[0] === 0 && v[1] === 0) return null;
      const angle = isImage ? Math.atan2(v[0], v[1]) : Math.atan2(-v[1], v[0]);
      return ((Math.round((4 * angle) / Math.PI) % 8) + 8) % 8;
    };
    return { names, find };
  }
  const axis = (k) => (size === 3 ? "xyz"[k] : `axis ${k + 1}`);
  const names = Array.from({ length: 2 * size }, (_, k) => `${k % 2 ? "−" : "+"}${axis(k >> 1)}`);
  const find = (v) => {
    let best = 0;
    for (let k = 1; k < size; k++) if (Math.abs(v[k]) > Math.abs(v[best])) best = k;
    return v[best] === 0 ? null : 2 * best + (v[best] < 0 ? 1 : 0);
  };
  return { names, find };
}

/** Rows of a name, a bar and a figure. Entries are {name, value, text}; bars end at the largest absolute value. */
function drawBars(box, entries, scale) {
  const largest = Math.max(...entries.map((entry) => Math.abs(entry.value ?? 0)), 1e-30);
  box.replaceChildren(
    ...entries.map(({ name, value, text, hint }) => {
      const share = value === null ? 0 : (100 * Math.abs(value)) / largest;
      const colour = scale && value !== null ? scale.colour(value) : null;
      const bar = element("span", { class: "fill", style: `width: ${share}%;` + (colour ? `background: ${colour}` : "") });
      return element("li", { title: hint || null }, element("span", { class: "what", text: name }),
        element("span", { class: "track", "aria-hidden": "true" }, bar), element("span", { class: "figure", text: text ?? plain(value) }));
    }),
  );
}

/** A map of rows and columns [rows * columns]; marked is a column with a frame. */
function drawMatrix(canvas, values, rows, columns, scale, names, marked) {
  const left = names.rows ? 62 : 4, { context, width, height } = prepare(canvas, rows * (rows > 12 ? 10 : 18) + 22);
  const w = (width - left - 4) / columns, h = (height - 22) / rows;
  for (let r = 0; r < rows; r++) {
    for (let c = 0; c < columns; c++) {
      const colour = scale.colour(values[r * columns + c]);
      if (!colour) continue;
      context.fillStyle = colour;
      context.fillRect(left + c * w, r * h, Math.max(w - 0.4, 0.8), Math.max(h - 0.6, 0.8));
    }
  }
  context.fillStyle = css("--muted");
  context.textBaseline = "middle";
  if (names.rows) names.rows.forEach((name, r) => (rows <= 12 || r % 4 === 0) && context.fillText(name, 0, (r + 0.5) * h));
  context.textBaseline = "bottom";
  context.fillText(names.columns, left, height - 2);
  if (marked >= 0) ring(context, (line) => context.strokeRect(left + marked * w + line, line, Math.max(w - 2 * line, 2), height - 22 - 2 * line));
}

/** A curve of values [n] from left to right. */
function drawCurve(canvas, values, name, marked) {
  const { context, width, height } = prepare(canvas, 130), left = 46, right = width - 10, top = 10, bottom = height - 30;
  const high = Math.max(...values, 1e-30), x = (k) => left + ((right - left) * k) / Math.max(values.length - 1, 1);
  axes(context, { left, right, top, bottom }, ["first token", `token ${values.length}`], ["0", plain(high)], name);
  context.strokeStyle = css("--accent");
  context.lineWidth = 2;
  context.beginPath();
  values.forEach((value, k) => context.lineTo(x(k), bottom - ((bottom - top) * value) / high));
  context.stroke();
  if (marked >= 0) {
    context.fillStyle = css("--accent");
    context.beginPath();
    context.arc(x(marked), bottom - ((bottom - top) * values[marked]) / high, 4, 0, 7);
    context.fill();
  }
}
