"""lr="auto": a step without a learning rate.

In: the gradients of a step, its batches, and the whitened direction. Out: the step that minimises a quadratic model of
the loss, and the damping of the next factors. `rule.py` has the rule in numbers; the other files measure them.
"""
