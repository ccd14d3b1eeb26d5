"""Benchmarks: one script per question, run as `python benchmarks/NAME.py` or `python -m benchmarks.NAME`.

    step_price              what a step of BPRONG costs, in steps of SGD; time shares, final loss, memory
    statistics_price        time and memory of measuring the statistics, beside the user's own pass
    width_cost              cost of a step and of a refresh against width, depth and batch size
    loop_speed              how much of a hand-written loop's speed the experiment's training loop keeps
    coverage_check          whether `bprong.coverage` predicts memory and cost
    continuous_whitening    continuous against periodic whitening of the paper's network
    damping_sweep           the sweep behind the defaults of `bprong reproduce`
    auto_stability          lr="auto" on eleven problems: none may diverge
    auto_autoencoder        lr="auto" on the deep autoencoder, against tuned baselines
    sixty_problems          lr="auto" on sixty small problems, against tuned Adam
    modern_networks         spectral steps on a second GPT, and at rates around the best one, against Muon and others

`bprong bench` compares BPRONG with other optimizers; these scripts answer what it leaves open. `harness` reads and
writes rows, times, trains, and makes tables and figures. `problems` has data, networks and losses. Results are in
docs/*.csv. Every script has `--quick`, a small run that only shows that the script works.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # `python -m benchmarks.NAME` then finds harness and problems
