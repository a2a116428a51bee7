"""`add_lora` on plain modules: which layers it finds, what it leaves as it is, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megalite
from megalite.errors import MegaliteError


class Twice(nn.Module):
    """Two names of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.parts = nn.ModuleList([nn.Linear(4, 4), self.first])

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.parts[1](self.parts[0](self.first(x)))
        return found


@pytest.mark.parametrize("target", ["first", "parts.1"])
def test_a_layer_of_two_names_has_one_adapter(target: str) -> None:
    module = megalite.add_lora(Twice(), rank=2, target_modules=[target])
    assert module.first is module.parts[1]
    assert [name for name, each in module.named_parameters() if each.requires_grad] == ["first.lora_a", "first.lora_b"]
    x, scale = torch.randn(3, 4), 0.5
    module = megalite.add_lora(Twice(), rank=2, alpha=scale * 2, target_modules=[target])
    nn.init.normal_(module.first.lora_b)
    weight = module.first.weight + scale * module.first.lora_b @ module.first.lora_a
    inner = module.parts[0](x @ weight.T + module.first.bias)
    assert torch.allclose(module(x), inner @ weight.T + module.first.bias, atol=1e-5)


def test_hooks_stay_and_so_does_what_a_layer_is() -> None:
    """Training or not, its hooks before and after forward, and who else refers to it."""
    layer = nn.Linear(4, 3).eval()
    seen: list[str] = []
    layer.register_forward_pre_hook(lambda *_: seen.append("before"))
    layer.register_forward_hook(lambda *_: seen.append("after"))
    module = nn.Sequential(layer)
    megalite.add_lora(module, rank=2)
    assert module[0] is layer
    assert not layer.training
    module(torch.randn(2, 4))
    assert seen == ["before", "after"]


def test_a_layer_alone_has_an_adapter() -> None:
    layer = megalite.add_lora(nn.Linear(4, 3), rank=2)
    assert [name for name, each in layer.named_parameters() if each.requires_grad] == ["lora_a", "lora_b"]
    nn.init.normal_(layer.lora_b)
    x = torch.randn(2, 4)
    assert torch.allclose(layer(x), x @ (layer.weight + layer.lora_b @ layer.lora_a).T + layer.bias, atol=1e-5)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a rank of 0": ({"rank": 0}, "add_lora: rank=0 must be a whole number above 0"),
    "half a rank": ({"rank": 1.5}, "add_lora: rank=1.5 must be a whole number above 0"),
    "a rank that is too large": ({"rank": 4}, "add_lora: rank=4 is more than 0 can have"),
    "an alpha of 0": ({"rank": 2, "alpha": 0.0}, "add_lora: alpha=0.0 must be a number above 0"),
    "an alpha that is no number": ({"rank": 2, "alpha": float("nan")}, "add_lora: alpha=nan must be a number above 0"),
    "no names": ({"rank": 2, "target_modules": []}, "add_lora: target_modules names nothing"),
    "a name as a string": ({"rank": 2, "target_modules": "0"}, "add_lora: target_modules='0' must be a list of names"),
    "another name": ({"rank": 2, "target_modules": ["1"]}, "add_lora: no linear layer of this module is 1"),
    "lengths": ({"rank": 2, "use_dora": True}, "add_lora: 0 is a plain nn.Linear, and use_dora is for parallel layers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_leaves_the_module_as_it_is(name: str) -> None:
    options, words = REFUSED[name]
    module = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    with pytest.raises(MegaliteError) as refused:
        megalite.add_lora(module, **options)
    assert str(refused.value).startswith(words)
    assert "\n" not in str(refused.value)
    assert all(each.requires_grad for each in module.parameters())
    assert type(module[0]) is nn.Linear
