// SPDX-License-Identifier: Apache-2.0
// Kernels of one layer and head at one query i, for all keys j. Every kernel here is a sum of matrices,
//     K_ij = sum_m c_ij[m] B_m,    c_ij [m] per key, the last of them a constant 1 whose matrix is the bias,
// so that norms, entries and products with u_j come from the coefficients, and no K_ij is ever formed.
"use strict";

/** What the kernel is given: all groups of inputs, u as it is. */
const EVERYTHING = { off: new Set(), freezeX: false, freezeY: false };

/** A sample of the page: positions, measure, and what all layers and heads share. */
class Signal {
  constructor(description, read, frequencies) {
    this.description = description;
    this.count = description.count;
    this.positions = read(description.positions);
    this.size = description.positions.shape[1];
    this.frequencies = read(frequencies);
    this.gamma = fourierFeatures(this.positions, this.frequencies, this.count, this.size);
    this.gammaSize = this.gamma.length / this.count;
    const measure = read(description.measure);
    const total = measure.reduce((a, b) => a + b, 0);
    this.measure = Float64Array.from(measure, (value) => value / total);
    this.nearPairs = read(description.nearPairs);
    this.nearScale = read(description.nearScale);
    this.anchors = description.anchors ? read(description.anchors) : null;
    this.anchorMeasure = description.anchors ? read(description.anchorMeasure) : null;
    this.neighbors = description.neighbors ? read(description.neighbors) : null;
  }

  isNear(i, j) {
    const bytes = Math.ceil(this.count / 8);
    return (this.nearPairs[i * bytes + (j >> 3)] >> (j & 7)) & 1;
  }

  distance(i, j) {
    let sum = 0;
    for (let k = 0; k < this.size; k++) {
      const step = this.positions[i * this.size + k] - this.positions[j * this.size + k];
      sum += step * step;
    }
    return Math.sqrt(sum);
  }

  /** omega_ij of query i: over all keys, the near ones, anchors, or keys drawn at random; 0 where i does not see j. */
  weights(kind, i, isCausal, drawn) {
    const n = this.count, out = new Float64Array(n), last = isCausal ? i : n - 1;
    const scale = kind === "near" ? this.nearScale[i] : 1;
    if (kind === "all") {
      let mass = 0;
      for (let j = 0; j <= last; j++) mass += this.measure[j];
      for (let j = 0; j <= last; j++) out[j] = this.measure[j] / mass;
    } else if (kind === "near") {
      for (let j = 0; j < n; j++) if (this.isNear(i, j)) out[j] = scale * this.measure[j];
    } else if (kind === "anchors") {
      const count = this.anchors.length / (isCausal ? n : 1), first = isCausal ? i * count : 0;
      for (let k = first; k < first + count; k++) out[this.anchors[k]] += this.anchorMeasure[k];
    } else {
      const all = this.weights("all", i, isCausal), random = randomNumbers(drawn.seed * 7919 + i);
      if (this.neighbors) all.set(this.measure);
      for (let m = 0; m < drawn.count; m++) {
        let rest = random(), j = 0;
        while (j < last && rest >= all[j]) rest -= all[j++];
        out[j] += 1 / drawn.count;
      }
    }
    if (this.neighbors) {  // a graph: lambda times the integral, plus the integral over the edges
      for (let j = 0; j < n; j++) out[j] *= this.description.edgeGate;
      const degree = this.neighbors.length / n;
      for (let k = i * degree; k < (i + 1) * degree; k++) {
        const j = this.neighbors[k];
        if (j >= 0) out[j] += scale * this.measure[j];
      }
    }
    return out;
  }

  /** The keys that query i sees through a kernel that is summed over "all" keys or the "near" ones. */
  visible(kind, i, isCausal) {
    return Array.from(this.weights(kind, i, isCausal), (weight) => weight > 0);
  }
}

/** What all kernels have in common: a head's features u [n, d_h], and their mean, which frozen features are. */
class Field {
  constructor(signal, features, headSize, isCausal) {
    Object.assign(this, { signal, u: features, size: headSize, isCausal, n: signal.count });
    this.mean = new Float32Array(headSize);
    for (let j = 0; j < this.n; j++) {
      for (let c = 0; c < headSize; c++) this.mean[c] += signal.measure[j] * features[j * headSize + c];
    }
  }

  query(i, options) {
    return options.freezeX ? this.mean : this.u.subarray(i * this.size, (i + 1) * this.size);
  }

  gammaOf(i) {
    return this.signal.gamma.subarray(i * this.signal.gammaSize, (i + 1) * this.signal.gammaSize);
  }

  /** Coefficients of a part of the kernel: "full"; "learned", without its bias; "variation", without its mean. */
  part(coefficients, name, weights) {
    if (name === "full") return coefficients;
    const { values, width } = coefficients, out = Float32Array.from(values), last = width - 1;
    const shift = new Float64Array(width);
    if (name === "variation") {
      const mass = weights.reduce((a, b) => a + b, 0) || 1;
      for (let j = 0; j < this.n; j++) {
        if (weights[j] === 0) continue;
        for (let m = 0; m < width; m++) shift[m] += (weights[j] / mass) * values[j * width + m];
      }
    }
    for (let j = 0; j < this.n; j++) {
      for (let m = 0; m < last; m++) out[j * width + m] -= shift[m];
      out[j * width + last] = 0;
    }
    return { ...coefficients, values: out };
  }
}

/** A kernel with the same matrices B_m [m, d_h, d_h] for all queries. */
class BasisField extends Field {
  get gram() {  // B_m . B_l [m, m]
    if (!this._gram) {
      const m = this.width, out = new Float64Array(m * m), length = this.size ** 2;
      for (let k = 0; k < m; k++) {
        for (let l = 0; l <= k; l++) {
          out[k * m + l] = out[l * m + k] = dot(this.basis, k * length, this.basis, l * length, length);
        }
      }
      this._gram = out;
    }
    return this._gram;
  }

  /** |K_ij| [n]: the square is c^T G c. */
  norms({ values, width }) {
    const out = new Float64Array(this.n), G = this.gram;
    for (let j = 0; j < this.n; j++) {
      let sum = 0;
      const first = j * width;
      for (let k = 0; k < width; k++) {
        const row = k * width;
        let s0 = 0, s1 = 0, l = 0;
        for (; l + 1 < k; l += 2) {
          s0 += G[row + l] * values[first + l];
          s1 += G[row + l + 1] * values[first + l + 1];
        }
        if (l < k) s0 += G[row + l] * values[first + l];
        const c = values[first + k];
        sum += c * (2 * (s0 + s1) + G[row + k] * c);
      }
      out[j] = Math.sqrt(Math.max(sum, 0));
    }
    return out;
  }

  /** K_ij[a, c] [n]. */
  entries({ values, width }, a, c) {
    const out = new Float64Array(this.n), length = this.size ** 2, place = a * this.size + c;
    for (let j = 0; j < this.n; j++) {
      for (let m = 0; m < width; m++) out[j] += values[j * width + m] * this.basis[m * length + place];
    }
    return out;
  }

  /** direction . K_ij u_j [n]. */
  along({ values, width }, direction) {
    const d = this.size, rows = new Float32Array(width * d);  // direction^T B_m
    for (let m = 0; m < width; m++) {
      for (let a = 0; a < d; a++) {
        const weight = direction[a], first = (m * d + a) * d;
        for (let c = 0; c < d; c++) rows[m * d + c] += weight * this.basis[first + c];
      }
    }
    const products = product(this.u, rows, this.n, width, d), out = new Float64Array(this.n);
    for (let j = 0; j < this.n; j++) out[j] = dot(products, j * width, values, j * width, width);
    return out;
  }

  /** |K_ij u_j| [n]. B_m u_j of all keys is kept: it is the same for all queries. */
  actions({ values, width }) {
    const d = this.size;
    if (!this._images) this._images = product(this.u, this.basis, this.n, width * d, d);  // [n, m, a]
    const out = new Float64Array(this.n), sum = new Float64Array(d);
    for (let j = 0; j < this.n; j++) {
      sum.fill(0);
      for (let m = 0; m < width; m++) {
        const weight = values[j * width + m], first = (j * width + m) * d;
        for (let a = 0; a < d; a++) sum[a] += weight * this._images[first + a];
      }
      out[j] = Math.sqrt(dot(sum, 0, sum, 0, d));
    }
    return out;
  }

  /** sum_j weights_j K_ij u_j [d_h], through the moments sum_j weights_j c_ij[m] u_j. */
  integral({ values, width }, weights) {
    const d = this.size, moments = new Float64Array(width * d), out = new Float64Array(d);
    for (let j = 0; j < this.n; j++) {
      if (weights[j] === 0) continue;
      for (let m = 0; m < width; m++) {
        const weight = weights[j] * values[j * width + m];
        for (let c = 0; c < d; c++) moments[m * d + c] += weight * this.u[j * d + c];
      }
    }
    for (let m = 0; m < width; m++) {
      for (let a = 0; a < d; a++) out[a] += dot(this.basis, (m * d + a) * d, moments, m * d, d);
    }
    return out;
  }

  /** |K_ij - K'_ij| [n], where K' is what the kernel becomes with other inputs. */
  changes(i, options) {
    const before = this.coefficients(i, EVERYTHING), after = this.coefficients(i, options);
    const values = before.values.map((value, k) => value - after.values[k]);
    return this.norms({ ...before, values });
  }
}

/** K_ij = W2 GELU(W1 z_ij + b1) + b2: coefficients are the hidden units. The first layer is taken apart by groups. */
class KernelField extends BasisField {
  constructor(signal, features, weights, inputs, headSize, isCausal) {
    super(signal, features, headSize, isCausal);
    Object.assign(this, weights);  // w1 [w, inputs], b1 [w], wMid, bMid, w2 [d_h^2, w], b2 [d_h^2]
    this.hidden = this.b1.length;
    this.width = this.hidden + 1;
    const length = headSize ** 2, g = signal.gammaSize;
    this.basis = new Float32Array(this.width * length);
    for (let e = 0; e < length; e++) {
      for (let m = 0; m < this.hidden; m++) this.basis[m * length + e] = this.w2[e * this.hidden + m];
    }
    this.basis.set(this.b2, this.hidden * length);
    const sizes = { x: g, y: g, "x-y": g, distance: 1, u_x: headSize, u_y: headSize, "u_x*u_y": headSize };
    const total = this.w1.length / this.hidden;
    this.groups = {};
    let first = 0;
    for (const name of inputs) {
      const columns = new Float32Array(this.hidden * sizes[name]);
      for (let k = 0; k < this.hidden; k++) {
        columns.set(this.w1.subarray(k * total + first, k * total + first + sizes[name]), k * sizes[name]);
      }
      this.groups[name] = columns;
      first += sizes[name];
    }
  }

  coefficients(i, options) {
    const w = this.hidden, d = this.size, n = this.n, use = (name) => (options.off.has(name) ? null : this.groups[name]);
    const x = this.query(i, options), row = Float32Array.from(this.b1);
    for (let k = 0; k < w; k++) {
      if (use("x")) row[k] += dot(use("x"), k * this.signal.gammaSize, this.gammaOf(i), 0, this.signal.gammaSize);
      if (use("u_x")) row[k] += dot(use("u_x"), k * d, x, 0, d);
    }
    const virtual = new Float32Array(w * d), key = use("u_y"), both = use("u_x*u_y");
    for (let k = 0; k < w; k++) {
      for (let c = 0; c < d; c++) virtual[k * d + c] = (key ? key[k * d + c] : 0) + (both ? both[k * d + c] * x[c] : 0);
    }
    let pre;
    if (options.freezeY || !(key || both)) {
      const constant = product(this.mean, virtual, 1, w, d, row);
      pre = new Float32Array(n * w);
      for (let j = 0; j < n; j++) pre.set(constant, j * w);
    } else pre = product(this.u, virtual, n, w, d, row);
    const position = this.positionTerm(i, use("y"), use("x-y"), use("distance"));
    if (position) for (let k = 0; k < pre.length; k++) pre[k] += position[k];
    let units = gelu(pre);
    if (this.wMid) units = gelu(product(units, this.wMid, n, w, w, this.bMid));
    const values = new Float32Array(n * this.width);
    for (let j = 0; j < n; j++) {
      values.set(units.subarray(j * w, (j + 1) * w), j * this.width);
      values[j * this.width + w] = 1;
    }
    return { values, width: this.width };
  }

  /** P_ij [n, w]. sin and cos of x_i - x_j are bilinear in gamma(x_i) and gamma(x_j): one product for all keys. */
  positionTerm(i, y, relative, distance) {
    if (!(y || relative || distance)) return null;
    const signal = this.signal, w = this.hidden, g = signal.gammaSize, n = this.n, L = signal.frequencies.length / signal.size;
    const factors = y ? Float32Array.from(y) : new Float32Array(w * g), gamma = this.gammaOf(i);
    if (relative && L > 0) {
      for (let k = 0; k < w; k++) {
        for (let l = 0; l < L; l++) {
          const sine = gamma[l], cosine = gamma[L + l], a = relative[k * g + l], b = relative[k * g + L + l];
          factors[k * g + l] += b * sine - a * cosine;
          factors[k * g + L + l] += a * sine + b * cosine;
        }
      }
    }
    const out = y || (relative && L > 0) ? product(signal.gamma, factors, n, w, g) : new Float32Array(n * w);
    for (let j = 0; j < n; j++) {
      const length = distance ? signal.distance(i, j) : 0;
      for (let k = 0; k < w; k++) {
        if (distance) out[j * w + k] += distance[k] * length;
        if (relative && L === 0) {
          for (let c = 0; c < g; c++) {
            const step = signal.positions[i * g + c] - signal.positions[j * g + c];
            out[j * w + k] += relative[k * g + c] * step;
          }
        }
      }
    }
    return out;
  }
}

/** Phi and Psi of a low-rank kernel: W2 GELU(W1 [gamma(x); u] + b1) + b2 at every position. */
class FactorField extends BasisField {
  factor(name, gammas, features, count, useGamma, useFeatures) {
    const w1 = this[name + "_w1"], b1 = this[name + "_b1"], w2 = this[name + "_w2"], b2 = this[name + "_b2"];
    const g = this.signal.gammaSize, d = this.size, w = b1.length, joint = new Float32Array(count * (g + d));
    for (let j = 0; j < count; j++) {
      if (useGamma) joint.set(gammas.subarray(j * g, (j + 1) * g), j * (g + d));
      if (useFeatures) joint.set(features.length === d ? features : features.subarray(j * d, (j + 1) * d), j * (g + d) + g);
    }
    return product(gelu(product(joint, w1, count, w, g + d, b1)), w2, count, b2.length, w, b2);
  }

  factors(i, { off, freezeX, freezeY }) {
    const query = this.query(i, { freezeX });
    const phi = this.factor("phi", this.gammaOf(i), query, 1, !off.has("x"), !off.has("u_x"));
    const key = [off.has("y"), off.has("u_y"), freezeY].join();
    if (this._key !== key) {
      const features = freezeY ? this.mean : this.u;
      this._psi = this.factor("psi", this.signal.gamma, features, this.n, !off.has("y"), !off.has("u_y"));
      this._key = key;
    }
    return { phi, psi: this._psi };
  }

  /** e^(-lambda_r (x_i - x_j)) of a kernel that decays into the past, else 1. */
  decay(i, j, r) {
    if (!this.log_decay) return 1;
    return Math.exp(-Math.exp(this.log_decay[r]) * Math.max(0, this.signal.positions[i] - this.signal.positions[j]));
  }
}

/** K_ij = sum_r d_ij[r] f_i[r] g_j[r] M_r + bias. */
class MatrixFactorField extends FactorField {
  constructor(signal, features, weights, headSize, isCausal) {
    super(signal, features, headSize, isCausal);
    Object.assign(this, weights);
    this.rank = this.matrices.length / headSize ** 2;
    this.width = this.rank + 1;
    this.basis = new Float32Array(this.width * headSize ** 2);
    this.basis.set(this.matrices);
    this.basis.set(this.bias, this.matrices.length);
  }

  coefficients(i, options) {
    const { phi, psi } = this.factors(i, options), values = new Float32Array(this.n * this.width);
    for (let j = 0; j < this.n; j++) {
      for (let r = 0; r < this.rank; r++) {
        values[j * this.width + r] = phi[r] * psi[j * this.rank + r] * this.decay(i, j, r);
      }
      values[j * this.width + this.rank] = 1;
    }
    return { values, width: this.width };
  }

  /** |S_t[r]| of the state after every key t: [n, r]. */
  states() {
    const d = this.size, { psi } = this.factors(0, EVERYTHING), state = new Float64Array(this.rank * d);
    return runningStates(this, (t, r) => {
      for (let c = 0; c < d; c++) {
        state[r * d + c] = state[r * d + c] * (t ? this.decay(t, t - 1, r) : 1) +
          this.signal.measure[t] * psi[t * this.rank + r] * this.u[t * d + c];
      }
      return Math.sqrt(dot(state, r * d, state, r * d, d));
    });
  }
}

/** K_ij = sum_r d_ij[r] Phi_i[r] Psi_j[r]^T + bias. Coefficients are d_ij[r] Psi_j[r, c], and Phi_i goes with them. */
class VectorFactorField extends FactorField {
  constructor(signal, features, weights, headSize, isCausal) {
    super(signal, features, headSize, isCausal);
    Object.assign(this, weights);
    this.rank = this.phi_b2.length / headSize;
    this.width = this.rank * headSize + 1;
  }

  coefficients(i, options) {
    const { phi, psi } = this.factors(i, options), d = this.size, width = this.width;
    const values = new Float32Array(this.n * width);
    for (let j = 0; j < this.n; j++) {
      for (let r = 0; r < this.rank; r++) {
        const decay = this.decay(i, j, r);
        for (let c = 0; c < d; c++) values[j * width + r * d + c] = decay * psi[(j * this.rank + r) * d + c];
      }
      values[j * width + width - 1] = 1;
    }
    return { values, width, phi };
  }

  norms({ values, width, phi }) {
    const d = this.size, R = phi.length / d, out = new Float64Array(this.n), bias = this.bias;
    const met = new Float64Array(R * d);  // bias^T Phi_i[r]
    for (let r = 0; r < R; r++) {
      for (let a = 0; a < d; a++) for (let c = 0; c < d; c++) met[r * d + c] += bias[a * d + c] * phi[r * d + a];
    }
    const square = dot(bias, 0, bias, 0, d * d), gram = product(phi, phi, R, R, d);
    for (let j = 0; j < this.n; j++) {
      const first = j * width, s = values[first + width - 1];
      let sum = s * s * square + 2 * s * dot(met, 0, values, first, R * d);
      for (let r = 0; r < R; r++) {
        for (let q = 0; q < R; q++) sum += gram[r * R + q] * dot(values, first + r * d, values, first + q * d, d);
      }
      out[j] = Math.sqrt(Math.max(sum, 0));
    }
    return out;
  }

  entries({ values, width, phi }, a, c) {
    const d = this.size, out = new Float64Array(this.n);
    for (let j = 0; j < this.n; j++) {
      out[j] = values[j * width + width - 1] * this.bias[a * d + c];
      for (let r = 0; r < this.rank; r++) out[j] += phi[r * d + a] * values[j * width + r * d + c];
    }
    return out;
  }

  /** K_ij u_j [d_h] of one key. */
  image({ values, width, phi }, j) {
    const d = this.size, out = new Float64Array(d), first = j * d;
    for (let a = 0; a < d; a++) out[a] = values[j * width + width - 1] * dot(this.bias, a * d, this.u, first, d);
    for (let r = 0; r < this.rank; r++) {
      const moment = dot(values, j * width + r * d, this.u, first, d);
      for (let a = 0; a < d; a++) out[a] += moment * phi[r * d + a];
    }
    return out;
  }

  along(coefficients, direction) {
    return Float64Array.from({ length: this.n }, (_, j) => dot(this.image(coefficients, j), 0, direction, 0, this.size));
  }

  actions(coefficients) {
    return Float64Array.from({ length: this.n }, (_, j) => length(this.image(coefficients, j)));
  }

  integral(coefficients, weights) {
    const out = new Float64Array(this.size);
    for (let j = 0; j < this.n; j++) {
      if (weights[j] === 0) continue;
      const image = this.image(coefficients, j);
      for (let a = 0; a < this.size; a++) out[a] += weights[j] * image[a];
    }
    return out;
  }

  changes(i, options) {  // a kernel of twice the rank: [Phi; Phi'] and [Psi; -Psi']
    const before = this.coefficients(i, EVERYTHING), after = this.coefficients(i, options), half = this.width - 1;
    const phi = new Float32Array(2 * half), width = 2 * half + 1, values = new Float32Array(this.n * width);
    phi.set(before.phi);
    phi.set(after.phi, half);
    for (let j = 0; j < this.n; j++) {
      for (let m = 0; m < half; m++) {
        values[j * width + m] = before.values[j * this.width + m];
        values[j * width + half + m] = -after.values[j * this.width + m];
      }
    }
    return this.norms({ values, width, phi });
  }

  /** |Z_t[r]| of the state after every key t: [n, r]. */
  states() {
    const d = this.size, { psi } = this.factors(0, EVERYTHING), state = new Float64Array(this.rank);
    return runningStates(this, (t, r) => {
      const added = this.signal.measure[t] * dot(psi, (t * this.rank + r) * d, this.u, t * d, d);
      state[r] = state[r] * (t ? this.decay(t, t - 1, r) : 1) + added;
      return Math.abs(state[r]);
    });
  }
}

/** A state relative to the mass of the keys so far: [n, r]. advance(t, r) adds key t to rank r. */
function runningStates(field, advance) {
  const out = new Float64Array(field.n * field.rank);
  let mass = 0;
  for (let t = 0; t < field.n; t++) {
    mass += field.signal.measure[t];
    for (let r = 0; r < field.rank; r++) out[t * field.rank + r] = advance(t, r) / mass;
  }
  return out;
}

/** All kernels of a page, made when they are first asked for: find(sample, layer, head, name of the field). */
class Fields {
  constructor(page, read) {
    Object.assign(this, { page, read, made: new Map() });
    this.signals = page.samples.map((sample) => new Signal(sample, read, page.frequencies));
  }

  find(sample, layer, head, name) {
    const key = [sample, layer, head, name].join();
    if (!this.made.has(key)) {
      if (this.made.size > 64) this.made.clear();
      this.made.set(key, this.make(sample, layer, head, name));
    }
    return this.made.get(key);
  }

  make(sample, layer, head, name) {
    const { page, read } = this, { source } = page.fields.find((field) => field.name === name);
    const all = page.layers[layer][source], weights = {};
    const shared = new Set(source === "kernel" && !all.hasOwnHidden ? ["w1", "b1", "wMid", "bMid"] : []);
    for (const [parameter, place] of Object.entries(all)) {
      if (parameter === "hasOwnHidden") continue;
      const isShared = shared.has(parameter) || place.shape[0] === 1 || /^(phi|psi)_[wb]1$/.test(parameter);
      weights[parameter] = isShared ? read(place) : this.ofHead(place, head);
    }
    const signal = this.signals[sample], given = [page.headSize, page.isCausal];
    const u = this.ofHead(page.samples[sample].features[layer], head);
    if (source === "kernel") return new KernelField(signal, u, weights, page.inputs, ...given);
    return new (weights.matrices ? MatrixFactorField : VectorFactorField)(signal, u, weights, ...given);
  }

  /** The part of a tensor [H, ...] that belongs to a head. */
  ofHead(place, head) {
    const values = this.read(place), length = values.length / place.shape[0];
    return values.subarray(head * length, (head + 1) * length);
  }
}
