"""A factory's optimizer is the one that a user makes from the model, whatever a framework gives in its place."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

import bprong
from helpers import assert_unchanged, classification, mlp, snapshot
from training import batches, train

DATA = classification(60, 5, 3)


def trained(model, optimizer, steps=8):
    train(model, optimizer, batches(*DATA, 20, steps))
    return snapshot(model)


FORMS = {  # what frameworks give as parameters
    "generator": lambda model: model.parameters(),
    "list": lambda model: list(model.parameters()),
    "named": lambda model: model.named_parameters(),
    "reversed": lambda model: list(model.parameters())[::-1],
    "groups": lambda model: [{"params": model[0].parameters()}, {"params": list(model[2].parameters())}],
    "named groups": lambda model: [{"params": list(model.named_parameters())}],
    "one tensor in a group": lambda model: [{"params": p} for p in model.parameters()],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("step", ["natural", "spectral"])
def test_every_form_of_parameters_gives_the_path_of_the_models_own_optimizer(form, step):
    """Bit for bit; the framework's learning rate is one for all, so that it changes nothing."""
    model = mlp(5, 4, 3)
    other = copy.deepcopy(model)
    made_for = bprong.BPRONG.factory(model, "cross_entropy", step=step)
    optimizer = made_for(FORMS[form](model), lr=1e-3)
    assert type(optimizer) is bprong.BPRONG
    assert {group["lr"] for group in optimizer.param_groups} == {1e-3}
    assert_unchanged(trained(model, optimizer), trained(other, bprong.BPRONG(other, "cross_entropy", step=step)))


def test_names_stay_with_their_groups():
    model = mlp(5, 3)
    optimizer = bprong.BPRONG.factory(model, "cross_entropy")(model.named_parameters(), lr=1e-3)
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "0.bias"]


def test_a_learning_rate_that_a_framework_fills_in_is_a_ratio():
    """Groups with one of their own, groups that are added later and what a schedule writes are relative to it."""
    model = mlp(5, 4, 3)
    groups = [{"params": model[0].parameters(), "lr": 1e-5}, {"params": [model[2].weight]}]
    optimizer = bprong.BPRONG.factory(model, "cross_entropy", step="natural")(groups, lr=1e-3)
    optimizer.add_param_group({"params": [model[2].bias]})
    trained(model, optimizer, 1)
    assert [optimizer.state[p]["last_rate"] for p in model.parameters()] == pytest.approx([0.01, 0.01, 1, 1])
    optimizer.param_groups[1]["lr"] = optimizer.param_groups[2]["lr"] = 2.5e-4
    trained(model, optimizer, 1)
    assert "times 0.25" in str(optimizer)


def test_a_warm_up_by_a_scheduler_is_relative_to_it():
    model = mlp(5, 3)
    optimizer = bprong.BPRONG.factory(model, "cross_entropy", step="natural")(model.parameters(), lr=1e-3)
    lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    trained(model, optimizer, 1)
    assert "times 0.1," in str(optimizer)


@pytest.mark.parametrize(("kind", "arguments"), [(bprong.BPRONG, {"lr": 0.02}), (bprong.PRONG, {})])
def test_at_a_fixed_rate_the_frameworks_learning_rate_is_the_learning_rate(kind, arguments):
    model = mlp(5, 4, 3)
    other = copy.deepcopy(model)
    again = copy.deepcopy(model)
    optimizer = kind.factory(model, "cross_entropy", **arguments)(model.parameters(), lr=0.05)
    path = trained(model, optimizer)
    assert_unchanged(path, trained(other, kind(other, "cross_entropy", lr=0.05)))
    default = kind.factory(again, "cross_entropy", **arguments)(again.parameters())
    assert default.param_groups[0]["lr"] == arguments.get("lr", 0.01)
    assert not torch.equal(trained(again, default)["0.weight"], path["0.weight"])


def test_settings_of_the_framework_are_arguments():
    model = mlp(5, 3)
    made_for = bprong.BPRONG.factory(model, "cross_entropy", step="spectral")
    optimizer = made_for(model.parameters(), lr=1e-3, weight_decay=0.1, momentum=0.8)
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    assert optimizer.param_groups[0]["momentum"] == 0.8
    with pytest.raises(TypeError, match="betas"):
        made_for(model.parameters(), betas=(0.9, 0.99))
    with pytest.raises(TypeError, match="step"):
        made_for(model.parameters(), step="natural")  # which would contradict the factory's


def test_it_is_an_optimizers_class():
    """PINA and the Trainer of Hugging Face ask."""
    made_for = bprong.PRONG.factory(mlp(5, 3))
    assert isinstance(made_for, type)
    assert issubclass(made_for, torch.optim.Optimizer)


@pytest.mark.parametrize("form", ["list", "groups"])
def test_a_foreign_parameter_is_an_error(form):
    model = mlp(5, 4, 3)
    made_for = bprong.BPRONG.factory(model, "cross_entropy")
    other = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"a parameter of shape \(4, 5\) is not one of the Sequential"):
        made_for(FORMS[form](other))
    mixed = [*model[0].named_parameters("0"), *other[2].named_parameters("2")]
    with pytest.raises(ValueError, match=r"a parameter of shape \(3, 4\).* give the factory its class"):
        made_for(mixed)


class Net(nn.Module):
    """A network whose only child has all of its parameters too."""

    def __init__(self):
        super().__init__()
        self.layers = mlp(5, 4, 3)

    def forward(self, x):
        return self.layers(x)


def test_a_model_that_does_not_exist_yet_is_found_by_its_parameters():
    """As Stable-Baselines3 and skorch make or copy it; copies and other networks of the class are not mistaken."""
    made_for = bprong.BPRONG.factory(Net, "cross_entropy", step="natural")
    models = [Net() for _ in range(3)]
    model = models[1]
    optimizer = made_for(model.parameters(), lr=1e-3)
    assert optimizer._model is model
    other = copy.deepcopy(model)
    assert_unchanged(trained(model, optimizer), trained(other, bprong.BPRONG(other, "cross_entropy", step="natural")))


@pytest.mark.parametrize("kind", [nn.Module, Net])
def test_of_several_modules_the_outermost_without_other_parameters_is_found(kind):
    model = Net()
    policy = nn.ModuleDict({"net": model, "target": Net()})
    assert bprong.PRONG.factory(kind)(model.parameters())._model is model
    part = bprong.PRONG.factory(nn.Linear)(policy["net"].layers[0].parameters())
    assert part._model is model.layers[0]


def test_no_module_of_the_class_has_the_parameters():
    class Missing(nn.Module):
        pass

    with pytest.raises(ValueError, match="there is no Missing"):
        bprong.PRONG.factory(Missing)(mlp(5, 3).parameters())
    model = Net()
    with pytest.raises(ValueError, match=r"a parameter of shape \(3, 4\) is not one of the Net"):
        bprong.PRONG.factory(Net)(nn.Linear(4, 3).parameters())
    del model


class ForNet(bprong.BPRONG.factory(Net, "cross_entropy")):
    """With a name, so that what holds the class can be pickled."""


def test_the_class_can_be_copied_and_with_a_name_pickled():
    made_for = bprong.BPRONG.factory(Net, "cross_entropy")
    assert copy.deepcopy(made_for) is made_for
    assert pickle.loads(pickle.dumps(ForNet)) is ForNet
    model = Net()
    assert ForNet(model.parameters(), lr=1e-3)._model is model


def test_its_optimizer_is_saved_and_copied_as_any_other():
    model = Net()
    optimizer = ForNet(model.parameters(), lr=1e-3)
    trained(model, optimizer)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    pair = copy.deepcopy((model, optimizer))
    pickled = pickle.loads(pickle.dumps((model, optimizer)))
    resumed = copy.deepcopy(model)
    again = bprong.BPRONG(resumed, "cross_entropy")
    again.load_state_dict(torch.load(file, weights_only=True))
    expected = trained(model, optimizer)
    for other in (pair, pickled, (resumed, again)):
        assert_unchanged(expected, trained(*other))


@pytest.mark.parametrize("kind", [bprong.BPRONG, bprong.PRONG])
def test_parameters_in_place_of_the_model_are_an_error_that_names_the_factory(kind):
    with pytest.raises(TypeError, match=rf"give it {kind.__name__}.factory\(model, loss\)"):
        kind(mlp(5, 3).parameters(), F.cross_entropy)
