"""Batch → moments: find the weights that can be whitened, record their use in a forward pass, and measure z and δ.

In:  a model, a likelihood and the batches the model is trained on.
Out: for each weight the moments of its inputs z and of its errors δ (`measure.LayerMoments`).
"""
