"""The evidence: the paper's experiment, its figures and its verdict, and the audit's pictures."""
