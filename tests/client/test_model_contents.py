"""What a model computes with, wherever its modules keep it: nothing is passed over in silence."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvfs.errors import InvalidRequest

torch = pytest.importorskip("torch")


def digest(model: Any) -> bytes:
    from kvfs.connectors.memory import Contents

    return Contents(model).digest()


def make_model(seed: int = 3) -> Any:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(70, 40), torch.nn.LayerNorm(40), torch.nn.Linear(40, 8))
    model.register_buffer("cache", torch.zeros(4), persistent=False)
    return model.eval()


def quantised(model: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch calls it deprecated
        return torch.ao.quantization.quantize_dynamic(
            copy.deepcopy(model), {torch.nn.Linear}, dtype=torch.qint8
        )


def double(x: Any) -> Any:
    return 2 * x


def triple(x: Any) -> Any:
    return 3 * x


class Scale:
    """An ordinary object whose method is a hook, or in place of a model's own; it knows that method itself."""

    def __init__(self, factor: int) -> None:
        self.factor = factor
        self.itself = self.apply

    def apply(self, x: Any) -> Any:
        return self.factor * x


CHANGES: dict[str, Callable[[Any], object]] = {
    "a weight": lambda model: model[0].weight.data[3].mul_(2),
    "a buffer": lambda model: model.cache.add_(1),
    "a norm's epsilon": lambda model: setattr(model[1], "eps", 0.5),
    "a new setting": lambda model: setattr(model[2], "scaling", 2.0),
    "a setting in a list": lambda model: setattr(model[2], "scaling", [{"a": (1, 2.0)}]),
    "a type": lambda model: setattr(model[2], "compute_dtype", torch.float16),
    "a tensor that is no parameter": lambda model: setattr(model[2], "table", torch.ones(3)),
    "tensors in a list": lambda model: setattr(model[2], "tables", [torch.ones(3), torch.zeros(3)]),
    "a sparse tensor": lambda model: setattr(model[2], "table", torch.eye(5).to_sparse()),
    "a scale beside packed values": lambda model: setattr(model[0].weight, "scale", torch.ones(2)),
    "an object": lambda model: setattr(model[2], "config", SimpleNamespace(factor=8.0)),
    "a module that is not registered": lambda model: setattr(model[2], "hidden", [torch.nn.Linear(2, 2)]),
    "a function": lambda model: setattr(model[2], "act", double),
    "a function in place of its own": lambda model: setattr(model[2], "forward", double),
    "a function's arguments": lambda model: setattr(model[2], "act", functools.partial(double, x=2.0)),
    "a hook that is a method": lambda model: model[0].register_forward_hook(Scale(2).apply),
    "a hook": lambda model: model[0].register_forward_hook(lambda *given: None),
    "a module of another kind": lambda model: setattr(model, "3", torch.nn.ReLU()),
    "the mode": lambda model: model.train(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    model = make_model()
    before = digest(model)
    assert digest(make_model()) == digest(model) == before
    CHANGES[change](model)
    assert digest(model) != before
    assert digest(model) == digest(model)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1.0, 2.0], [1.0, 3.0]),
        ({"default": 8.0}, {"default": 2.0}),
        ({"default"}, {"other"}),
        (torch.tensor([1.0]), torch.tensor([2.0])),
        (double, triple),
        (functools.partial(double, x=1.0), functools.partial(double, x=2.0)),
        (SimpleNamespace(deep=SimpleNamespace(factor=1)), SimpleNamespace(deep=SimpleNamespace(factor=2))),
        (Scale(2).apply, Scale(3).apply),
        ([Scale(2).apply], [Scale(3).apply]),
        (functools.partial(Scale(2).apply, 1), functools.partial(Scale(3).apply, 1)),
        ({"scale": 2}.get, {"scale": 3}.get),
        ((2.0).__mul__, (3.0).__mul__),
    ],
)
def test_what_an_attribute_is_counts(one: Any, other: Any) -> None:
    digests = []
    for value in (one, copy.deepcopy(one), other):
        model = make_model()
        model[2].kept = value
        digests.append(digest(model))
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.Linear(2, 2),
        lambda: torch.ones(3),
        lambda: torch.nn.Parameter(torch.ones(3)),
        lambda: Scale(2),
    ],
    ids=["modules", "tensors", "parameters", "objects"],
)
def test_which_of_two_an_alias_is_counts(make: Callable[[], Any]) -> None:
    def with_alias(chosen: str) -> bytes:
        model = torch.nn.Module()
        torch.manual_seed(5)
        model.one, model.other = make(), make()
        model.used = getattr(model, chosen)
        return digest(model)

    assert with_alias("one") == with_alias("one") != with_alias("other")


@pytest.mark.filterwarnings("ignore:torch.quantize_per")
def test_the_scales_of_quantised_tensors_count() -> None:
    one = torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8)
    scaled = torch.quantize_per_tensor(torch.ones(3) * 2, 1.0, 0, torch.qint8)
    scales, zeros, values = torch.tensor([0.5, 1.0]), torch.zeros(2), torch.eye(2)
    rows = torch.quantize_per_channel(values, scales, zeros, 0, torch.qint8)
    columns = torch.quantize_per_channel(values, scales, zeros, 1, torch.qint8)
    assert torch.equal(one.int_repr(), scaled.int_repr())
    assert torch.equal(rows.int_repr(), columns.int_repr())
    digests = set()
    for value in (one, scaled, rows, columns):
        model = make_model()
        model[2].kept = value
        digests.add(digest(model))
    assert len(digests) == 4


def test_where_a_model_lies_does_not_count() -> None:
    digests = set()
    for name in ("/models/one", "/models/two"):
        model = make_model()
        model.name_or_path, model.config = name, SimpleNamespace(_name_or_path=name, layers=2)
        model.warnings_issued = {name: True}
        digests.add(digest(model))
    assert len(digests) == 1


def test_weights_that_are_packed_into_script_objects_count() -> None:
    model = make_model()
    other = copy.deepcopy(model)
    other[2].weight.data[5] *= -1
    one, same, tuned = quantised(model), quantised(model), quantised(other)
    assert type(one[0]._packed_params._packed_params) is torch.ScriptObject
    before = digest(one)
    assert digest(same) == before != digest(tuned)
    one[2].set_weight_bias(tuned[2].weight(), tuned[2].bias())
    assert digest(one) == digest(tuned)


def test_packed_weights_are_unpacked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvfs.connectors import memory

    model, sampled = quantised(make_model()), list[int]()
    before = digest(model)
    real = memory.sample

    def sample(tensors: Any) -> bytes:
        sampled.append(len(tensors))
        return real(tensors)

    monkeypatch.setattr(memory, "sample", sample)
    assert digest(model) == before
    assert len(sampled) == 1


class Opaque:
    __slots__ = ()

    def apply(self, x: Any) -> Any:
        return x


def test_what_nobody_can_look_into_is_refused() -> None:
    model = make_model()
    model[1].engine = Opaque()
    with pytest.raises(
        InvalidRequest, match=r"module '1' \(torch.*LayerNorm\) computes with '1.engine', .*Opaque"
    ):
        digest(model)


def test_a_method_of_what_nobody_can_look_into_is_refused() -> None:
    model = make_model()
    model[1].engine = Opaque().apply
    with pytest.raises(InvalidRequest, match=r"computes with '1.engine of', .*Opaque"):
        digest(model)


def test_hooks_that_are_methods_of_ordinary_objects_are_taken() -> None:
    """Of an object beside the model, of a module in it, of a class; functions of C, which have a module or class."""
    model, scale = make_model(), Scale(2)
    model[0].register_forward_hook(scale.apply)
    model.register_forward_pre_hook(model[1].forward)
    model[2].kept = [model.forward, dict.fromkeys, torch.relu, len]
    before = digest(model)
    assert digest(model) == before
    scale.factor = 3
    assert digest(model) != before


def test_a_circle_of_objects_ends() -> None:
    model, config = make_model(), SimpleNamespace(factor=1)
    config.itself, model.config = [config], config
    model[2].config, model[2].parent = config, [model]
    before = digest(model)
    config.factor = 2
    assert digest(model) != before
