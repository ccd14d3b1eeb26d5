"""Tensors only: no modules, no state.

In: rows of inputs z and errors δ. Out: their second moments, the damped inverses of these, roots of the inverses.
"""
