"""Missing packages are named as the installed package requires them."""

import importlib.metadata

from bprong.experiments.extras import install_command


def test_missing_packages_are_named_as_the_installed_package_requires_them(monkeypatch):
    """So the command works whether bprong came from an index, from a wheel or from a checkout."""
    required = ["torch>=2.6", 'rich; extra == "live"', "rich>=9; extra == 'all'", "skorch; extra == 'all'"]
    required.append("bprong[live]; extra == 'all'")
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: required)
    assert install_command("live") == "pip install rich"
    assert install_command("all") == "pip install 'rich>=9' skorch"
    assert install_command("other") == "pip install 'bprong[other]'"


def test_missing_packages_of_a_source_tree_that_is_not_installed(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    assert install_command("live") == "pip install 'bprong[live]'"
