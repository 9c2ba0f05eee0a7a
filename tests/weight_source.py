"""A weight source made of tensors in memory."""

import torch


class TensorSource:
    """Named tensors; tests change them between updates."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.tensors = tensors

    def metadata(self):
        return [(name, t.dtype, tuple(t.shape)) for name, t in self.tensors.items()]

    def __iter__(self):
        return iter(self.tensors.items())
