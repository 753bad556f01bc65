"""Let torchvision's ordinary wheel, which links CUDA, be imported beside a torch for the CPU.

Python imports this file at its start if its folder is on PYTHONPATH. `VECTORLM_TORCHVISION` is a folder with the wheel,
where PyTorch's own CPU build cannot be had. Its compiled operators are missing then; models for text use none of them.
"""

import importlib.abc
import os
import sys

sys.path.append(os.environ["VECTORLM_TORCHVISION"])

SIGNATURES = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
"""Operators for which torchvision registers shapes when it is imported."""


class DeclaresOperators(importlib.abc.MetaPathFinder):
    """Declares the operators just before torchvision is imported."""

    def find_spec(self, fullname, path=None, target=None):
        """Find nothing; torchvision is found by the next finder."""
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            kept.append(torch.library.Library("torchvision", "DEF"))
            for signature in SIGNATURES:
                kept[0].define(signature)


kept = []
"""The library, whose operators would end with it."""
sys.meta_path.insert(0, DeclaresOperators())
