"""The oracle: Fujimoto & Ohira's Algorithms 1 and 2 for an MLP, in their letters, one example at a time.

Slow and obvious on purpose. Layers are numbered from 0 here: layer i maps z[i] → a[i] → z[i+1] = φ(a[i]).
The last layer has no φ: its a are the logits of p(y|x) = softmax(a)_y. δ is ∂(−log p)/∂a, the paper's sign reversed.
"""

from __future__ import annotations

import numpy as np

PHI = {
    "tanh": (np.tanh, lambda a: 1 - np.tanh(a) ** 2),
    "relu": (lambda a: np.maximum(a, 0), lambda a: (a > 0).astype(float)),
}


def softmax(a):
    e = np.exp(a - a.max())
    return e / e.sum()


class BWNN:
    """A bidirectionally whitened network: U, c, W†, b†, R for every layer (R = I throughout Algorithm 1)."""

    def __init__(self, weights, biases, phi="tanh"):
        self.phi, self.dphi = PHI[phi]
        self.W_dagger = [W.copy() for W in weights]
        self.b_dagger = [b.copy() for b in biases]
        self.U = [np.eye(W.shape[1]) for W in weights]
        self.c = [np.zeros(W.shape[1]) for W in weights]
        self.R = [np.eye(W.shape[0]) for W in weights]

    @property
    def layers(self):
        return range(len(self.U))

    def W(self, i):
        return self.R[i].T @ self.W_dagger[i] @ self.U[i]

    def b(self, i):
        return self.R[i].T @ self.b_dagger[i] - self.W(i) @ self.c[i]

    # one example ------------------------------------------------------------------------------------------------------

    def forward(self, x):
        """z[0 … N] and a[0 … N−1]; the output is a[N−1]."""
        z, a = [x], []
        for i in self.layers:
            z_dagger = self.U[i] @ (z[i] - self.c[i])
            a_dagger = self.W_dagger[i] @ z_dagger + self.b_dagger[i]
            a.append(self.R[i].T @ a_dagger)
            z.append(self.phi(a[i]))
        return z, a

    def deltas(self, a, y):
        """δ of every layer for the label y."""
        delta = [None for _ in self.layers]
        one_hot = np.zeros_like(a[-1])
        one_hot[y] = 1
        delta[-1] = softmax(a[-1]) - one_hot
        for i in reversed(self.layers[1:]):
            delta[i - 1] = self.dphi(a[i - 1]) * (self.W(i).T @ delta[i])
        return delta

    # expectations over a batch ----------------------------------------------------------------------------------------

    def outputs(self, X):
        return np.array([self.forward(x)[1][-1] for x in X])

    def ordinary_gradients(self, X, Y):
        """E[δ zᵀ] and E[δ] of every layer."""
        grad_W, grad_b = [np.zeros_like(self.W(i)) for i in self.layers], [np.zeros_like(b) for b in self.b_dagger]
        for x, y in zip(X, Y, strict=True):
            z, a = self.forward(x)
            for i, delta in enumerate(self.deltas(a, y)):
                grad_W[i] += np.outer(delta, z[i]) / len(X)
                grad_b[i] += delta / len(X)
        return grad_W, grad_b

    def input_moments(self, X, i):
        """c = E[z], Ž = E[(z−c)(z−c)ᵀ]."""
        z = [self.forward(x)[0][i] for x in X]
        c = sum(z) / len(z)
        return c, sum(np.outer(v - c, v - c) for v in z) / len(z)

    def error_moment(self, X, i):
        """D = E[δδᵀ], the labels' expectation taken under the model: every class, weighted by its probability."""
        D = np.zeros_like(self.R[i])
        for x in X:
            _, a = self.forward(x)
            for y, p in enumerate(softmax(a[-1])):
                delta = self.deltas(a, y)[i]
                D += p * np.outer(delta, delta) / len(X)
        return D

    # the algorithms ---------------------------------------------------------------------------------------------------

    def forward_whitening(self, X, epsilon):
        statistics = [self.input_moments(X, i) for i in self.layers]
        for i, (c, Z) in enumerate(statistics):
            W, b = self.R[i].T @ self.W_dagger[i] @ self.U[i], self.b(i)
            self.U[i], self.c[i] = whitening_matrix(Z, epsilon), c
            R_invT = np.linalg.inv(self.R[i].T)
            self.W_dagger[i] = R_invT @ W @ np.linalg.inv(self.U[i])
            self.b_dagger[i] = R_invT @ (b + W @ c)

    def back_whitening(self, X, epsilon):
        statistics = [self.error_moment(X, i) for i in self.layers]
        for i, D in enumerate(statistics):
            R_new = whitening_matrix(D, epsilon)
            change = np.linalg.inv(R_new.T) @ self.R[i].T
            self.W_dagger[i], self.b_dagger[i] = change @ self.W_dagger[i], change @ self.b_dagger[i]
            self.R[i] = R_new

    def gradient_descent(self, X, Y, eta):
        """W† and b† move against their own gradients, E[δ† z†ᵀ] and E[δ†] with δ† = R δ."""
        grad_W, grad_b = [np.zeros_like(W) for W in self.W_dagger], [np.zeros_like(b) for b in self.b_dagger]
        for x, y in zip(X, Y, strict=True):
            z, a = self.forward(x)
            for i, delta in enumerate(self.deltas(a, y)):
                delta_dagger = self.R[i] @ delta
                grad_W[i] += np.outer(delta_dagger, self.U[i] @ (z[i] - self.c[i])) / len(X)
                grad_b[i] += delta_dagger / len(X)
        for i in self.layers:
            self.W_dagger[i] -= eta * grad_W[i]
            self.b_dagger[i] -= eta * grad_b[i]

    def step(self, t, X, Y, *, eta, tau1, c1=0, epsilon1, tau2=None, c2=0, epsilon2=0.0):
        """Iteration t of Algorithm 2; without τ₂, of Algorithm 1."""
        if t % tau1 == c1:
            self.forward_whitening(X, epsilon1)
        if tau2 is not None and t % tau2 == c2:
            self.back_whitening(X, epsilon2)
        self.gradient_descent(X, Y, eta)


def whitening_matrix(moment, epsilon):
    """(Λ + εI)^(-1/2) Pᵀ, each eigenvector's largest entry made positive."""
    eigenvalues, P = np.linalg.eigh(moment)
    for j in range(len(eigenvalues)):
        if P[np.argmax(np.abs(P[:, j])), j] < 0:
            P[:, j] = -P[:, j]
    return np.diag((np.maximum(eigenvalues, 0) + epsilon) ** -0.5) @ P.T


def feature_units(rows, centred=True, examples=0.0, kurtosis=np.inf, N=None):
    """u of each feature of the data, one feature at a time: uᵢ² ∝ v̂ᵢ = vᵢᵖ v̄¹⁻ᵖ with p = k/(k + k₀).

    rows:                the inputs (n, d), which count as N examples
    examples, kurtosis:  k₀ = examples + N/kurtosis
    """
    N = len(rows) if N is None else N
    variances, k = [], []
    for feature in rows.T:
        deviations = feature - feature.mean() if centred else feature
        v = np.mean(deviations**2)
        is_constant = np.sqrt(v) <= 1e-3 * abs(feature.mean()) if centred else v == 0
        variances.append(v)
        k.append(0.0 if is_constant else N * v**2 / np.mean(deviations**4))
    log_mean = sum(ki * np.log(v) for ki, v in zip(k, variances, strict=True) if ki) / sum(k)
    squares = []
    for ki, v in zip(k, variances, strict=True):
        k0 = examples + N / kurtosis
        squares.append(np.exp((ki * (np.log(v) if ki else 0.0) + k0 * log_mean) / (ki + k0)) if ki + k0 else 1.0)
    # The mean variance is the same in these units.
    share = np.mean([v / square for v, square in zip(variances, squares, strict=True)]) / np.mean(variances)
    return np.sqrt(share * np.array(squares))
