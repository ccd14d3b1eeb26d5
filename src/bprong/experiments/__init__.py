"""The experiments: rerun the paper's comparison of training methods, and audit the Fisher matrix.

In: a data set, the methods to compare, and their settings. Out: results.csv, run.json, figures, a report and a verdict
on the paper's claims (`bprong reproduce`); audit.json and figures of the Fisher matrices (`bprong audit`).
"""
