"""The command line: files written, messages, exit codes, help."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import bprong
from bprong.cli import main
from bprong.experiments.extras import install_command
from bprong.experiments.methods import METHODS
from bprong.experiments.records import read_results

DIGITS = ["reproduce", "--data", "digits", "--jobs", "1", "--threads", "1"]


def test_reproduce_writes_all_its_files(tmp_path, capsys):
    out = tmp_path / "run"
    assert main([*DIGITS, "--epochs", "2", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "BPRONG has a lower training loss" in said
    assert "\n  BPRONG-fast, training loss after epoch 2 (the last): " in said
    assert str(out / "report.html") in said
    names = {p.name for p in out.iterdir()}
    figures = {f"{f}.{s}" for f in ("train_loss", "validation_loss", "train_loss_time", "validation_loss_time")
               for s in ("png", "svg")}  # fmt: skip
    assert names >= {"results.csv", "run.json", "report.html", "checkpoints"} | figures
    record = json.loads((out / "run.json").read_text())
    assert record["config"]["activation"] == "relu"
    assert record["config"]["methods"] == [*METHODS]
    assert {"bprong-recipe", "bn-recipe"} <= set(record["config"]["recipes"])
    assert "BPRONG-recipe, validation loss after epoch 2 (the last): " in said
    assert "whitening.bprong-fast.every" in (out / "report.html").read_text(encoding="utf-8")
    assert record["threads"] == 1
    assert record["data"]["name"] == "digits"
    assert record["versions"]["torch"]
    assert (out / "results.csv").read_text().splitlines()[0] == (
        "method,seed,epoch,step,seconds,train_loss,val_loss,val_accuracy"
    )


@pytest.mark.rest
def test_a_finished_run_is_not_overwritten_but_can_be_resumed(tmp_path, capsys):
    out = str(tmp_path / "run")
    assert main([*DIGITS, "--epochs", "1", "--methods", "sgd", "--out", out]) == 0
    capsys.readouterr()
    assert main([*DIGITS, "--epochs", "1", "--methods", "sgd", "--out", out]) == 2
    assert "already contains a run; continue it with --resume" in capsys.readouterr().err
    assert main([*DIGITS, "--epochs", "2", "--methods", "sgd", "--out", out, "--resume"]) == 0


@pytest.mark.rest
def test_two_processes_give_the_losses_of_one_and_resume_each_others_runs(tmp_path, capsys):
    """Statistics and gradients are those of the whole batch; no targets are sampled."""
    methods = ["--methods", "sgd,prong,bprong", "--fisher", "exact", "--forward-every", "5"]
    runs = {name: tmp_path / name for name in ("one", "two")}
    assert main([*DIGITS, *methods, "--epochs", "2", "--out", str(runs["one"])]) == 0
    assert main([*DIGITS, *methods, "--epochs", "1", "--nproc", "2", "--out", str(runs["two"])]) == 0
    assert main([*DIGITS, *methods, "--epochs", "2", "--out", str(runs["two"]), "--resume"]) == 0
    one, two = (read_results(out / "results.csv") for out in runs.values())
    assert [row.train_loss for row in two] == pytest.approx([row.train_loss for row in one], rel=1e-4)
    assert main([*DIGITS, "--batch", "33", "--nproc", "2", "--out", str(tmp_path / "other")]) == 2
    assert "--batch 33 cannot be divided equally among 2 processes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--activation", "gelu"], "choose from"),
        (
            ["--methods", "sgd,adamw"],
            "unknown method 'adamw'; choose from sgd, bn, prong, bprong, bprong-fast, bprong-auto, "
            "bprong-recipe, bn-recipe",
        ),
        (["--epochs", "0"], "'0' is not an integer of at least 1"),
        (["--epochs", "ten"], "'ten' is not an integer"),
        (["--lr", "-1"], "'-1' is not a number greater than 0"),
        (["--forward-damping", "nan"], "'nan' is not a number of at least 0"),
        (["--average", "1"], "'1' is not a number of at least 0 and less than 1"),
        (["--fisher", "true"], "choose from"),
        (["--data", "/no/such/folder"], "/no/such/folder"),
        (["--forward-every", "5", "--forward-offset", "5"], "forward_offset must be"),
        (["--nonsense"], "unrecognized arguments"),
    ],
)
def test_a_wrong_value_is_refused_with_the_allowed_ones_and_nothing_is_written(arguments, message, tmp_path, capsys):
    out = tmp_path / "run"
    try:
        code = main([*DIGITS, "--out", str(out), *arguments])
    except SystemExit as stopped:  # argparse's way
        code = stopped.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_help_lists_commands_options_and_methods(capsys):
    for arguments in (["--help"], ["reproduce", "--help"], ["audit", "--help"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 0
    said = capsys.readouterr().out
    for word in (
        "reproduce",
        "audit",
        "--resume",
        "--checkpoint",
        "Algorithm 2",
        "sgd,bn,prong,bprong,bprong-fast,bprong-auto,bprong-recipe,bn-recipe",
    ):
        assert word in said or word in "".join(said.split())  # lines are broken after hyphens
    assert "They do not apply to bprong-fast and bprong-auto" in " ".join(said.split())


def test_audit_prints_tables_and_writes_figures_and_numbers(tmp_path, capsys):
    out = tmp_path / "audit"
    assert main(["audit", "--examples", "100", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "bidirectional  exact" in said
    assert {p.name for p in out.iterdir()} == {
        "audit.json", "matrices.png", "matrices.svg", "spectra.png", "spectra.svg"
    }  # fmt: skip
    networks = json.loads((out / "audit.json").read_text())["networks"]
    distance = {name: networks[name]["matrices"]["block"]["distance"] for name in networks}
    assert distance["bidirectional"] < distance["whitened"] < distance["plain"]


@pytest.mark.rest
def test_audit_of_a_runs_checkpoint(tmp_path, capsys):
    run = tmp_path / "run"
    out = tmp_path / "audit"
    assert main([*DIGITS, "--epochs", "1", "--methods", "bprong", "--out", str(run)]) == 0
    checkpoint = str(run / "checkpoints" / "bprong-0.pt")
    assert main(["audit", "--checkpoint", checkpoint, "--data", "digits", "--examples", "50", "--out", str(out)]) == 0
    assert "block" in capsys.readouterr().out
    assert not (out / "matrices.png").exists()  # 28,000 parameters: from factors only
    assert (out / "spectra.png").exists()
    assert main(["audit", "--checkpoint", str(tmp_path / "none.pt"), "--data", "digits", "--out", str(out)]) == 2
    assert "no such checkpoint" in capsys.readouterr().err


def without_matplotlib(tmp_path, *arguments):
    """Run a command in an interpreter in which matplotlib cannot be imported."""
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError('no', name='matplotlib')")
    command = [sys.executable, "-m", "bprong.cli", *arguments]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_without_the_extra_it_says_what_to_install(tmp_path):
    done = without_matplotlib(tmp_path, "--help")
    assert done.returncode == 1
    assert "matplotlib is not installed" in done.stderr
    assert install_command("experiments") in done.stderr


@pytest.mark.rest
def test_without_the_extra_it_knows_its_version(tmp_path):
    done = without_matplotlib(tmp_path, "--version")
    assert (done.returncode, done.stdout) == (0, f"bprong {bprong.__version__}\n")


def test_the_library_needs_torch_and_numpy_only(tmp_path):
    for name in ("matplotlib", "sklearn", "rich", "platformdirs", "scipy"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('no', name='{name}')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", "import bprong; print(sorted(bprong.__all__))"],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.rest
def test_a_terminal_without_greek_letters_gets_question_marks(tmp_path):
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bprong.cli", *DIGITS, "--epochs", "1", "--methods", "sgd", "--out", str(tmp_path)]
    for arguments in ([*command[:3], "reproduce", "--help"], command):
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr


def test_out_that_is_a_file_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert main([*DIGITS, "--out", str(tmp_path / "file")]) == 2
    assert "is a file; --out must be a folder" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "command",
    [
        [*DIGITS, "--epochs", "1", "--methods", "sgd"],
        pytest.param(["audit", "--examples", "50"], marks=pytest.mark.rest),
    ],
)
def test_a_read_only_folder_is_named(command, tmp_path, capsys, monkeypatch):
    def refuse(path, *arguments, **options):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert main([*command, "--out", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().err
    assert str(tmp_path / "run") in said
    assert said.endswith("; choose a folder that can be written to, with --out\n")


@pytest.mark.rest
def test_an_interrupted_audit_exits_with_130(tmp_path, capsys, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("bprong.experiments.auditing.write_json", interrupt)
    assert main(["audit", "--examples", "50", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "\nbprong audit: interrupted; run it again\n"
    assert not list(tmp_path.iterdir())


def test_a_quick_look_says_that_it_proves_nothing(tmp_path, capsys):
    assert main([*DIGITS, "--epochs", "2", "--methods", "sgd", "--out", str(tmp_path)]) == 0
    caution = "A quick look, which proves nothing: digits, epochs: 2."
    assert caution in capsys.readouterr().out
    assert f'<div class="banner" role="note"><strong>{caution}' in (tmp_path / "report.html").read_text(
        encoding="utf-8"
    )


@pytest.mark.rest
def test_the_report_says_how_this_data_was_scaled(tmp_path):
    out = tmp_path / "run"
    main([*DIGITS, "--epochs", "1", "--methods", "bprong", "--statistics", "99999", "--out", str(out)])
    config = json.loads((out / "run.json").read_text())["config"]
    assert config["input_scaling"] == "pixels divided by 16, not centred"
    assert config["statistics"].startswith("1437 training examples")


def test_mnist_is_searched_for_in_the_given_directory_first(tmp_path, monkeypatch, capsys):
    from bprong.experiments import mnist

    monkeypatch.setenv("BPRONG_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(mnist, "MIRRORS", ())
    monkeypatch.setattr(mnist.shutil, "which", lambda name: None)
    arguments = ["reproduce", "--data", "mnist", "--look-in", str(tmp_path / "mine"), "--out", str(tmp_path / "run")]
    assert main(arguments) == 2
    said = capsys.readouterr()
    tried = [line for line in said.err.splitlines() if line.startswith("  ")]
    assert tried[0].startswith(f"  directory {tmp_path / 'mine'}")
    assert tried[1].startswith("  cache")
    assert not (tmp_path / "run").exists()
