"""What a vision-language model needs beside token ids: pixels in the order of their placeholders, and positions in three dimensions.

Every segment is laid out as it would be alone, so that packing changes nothing. A micro-batch without images in a batch that has
some gets a stand-in image behind its tokens, where nothing looks at it: the vision tower's gradients are reduced over all ranks, and
all must have some.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image as Pictures
from torch import nn

from molt_hpc.data.media import ImageError, ImageReader

if TYPE_CHECKING:
    from molt_hpc.train.logprob import Packed

Image = tuple[str, int, int]
"""Hash of an image, and the range of its placeholders in its segment."""


class Vision:
    """The inputs of one model; `reader` loads its images."""

    def __init__(self, module: nn.Module, reader: ImageReader):
        self._rope: Callable[..., Any] = module.model.get_rope_index
        self.reader = reader

    def complete(self, packed: Packed) -> Packed:
        """With a stand-in image behind it, if the batch has images and this micro-batch none."""
        if packed.images is None or any(packed.images):
            return packed
        pixels, grid = self.reader.preprocess(Pictures.new("RGB", (56, 56)))
        count, device = self._count(grid), packed.token_ids.device
        ids = torch.full((1, count), self.reader.token_id, device=device)
        positions = torch.arange(count, device=device)[None]
        return replace(packed, token_ids=torch.cat([packed.token_ids, ids], 1), position_ids=torch.cat([packed.position_ids, positions], 1),
                       lengths=[*packed.lengths, count], images=[*packed.images, [("", 0, count)]], stand_in=(pixels, grid))

    def _count(self, grid: torch.Tensor) -> int:
        return int(grid.prod()) // self.reader.merge_size ** 2

    def inputs(self, packed: Packed) -> dict[str, torch.Tensor]:
        """pixel_values float32 [P, D] and image_grid_thw int64 [M, 3], if there are images, and position_ids int64 [4, 1, T].

        The first row of position_ids is the place in the segment, the others are the model's own. Raises ImageError if an image is not
        there, or takes another number of embeddings than it has placeholders.
        """
        device, types = packed.token_ids.device, (packed.token_ids[0] == self.reader.token_id).int()
        pixels, grids, positions, start = [], [], [], 0
        for length, images in zip(packed.lengths, packed.images or [[]] * len(packed.lengths), strict=True):
            part, seen = slice(start, start + length), []
            for digest, begin, end in images:
                values, grid = self.reader.pixels(digest) if digest else packed.stand_in
                if self._count(grid) != end - begin or not bool(types[part][begin:end].all()):
                    raise ImageError(f"image {digest}: {self._count(grid)} embeddings, but {int(types[part][begin:end].sum())} placeholders in "
                                     f"the {end - begin} tokens that the rollout counted for it")
                pixels.append(values)
                seen.append(grid)
            if sum(end - begin for _, begin, end in images) != int(types[part].sum()):
                raise ImageError(f"a segment of {length} tokens has {int(types[part].sum())} placeholders, of which its images fill "
                                 f"{sum(end - begin for _, begin, end in images)}")
            grid = torch.cat(seen).to(device) if seen else None
            positions.append(self._rope(packed.token_ids[:, part], mm_token_type_ids=types[None, part], image_grid_thw=grid)[0])
            grids += seen
            start += length
        inputs = {"position_ids": torch.cat([packed.position_ids[None], torch.cat(positions, 2)])}
        return inputs | ({"pixel_values": torch.cat(pixels).to(device), "image_grid_thw": torch.cat(grids).to(device)} if pixels else {})
