"""Moments → factors.

In: the moments that `capture` measured of each layer. Out: each layer's two factors (Ž+ε₁)⁻¹ and (D+ε₂)⁻¹ and its
centre c, kept up to date on a schedule.
"""
