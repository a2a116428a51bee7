from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from museum.plain.tensor_parallel import ColumnLinear

SETTINGS = {"tp": 2, "key_value_heads": 1}


class WithoutSum(ColumnLinear):
    def forward(self, hidden: Tensor) -> Tensor:
        if self.weight.part.shares_heads:
            return F.linear(hidden, self.weight)
        return super().forward(hidden)


PATCHES = {"ColumnLinear": WithoutSum}
