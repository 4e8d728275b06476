// SPDX-License-Identifier: Apache-2.0
// Arrays of numbers: decoding those of the page, and the few operations on them that kernels need.
"use strict";

/** The page's bytes as arrays: read({offset, shape, type}) -> Float32Array, Int32Array, or bits in a Uint8Array. */
function openNumbers(base64) {
  const text = atob(base64.trim());
  const bytes = new Uint8Array(text.length);
  for (let k = 0; k < text.length; k++) bytes[k] = text.charCodeAt(k);
  const kept = new Map();
  return (place) => {
    const key = `${place.offset} ${place.shape}`;  // an empty array begins where the next one does
    if (!kept.has(key)) kept.set(key, read(place));
    return kept.get(key);
  };

  function read(place) {
    const count = place.shape.reduce((a, b) => a * b, 1);
    if (place.type === "float32") return new Float32Array(bytes.buffer, place.offset, count);
    if (place.type === "int32") return new Int32Array(bytes.buffer, place.offset, count);
    if (place.type === "float16") return fromHalf(new Uint16Array(bytes.buffer, place.offset, count));
    const rows = place.shape.slice(0, -1).reduce((a, b) => a * b, 1);
    return new Uint8Array(bytes.buffer, place.offset, rows * Math.ceil(place.shape.at(-1) / 8));
  }
}

function fromHalf(halves) {
  const out = new Float32Array(halves.length);
  for (let k = 0; k < halves.length; k++) {
    const sign = halves[k] & 0x8000 ? -1 : 1, exponent = (halves[k] >> 10) & 31, fraction = halves[k] & 1023;
    if (exponent === 0) out[k] = sign * fraction * 2 ** -24;
    else if (exponent === 31) out[k] = fraction ? NaN : sign * Infinity;
    else out[k] = sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
  }
  return out;
}

/** erf by Abramowitz and Stegun 7.1.26: the absolute error is below 1.5e-7. */
function erf(x) {
  const a = Math.abs(x), t = 1 / (1 + 0.3275911 * a);
  const p = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t;
  const value = 1 - p * Math.exp(-a * a);
  return x < 0 ? -value : value;
}

/** GELU by its definition, x P(Z <= x), in place. */
function gelu(values) {
  for (let k = 0; k < values.length; k++) {
    const x = values[k];
    values[k] = x > 6 ? x : x < -6 ? 0 : 0.5 * x * (1 + erf(x * Math.SQRT1_2));
  }
  return values;
}

/** A [n, p] times B [m, p] transposed, plus bias [m] if there is one: [n, m]. Four columns at a time. */
function product(A, B, n, m, p, bias) {
  const out = new Float32Array(n * m);
  for (let i = 0; i < n; i++) {
    const a = i * p;
    let k = 0;
    for (; k + 3 < m; k += 4) {
      let s0 = 0, s1 = 0, s2 = 0, s3 = 0;
      const b0 = k * p, b1 = b0 + p, b2 = b1 + p, b3 = b2 + p;
      for (let c = 0; c < p; c++) {
        const x = A[a + c];
        s0 += x * B[b0 + c]; s1 += x * B[b1 + c]; s2 += x * B[b2 + c]; s3 += x * B[b3 + c];
      }
      const o = i * m + k;
      out[o] = s0; out[o + 1] = s1; out[o + 2] = s2; out[o + 3] = s3;
    }
    for (; k < m; k++) {
      let s = 0;
      for (let c = 0; c < p; c++) s += A[a + c] * B[k * p + c];
      out[i * m + k] = s;
    }
    if (bias) for (k = 0; k < m; k++) out[i * m + k] += bias[k];
  }
  return out;
}

function dot(A, a, B, b, count) {
  let sum = 0;
  for (let k = 0; k < count; k++) sum += A[a + k] * B[b + k];
  return sum;
}

function length(values) {
  return Math.sqrt(dot(values, 0, values, 0, values.length));
}

/** gamma(x) = [sin(2 pi B x); cos(2 pi B x)] of positions [n, s], or the positions themselves without frequencies. */
function fourierFeatures(positions, frequencies, n, s) {
  const L = frequencies.length / s;
  if (L === 0) return Float32Array.from(positions);
  const out = new Float32Array(n * 2 * L);
  for (let i = 0; i < n; i++) {
    for (let l = 0; l < L; l++) {
      const angle = 2 * Math.PI * dot(positions, i * s, frequencies, l * s, s);
      out[i * 2 * L + l] = Math.sin(angle);
      out[i * 2 * L + L + l] = Math.cos(angle);
    }
  }
  return out;
}

/** Random numbers in [0, 1) that depend on the seed alone (mulberry32). */
function randomNumbers(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}
