// Log-priors as zoo/priors has them, over a distance d = i − j of at least 0 tokens, and what they make of content logits.
"use strict";
const EPSILON = 1e-5, LOWEST = -1e30;

// −exp(θα)·(|d + μ| + ε)^θβ, at least LOWEST; μ in tokens, negative where the head looks back.
function ggd(d, alpha, beta, mu) {
  const exponent = beta * Math.log(Math.abs(d + mu) + EPSILON) + alpha;
  return -Math.exp(Math.min(exponent, Math.log(-LOWEST)));
}

// Σ_r α_r cos(ω_r d) + β_r sin(ω_r d)
function spectral(d, omega, alpha, beta) {
  return omega.reduce((sum, w, r) => sum + alpha[r] * Math.cos(w * d) + beta[r] * Math.sin(w * d), 0);
}

function relativePrior(d, head) {
  return ggd(d, head.theta_alpha, head.theta_beta, head.mu) + spectral(d, head.omega, head.alpha, head.beta);
}

function softmax(logits) {
  const highest = Math.max(...logits), e = logits.map(x => Math.exp(x - highest));
  const total = e.reduce((a, b) => a + b, 0);
  return e.map(x => x / total);
}

// p of every row i over the keys 0 … i; content: rows of logits; key: the part of the prior that is the key's alone.
function attention(head) {
  return head.content.map((row, i) => softmax(row.map((s, j) => s + relativePrior(i - j, head) + head.key[j])));
}
