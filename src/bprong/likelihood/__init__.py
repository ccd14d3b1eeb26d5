"""p(y | output): the distribution of the targets given a network's output.

In: the output of a network, its targets, and the gradient that the user's loss leaves at the output.
Out: −log p, drawn targets, the Fisher matrix at the output, and the user's loss as a multiple κ of −log p.
"""
