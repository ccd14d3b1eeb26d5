"""The processes that train one model: what each has measured or has a slice of → what all of them have.

In: numbers, moments, and slices of tensors of each process. Out: the same of all, or of the process that owns them. Of
the core the only importer of torch.distributed; one process is a group in which nothing is exchanged.
"""
