from __future__ import annotations

from torch import Tensor

from museum.plain.pipeline import Pipe, send_gradient

SETTINGS = {"pp": 2}


def divided_again(gradient: Tensor, pipe: Pipe) -> None:
    send_gradient(gradient / pipe.ranks.settings.micro_batches, pipe)


PATCHES = {"send_gradient": divided_again}
