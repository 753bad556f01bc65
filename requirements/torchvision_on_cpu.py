"""Let torchvision's ordinary wheel, which links CUDA, be imported beside a torch for the CPU.

`.ci/setup` copies this file into the environment's site-packages where PyTorch's own CPU build of torchvision cannot be
had, with a .pth file that imports it whenever Python starts. torchvision's compiled operators are missing then; image
processors use none of them.
"""

import importlib.abc
import sys

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
