"""The paper's network: a stock model comes in, and leaves with layers that hold U, c, W†, b† and R explicitly.

`Rewhitening` keeps their coordinates up to date and moves the state of a torch optimizer along; `fold` gives the stock
model back. Nothing here imports `bprong.optim`.
"""
