"""`bprong bench`: BPRONG against the optimizers people use, on eight small workloads with targets fixed beforehand.

In: workloads, methods with declared search spaces, and a budget. Out: bench.csv, tables, figures and a page.
"""
