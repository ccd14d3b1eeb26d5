"""What all benchmarks share: rows as CSV, interleaved timing, training, tables, figures and the command line."""
