"""Units in which features of the data vary alike, as far as their examples tell.

Inputs of a hidden layer have one scale, which the layer before gives them; features of the data have any. In units uᵢ

    Ž + ε diag(u²)  =  diag(u) (Ž' + εI) diag(u),      z' = z / u,      uᵢ² ∝ v̂ᵢ = vᵢᵖ v̄¹⁻ᵖ

p = 1 makes a step exactly invariant to the scale of each feature, and p = 0 is damping relative to the mean variance. A
feature that varies in most examples tells its own variance; of a pixel that is lit in one image of a hundred the
variance is small because it is rare, and in units of that its steps would be far too long. So vᵢ is shrunk towards v̄ in
the logarithm, by the number of examples that speak for it, N divided by its kurtosis:

    log v̂ᵢ = (kᵢ log vᵢ + k₀ log v̄) / (kᵢ + k₀),      kᵢ = N / κᵢ,      log v̄ = Σ kᵢ log vᵢ / Σ kᵢ
"""

from __future__ import annotations

import torch
from torch import Tensor

from bprong.linalg.moments import Moments

# k₀ = EXAMPLES + N / KURTOSIS, chosen in docs/auto.md. It grows with N, so that more examples of a rare feature do not
# make it a frequent one.
EXAMPLES = 10.0
KURTOSIS = 10.0
CONSTANT = 1e-3  # a feature whose standard deviation is less than this part of its mean has no unit: Σ z⁴ would cancel


def feature_units(moments: Moments) -> Tensor | None:
    """Return u, (d,) or (n, d) for n blocks, in which the mean variance is what it was; None: no feature has a unit."""
    if moments.tails is None:
        return None
    k = examples_behind(moments, moments.tails)
    if not k.any():
        return None
    v = moments.variances
    logs = torch.where(k > 0, v, 1.0).log()
    mean = (k * logs).sum() / k.sum()
    trust = k / (k + EXAMPLES + moments.weight / KURTOSIS)
    squares = (mean + trust * (logs - mean)).exp()
    return (squares * (v / squares).mean() / v.mean()).sqrt()


def examples_behind(moments: Moments, tails: Tensor) -> Tensor:
    """Return k, the number of examples that speak for the variance of each feature."""
    v = moments.variances
    m = torch.zeros_like(v) if moments.mean is None else moments.mean
    third, fourth = tails / moments.weight
    kurtosis = (fourth - 4 * m * third + 6 * m**2 * v + 3 * m**4) / v**2
    return torch.where(v > (CONSTANT * m) ** 2, moments.weight / kurtosis.clamp(min=1), 0.0)
