"""Questions about a picture, with a magnifying glass: the policy may ask for a part of it and gets that part as another picture.

A row has `images` (the first one is meant) and a label that math_boxed would take. A part is asked for in percent of the whole,
<zoom>left top right bottom</zoom>, and the answer is \\boxed{...}. Needs a vision-language model.
"""

import asyncio
import io
import re

from grading import boxed, grade
from PIL import Image

from molt_hpc.agents import Env, Result
from molt_hpc.data.media import image_bytes

ZOOM = re.compile(r"<zoom>\s*(\d+)\s+(\d+)\s+(\d+)\s+(\d+)\s*</zoom>")
MAX_ZOOMS = 4
SMALLEST = 28
"""Pixels of a side, below which a part shows nothing."""


class ZoomEnv(Env):
    def reset(self, state):
        self.picture, self.zooms = Image.open(io.BytesIO(image_bytes(state["images"][0]))), 0
        return state["observation"]

    async def step(self, state):
        asked = ZOOM.findall(state["reply_text"])
        if not asked or boxed(state["reply_text"]) is not None or self.zooms == MAX_ZOOMS:
            found = await asyncio.to_thread(grade, state["reply_text"], state["label"])
            return Result(reward=found["reward"], info={"zooms": self.zooms, "answered": found["answered"]})
        self.zooms += 1
        width, height = self.picture.size
        left, top, right, bottom = (int(share) * size // 100 for share, size in zip(asked[-1], (width, height, width, height)))
        if min(right, width) - left < SMALLEST or min(bottom, height) - top < SMALLEST:
            return Result(observation="There is nothing to see: give left < right and top < bottom in percent.", terminated=False)
        part = self.picture.crop((left, top, min(right, width), min(bottom, height)))
        return Result(observation="This part: <image>", images=[part], terminated=False)
