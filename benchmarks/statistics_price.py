"""What does measuring the statistics cost, in time and in memory, beside the user's own forward and backward pass?

Time is compared with a former code, which made a second forward and backward pass over the batch:

    mkdir before && git archive 50ca93f src | tar -x -C before
    python benchmarks/statistics_price.py --before before       rows into docs/statistics-price.csv, then both tables
    python benchmarks/statistics_price.py                       memory only
    python benchmarks/statistics_price.py --draw                the tables of what is in the file

Time. Each code runs in a process of its own, and the two take turns. In a turn a process makes some forward and
backward passes of a model without optimizer, then as many training steps of a model with BPRONG that measures and
refreshes all sides at every step. The statistics are what such a step (forward, backward and `step()`) takes beyond
the user's pass, without the seconds of the factorisation and of the step rule by the optimizer's own clock. So
everything that either code adds to the forward pass, to the backward pass and to `step()` counts as statistics,
wherever it is done, also what is common to both codes, such as the tests that gradients are finite; this draws the
ratio towards 1. "By its clock" are the seconds that the optimizer itself counts as statistics, which leave out what
recording adds to the forward pass. The learning rate is so small that all steps train the same network.

Memory. The most that is allocated at a time, above what is allocated before the forward pass: in the user's forward and
backward pass, and in a training step that measures and refreshes (forward, backward and `step()`). The profiler of
torch reports every allocation and release of CPU memory with its size, including those within an operator, which
neither the tensors seen from Python nor the size of the process would show exactly. It runs from before the model is
made, so that a release is never of unknown size, and the third step is measured, so that parameters, moments and
factors are there already and new ones replace them. Python's garbage collector runs before each step and at no other
time; what it releases then would otherwise stay until it runs by itself. Libraries that allocate memory by themselves
are not seen. The ratio of the two peaks says how much a due step adds to the passes themselves. It counts neither the
parameters nor what the optimizer holds all the time, and is large where the batch is small and a layer is wide, because
the memory of a factorisation does not depend on the batch. The ratio of all memory, of such a step to another one, says
how much more memory training needs because some of its steps are due.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from harness.command_line import CommandLine
from problems import Problem
from problems.standard import CONVOLUTIONS, TRANSFORMER, paper
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

import bprong
from bprong.experiments.bench.data import batches
from bprong.experiments.bench.rows import Log, grouped
from bprong.experiments.bench.tables import markdown
from bprong.experiments.bench.timing import seconds_of, seconds_on

PROBLEMS: dict[str, Problem] = {
    "paper-100": paper(100, 1800),
    "paper-1000": paper(1000, 180),
    "transformer": TRANSFORMER,
    "conv": CONVOLUTIONS,
}
TIMED = ["paper-100", "transformer"]
EVERY_STEP: dict[str, Any] = {"every": 1}
LEARNING_RATE = 1e-6
MEMORY_STEPS = 3  # of which the last is measured
TIME = "milliseconds"
MEMORY = "megabytes"
TIME_BAR = 0.7
MEMORY_BAR = 1.3
OURS = Path(bprong.__file__).resolve().parents[1]


@dataclass(frozen=True)
class Row:
    """One measurement of one code.

    measure: the unit: milliseconds, of one step, or megabytes, at the peak and above what is there before the step
    code:    "before" or "now"
    user:    the user's forward and backward pass without an optimizer
    due:     a training step that measures; of its time, all but the factorisation and the step rule
    clock:   the time of the statistics by the optimizer's clock
    passes:  the peak of memory within the forward and backward pass of the step that measures
    held:    memory that the optimizer holds between steps
    garbage: memory of the step before that only the garbage collector releases
    base:    memory of the model and of the batch, before the user's forward pass
    """

    problem: str
    measure: str
    code: str
    round: int
    user: float
    due: float
    clock: float = math.nan
    passes: float = math.nan
    held: float = math.nan
    garbage: float = math.nan
    base: float = math.nan

    @property
    def whole(self) -> float:
        """All memory at the peak of a step that measures, relative to that of a step that does not."""
        there = self.base + self.held
        return (there + self.due) / (there + self.user)


# In a process for each code -------------------------------------------------------------------------------------------


class Training:
    """A network, and BPRONG if it is to be trained."""

    def __init__(self, problem: Problem, source: Iterator[tuple[Tensor, Tensor]], trained: bool) -> None:
        self.loss = problem.loss
        self.source = source
        self.model = problem.model(0)
        self.optimizer: Any = None
        if trained:
            self.optimizer = bprong.BPRONG(self.model, problem.declared, LEARNING_RATE, **EVERY_STEP)

    def step(self, x: Tensor, y: Tensor) -> None:
        with record_function("pass"):
            self.loss(self.model(x), y).backward()  # type: ignore[no-untyped-call]
        if self.optimizer is not None:
            with record_function("step"):
                self.optimizer.step()

    def run(self, steps: int) -> float:
        """Seconds of some steps, without those that draw the batch and set gradients to None."""
        spent = 0.0
        for x, y in islice(self.source, steps):
            self.model.zero_grad()
            spent += seconds_of(partial(self.step, x, y))
        return spent


class Measurements:
    """What a process measures when it is asked to: its methods return fields of a row."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        data = problem.data()
        self.batches: Callable[[], Iterator[tuple[Tensor, Tensor]]] = lambda: batches(data.x, data.y, problem.batch, 0)
        self.user = Training(problem, self.batches(), trained=False)
        self.trained = Training(problem, self.batches(), trained=True)

    def milliseconds(self, steps: int) -> dict[str, float]:
        optimizer = self.trained.optimizer
        parts = ("statistics", "factorisation", "step")
        user = self.user.run(steps)
        before = {part: seconds_on(optimizer, part) for part in parts}
        due = self.trained.run(steps)
        spent = {part: seconds_on(optimizer, part) - before[part] for part in parts}
        due -= spent["factorisation"] + spent["step"]
        found = {"user": user, "due": due, "clock": spent["statistics"]}
        return {name: 1e3 * seconds / steps for name, seconds in found.items()}

    def megabytes(self, steps: int) -> dict[str, float]:
        user = self._peaks(trained=False, steps=steps)
        due = self._peaks(trained=True, steps=steps)
        return {
            "user": user.passes,
            "due": max(due.passes, due.step),
            "passes": due.passes,
            "held": due.live - user.live,
            "garbage": due.garbage,
            "base": user.live,
        }

    def _peaks(self, trained: bool, steps: int) -> Peaks:
        """The peaks in the last of some steps."""
        gc.collect()
        gc.disable()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            training = Training(self.problem, self.batches(), trained)
            for _ in range(steps):
                training.model.zero_grad()
                with record_function("collect"):
                    gc.collect()
                with record_function("collected"):
                    training.run(1)
        gc.enable()
        kineto = profiler.profiler
        assert kineto is not None
        events = [(event.start_ns(), event.name(), event.nbytes()) for event in kineto.kineto_results.events()]
        return peaks_of([(name, size) for _, name, size in sorted(events)])


class Peaks(NamedTuple):
    """Megabytes of a step.

    live:          allocated before the forward pass
    passes, step:  the most in the forward and backward pass, and in `step()`, above `live`
    garbage:       what the garbage collector released before the forward pass
    """

    live: float
    passes: float
    step: float
    garbage: float


def peaks_of(events: Sequence[tuple[str, int]]) -> Peaks:
    """The peaks of the last step, from events in their order: marks, and "[memory]" with the bytes allocated.

    >>> allocated = [("[memory]", size) for size in (7_000_000, -2_000_000, 4_000_000, -3_000_000, 1_000_000)]
    >>> collected = [allocated[0], ("collect", 0), allocated[1], ("collected", 0)]
    >>> peaks_of([*collected, ("pass", 0), *allocated[2:4], ("step", 0), allocated[4]])
    Peaks(live=5.0, passes=4.0, step=2.0, garbage=2.0)
    """
    live = 0
    mark = ""
    at = {"collect": 0, "collected": 0, "pass": 0, "step": 0}
    most = dict(at)
    for name, size in events:
        if name in at:
            mark = name
            at[mark] = live
            most[mark] = live
        elif name == "[memory]":
            live += size
            if mark:
                most[mark] = max(most[mark], live)
    start = at["pass"]
    step = max(most["step"] - start, 0)
    released = at["collect"] - at["collected"]
    return Peaks(start / 1e6, (most["pass"] - start) / 1e6, step / 1e6, released / 1e6)


def serve(problem: Problem) -> None:
    """Answers each line of input, a measure and a number of steps, by the fields of a row as a line of JSON."""
    print(json.dumps(str(OURS)), flush=True)
    measurements = Measurements(problem)
    for line in sys.stdin:
        measure, steps = line.split()
        print(json.dumps(getattr(measurements, measure)(int(steps))), flush=True)


# In the process that the user starts ----------------------------------------------------------------------------------


class Code:
    """A process that measures one problem with the code in a folder."""

    def __init__(self, source: Path, problem: str, threads: int) -> None:
        command = [sys.executable, __file__, "--serve", problem, "--threads", str(threads)]
        environment = os.environ | {"PYTHONPATH": str(source)}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._problem = problem
        self._process = subprocess.Popen(command, env=environment, **pipes)
        if (found := self._answer()) != str(source):
            self.__exit__()
            raise RuntimeError(f"the process that should measure {source} imported bprong from {found}")

    def ask(self, measure: str, steps: int) -> dict[str, float]:
        assert self._process.stdin is not None
        print(measure, steps, file=self._process.stdin, flush=True)
        fields: dict[str, float] = self._answer()
        return fields

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that measures {self._problem} ended before it answered")
        return json.loads(line)

    def __enter__(self) -> Code:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def measured(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """The rows of one problem: memory, and time if there is a former code."""
    sources = {"now": OURS}
    if options.before is not None:
        sources = {"before": (options.before / "src").resolve()} | sources
    with ExitStack() as stack:
        codes = {code: stack.enter_context(Code(path, name, options.threads)) for code, path in sources.items()}
        for code, process in codes.items():
            yield Row(name, MEMORY, code, 0, **process.ask(MEMORY, MEMORY_STEPS))
        if name not in TIMED or options.before is None:
            return
        for process in codes.values():
            process.ask(TIME, options.steps)  # not kept: the first steps are slow
        for i in range(options.rounds):
            for code, process in codes.items():
                yield Row(name, TIME, code, i, **process.ask(TIME, options.steps))


def run(log: Log[Row], options: argparse.Namespace) -> None:
    """Measures the problems; new rows replace those of the same problem, measure and code."""
    for name in options.only or PROBLEMS:
        rows = list(measured(name, options))
        new = {(row.problem, row.measure, row.code) for row in rows}
        log.rows = [row for row in log.rows if (row.problem, row.measure, row.code) not in new]
        log.add(rows)
        print(f"{name}: {len(rows)} rows", flush=True)


def time_table(rows: Sequence[Row]) -> str:
    """Medians over rounds; ratios are those of one round each."""
    lines = []
    for (name,), own in grouped([row for row in rows if row.measure == TIME], "problem").items():
        codes = {code: own for (code,), own in grouped(own, "code").items()}
        pairs = list(zip(codes["before"], codes["now"], strict=True))
        ratio = median((now.due - now.user) / (before.due - before.user) for before, now in pairs)
        clock = median(now.clock / before.clock for before, now in pairs)
        spent = [median(row.due - row.user for row in codes[code]) for code in ("before", "now")]
        share = [median((row.due - row.user) / row.user for row in codes[code]) for code in ("before", "now")]
        cells = [f"{value:.3g}" for value in (median(row.user for row in own), *spent, *share)]
        lines.append([PROBLEMS[name].title, *cells, f"{ratio:.2f}", f"{clock:.2f}", len(pairs)])
    titles = ["problem", "user's pass, ms", "statistics before, ms", "now, ms"]
    titles += ["before / user's pass", "now / user's pass", f"now / before (bar {TIME_BAR})", "by its clock", "rounds"]
    return markdown(titles, lines)


def memory_table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        if row.measure == MEMORY:
            cells = [f"{value:.3f}" for value in (row.user, row.passes, row.due, row.held, row.garbage)]
            ratios = [f"{ratio:.2f}" for ratio in (row.passes / row.user, row.due / row.user, row.whole)]
            lines.append([PROBLEMS[row.problem].title, row.code, *cells, *ratios])
    titles = ["problem", "code", "user's pass, MB", "pass of a due step, MB", "due step, MB", "held between steps, MB"]
    titles.append("left to the garbage collector, MB")
    titles += ["pass / user's pass", f"due step / user's pass (bar {MEMORY_BAR})", "all memory, due / other step"]
    return markdown(titles, lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandLine(__doc__, threads=2, out=True, draw=True)
    parser.setting("rounds", 30, 2, "rounds of timing")
    parser.setting("steps", 20, 2, "steps of a turn")
    parser.add_argument("--before", type=Path, metavar="PATH", help="folder with src/bprong of the former code")
    parser.add_argument("--only", nargs="+", choices=PROBLEMS, metavar="NAME", help=", ".join(PROBLEMS))
    parser.add_argument("--serve", choices=PROBLEMS, help=argparse.SUPPRESS)
    options = parser.parse(arguments)
    if options.serve:
        serve(PROBLEMS[options.serve])
        return
    if options.before is not None and not (options.before / "src" / "bprong").is_dir():
        parser.error(f"--before needs a folder with src/bprong in it, and {options.before} has none")
    log = Log(options.out / "statistics-price.csv", Row)
    if not options.draw:
        run(log, options)
    if any(row.measure == TIME for row in log.rows):
        print(f"\n{options.threads} threads\n\n{time_table(log.rows)}")
    print(f"\n{memory_table(log.rows)}")


if __name__ == "__main__":
    main()
