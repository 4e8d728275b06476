// SPDX-License-Identifier: Apache-2.0
// Colours and canvases. Both scales can be told apart with any kind of colour vision, and in print without colour.
"use strict";

// Cividis (Nunez, Anderton and Renslow 2018) from small to large; purple to orange for values with a sign.
const SEQUENTIAL = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"];
const SIGNED = {
  light: ["#2d004b", "#542788", "#8073ac", "#b2abd2", "#d8daeb", "#f4f4f2", "#fee0b6", "#fdb863", "#e08214", "#b35806", "#7f3b08"],
  dark: ["#d3c7ff", "#a995ee", "#8069c6", "#5c4a94", "#3b3358", "#24262b", "#4d3a22", "#80581f", "#b97920", "#eaa03c", "#ffd08a"],
};

const theme = window.matchMedia("(prefers-color-scheme: dark)");

function mix(stops, t) {
  const place = Math.min(Math.max(t, 0), 1) * (stops.length - 1), k = Math.min(Math.floor(place), stops.length - 2);
  const channel = (text, c) => parseInt(text.slice(1 + 2 * c, 3 + 2 * c), 16);
  const parts = [0, 1, 2].map((c) => Math.round(channel(stops[k], c) * (k + 1 - place) + channel(stops[k + 1], c) * (place - k)));
  return `rgb(${parts.join()})`;
}

const tables = new Map();  // 256 colours of a scale

function table(isSigned) {
  const name = isSigned ? (theme.matches ? "dark" : "light") : "sequential";
  if (!tables.has(name)) {
    const stops = isSigned ? SIGNED[name] : SEQUENTIAL;
    tables.set(name, Array.from({ length: 256 }, (_, k) => mix(stops, k / 255)));
  }
  return tables.get(name);
}

/** The scale of some values [n], null or NaN where there is none: its ends, and colour(value). */
function colourScale(values, isSigned) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (!Number.isFinite(value)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low > high) [low, high] = [0, 1];
  if (isSigned) {
    high = Math.max(Math.abs(low), Math.abs(high)) || 1;
    low = -high;
  }
  const colours = table(isSigned), span = high - low || 1;
  const colour = (value) => (Number.isFinite(value) ? colours[Math.round((255 * (value - low)) / span)] : null);
  return { low, high, isSigned, colour, colours };
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** A context whose unit is a CSS pixel, for the width that the canvas has on the page. */
function prepare(canvas, height) {
  const ratio = window.devicePixelRatio || 1, width = Math.max(40, Math.round(canvas.clientWidth || 300));
  const tall = Math.round(typeof height === "function" ? height(width) : height);
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(tall * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(tall * ratio);
    canvas.style.height = tall + "px";
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, tall);
  context.font = "12px system-ui, sans-serif";
  return { context, width, height: tall };
}

/** A number as people read it. */
function plain(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(2);
  return String(Number(value.toPrecision(3)));
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.textContent = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

/** The bar of a scale with its ends and what the values are. */
function drawLegend(box, scale, name) {
  const middle = scale.isSigned ? 0 : (scale.low + scale.high) / 2;
  const stops = Array.from({ length: 11 }, (_, k) => scale.colours[Math.round(25.5 * k)]);
  const bar = element("div", { class: "bar", style: `background: linear-gradient(90deg, ${stops.join()})` });
  const ends = [scale.low, middle, scale.high].map((value) => element("span", { text: plain(value) }));
  box.replaceChildren(element("span", { class: "name", text: name }), bar, element("div", { class: "ends" }, ...ends));
}
