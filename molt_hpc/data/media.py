"""Images by content: each is written once to <run>/media/ab/abcdef..., and records name it by the SHA-256 of its bytes.

In a message an image is the part {"type": "image", "image": WHERE}, and WHERE is a path, a data URI or bytes until `stored` has
put the image into the run's folder; from then on it is the hash. Engine and trainer read the same file with the same processor.
"""

import base64
import binascii
import functools
import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from PIL import ExifTags, Image, ImageOps

from molt_hpc.data.shards import write_whole

FOLDER = "media"
MARK = "<image>"
"""What stands for an image in a text that comes with a list of images."""
IMAGE_BYTES = 20 << 20
IMAGE_PIXELS = 1 << 26
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""A larger image, or one of another format, is refused."""


ROW_CHARACTERS = 4 << 20
"""A longer data URI in a prompt file is refused: prompts travel in headers."""


class ImageError(ValueError):
    """An image that cannot be used, or images and placeholders that do not go together."""


class MediaStore:
    """The images of a run."""

    def __init__(self, run: str | Path):
        self.folder = Path(run).absolute() / FOLDER
        self._known: dict[str, str] = {}

    def path(self, digest: str) -> Path:
        return self.folder / digest[:2] / digest

    def put(self, raw: bytes) -> str:
        """Keep an image and return its hash: of `raw` if that is upright and RGB, else of a PNG that is. Raises ImageError."""
        given = hashlib.sha256(raw).hexdigest()
        if given not in self._known:
            plain = _plain(raw)
            digest = hashlib.sha256(plain).hexdigest()
            if not self.path(digest).exists():
                write_whole(self.path(digest), plain)
            self._known[given] = digest
        return self._known[given]

    def read(self, digest: str) -> bytes:
        """Raises ImageError if the image is not there or not what it was."""
        try:
            raw = self.path(digest).read_bytes()
        except FileNotFoundError:
            raise ImageError(f"{self.path(digest)}: the image that a record names is not there") from None
        if hashlib.sha256(raw).hexdigest() != digest:
            raise ImageError(f"{self.path(digest)}: damaged, its content is not that of its name")
        return raw

    def data_uri(self, digest: str) -> str:
        raw = self.read(digest)
        return f"data:image/{_opened(raw).format.lower()};base64,{base64.b64encode(raw).decode()}"


def _opened(raw: bytes) -> Image.Image:
    return Image.open(io.BytesIO(raw), formats=FORMATS)


def _png(image: Image.Image) -> bytes:
    output = io.BytesIO()
    image.save(output, "PNG")
    return output.getvalue()


def _plain(raw: bytes) -> bytes:
    if len(raw) > IMAGE_BYTES:
        raise ImageError(f"an image of {len(raw)} bytes, the limit is {IMAGE_BYTES}: send a smaller one")
    try:
        image = _opened(raw)
        if image.width * image.height > IMAGE_PIXELS:
            raise ImageError(f"an image of {image.width} x {image.height} pixels, the limit is {IMAGE_PIXELS}: send a smaller one")
        image.load()
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ImageError(f"{len(raw)} bytes that are no readable image ({', '.join(FORMATS)}): {error}") from None
    if image.mode == "RGB" and image.getexif().get(ExifTags.Base.Orientation, 1) == 1:
        return raw
    upright = ImageOps.exif_transpose(image).convert("RGBA")
    return _png(Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright).convert("RGB"))


# where an image comes from -----------------------------------------------------------------


def image_bytes(where: Any, folder: str | Path = "") -> bytes:
    """The bytes of an image given as bytes, data URI, or path or file URL within `folder` (empty: files are refused). Raises ImageError."""
    if isinstance(where, bytes):
        return where
    if not isinstance(where, str):
        raise ImageError(f"an image given as {type(where).__name__}: expected bytes, a data URI or a path")
    address = urlsplit(where[:4096])
    if address.scheme == "data":
        head, _, text = where.partition(";base64,")
        try:
            return base64.b64decode(text or "?", validate=True)
        except binascii.Error:
            raise ImageError(f"a data URI ({head[:40]!r}...) that is not base64") from None
    if address.scheme not in ("", "file"):
        raise ImageError(f"{where[:200]!r}: images are not fetched from elsewhere; send a data URI or name a local file")
    path = Path(unquote(address.path) if address.scheme else where).resolve()
    if not folder or Path(folder).resolve() not in path.parents:
        raise ImageError(f"{path}: only files under agent.image_folder ({folder or 'unset'}) can be named")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ImageError(f"{path}: the image cannot be read: {error.strerror}") from None


def portable(value: Any) -> bytes | str:
    """What the user's code gave as an image, as something that travels: a picture of PIL becomes a PNG, a path the file's bytes."""
    if isinstance(value, Image.Image):
        return _png(value)
    if isinstance(value, str) and value.startswith("data:"):
        return value
    return image_bytes(str(value) if isinstance(value, Path) else value, "/")


# images in messages ------------------------------------------------------------------------


def parts_of(content: Any) -> str | list[dict[str, Any]]:
    """A message's content as text, or as parts of text and images if it has an image; OpenAI's forms are taken. Raises ValueError."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ValueError("content must be text or a list of parts")
    parts = [_part(part) for part in content]
    return parts if any(part["type"] == "image" for part in parts) else "".join(part["text"] for part in parts)


def _part(part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind not in ("image", "image_url"):
        raise ValueError(f"content parts of type {kind} are not supported")
    where = part.get(kind, part.get("url"))
    if isinstance(where, dict):
        if where.get("detail") not in (None, "auto"):
            raise ValueError(f"image_url with detail {where['detail']!r} is not supported: only auto")
        where = where.get("url")
    return {"type": "image", "image": where}


def has_images(messages: list[dict[str, Any]]) -> bool:
    return any(isinstance(message.get("content"), list) for message in messages)


def images_of(messages: list[dict[str, Any]]) -> list[Any]:
    """What stands in the image parts, in their order."""
    return [part["image"] for m in messages if isinstance(m.get("content"), list) for part in m["content"] if part["type"] == "image"]


def map_images(messages: list[dict[str, Any]], change: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with `change(where)` in place of each image part."""
    return [m if not isinstance(m.get("content"), list) else
            m | {"content": [change(part["image"]) if part["type"] == "image" else part for part in m["content"]]} for m in messages]


def stored(store: MediaStore, messages: list[dict[str, Any]], folder: str | Path = "") -> list[dict[str, Any]]:
    """The messages with hashes for images, which are then in the store. All or nothing: raises ImageError for the first that fails."""
    return map_images(messages, lambda where: {"type": "image", "image": store.put(image_bytes(where, folder))})


def with_images(text: str, images: list[Any]) -> str | list[dict[str, Any]]:
    """A content whose marks are the images in their order; without marks they stand in front of the text. Raises ImageError."""
    if not images:
        return text
    pieces = (text if MARK in text else MARK * len(images) + text).split(MARK)
    if len(pieces) != len(images) + 1:
        raise ImageError(f"{len(images)} images for {len(pieces) - 1} marks {MARK}")
    parts = []
    for piece, image in zip(pieces, [*images, None], strict=True):
        parts += [{"type": "text", "text": piece}] if piece else []
        parts += [{"type": "image", "image": image}] if image is not None else []
    return parts


def messages_with_images(messages: list[dict[str, Any]], images: list[Any], folder: Path) -> list[dict[str, Any]]:
    """A prompt row's messages with its images (paths relative to `folder`, data URIs) as parts. Raises ValueError.

    `images` take the places of the marks in the messages' texts, or stand in front of the last user's text if there are none.
    """
    messages = [m | {"content": parts_of(m["content"])} if isinstance(m.get("content"), list) else m for m in messages]
    if images:
        texts = [m for m in messages if isinstance(m.get("content"), str)]
        marked = [m for m in texts if MARK in m["content"]] or [m for m in texts if m["role"] == "user"][-1:]
        counts = [m["content"].count(MARK) or len(images) for m in marked]
        if sum(counts) != len(images):
            raise ImageError(f"{len(images)} images for {sum(counts)} marks {MARK}")
        coming = iter(images)
        filled = {id(m): with_images(m["content"], [next(coming) for _ in range(count)]) for m, count in zip(marked, counts, strict=True)}
        messages = [m | {"content": filled.get(id(m), m.get("content"))} for m in messages]
    return map_images(messages, lambda where: {"type": "image", "image": _located(where, folder)})


def _located(where: Any, folder: Path) -> str:
    if isinstance(where, str) and where.startswith("data:"):
        if len(where) > ROW_CHARACTERS:
            raise ImageError(f"an image of {len(where)} characters in a row: put it into a file and give the file's path")
        return where
    if not isinstance(where, str) or not (path := (folder / where).absolute()).is_file():
        raise ImageError(f"there is no image {where!r} beside {folder}")
    return str(path)


# images and tokens -------------------------------------------------------------------------


class ImageReader:
    """How a model sees images of a store: how many tokens each one takes, and its pixels. token_id: of the placeholder."""

    def __init__(self, processor: Any, token_id: int, store: MediaStore):
        self._processor, self.token_id, self.store, self.merge_size = processor, token_id, store, processor.merge_size
        self._counts: dict[str, int] = {}
        self.pixels = functools.lru_cache(maxsize=64)(self._pixels)

    def count(self, digest: str) -> int:
        """Embeddings, and so placeholder tokens, of an image."""
        if digest not in self._counts:
            image = _opened(self.store.read(digest))
            self._counts[digest] = self._processor.get_number_of_image_patches(image.height, image.width, {}) // self.merge_size ** 2
        return self._counts[digest]

    def _pixels(self, digest: str) -> tuple[Any, Any]:
        """(patches float32 [P, D], grid int64 [1, 3]) of an image, as torch tensors."""
        return self.preprocess(_opened(self.store.read(digest)))

    def preprocess(self, image: Image.Image) -> tuple[Any, Any]:
        found = self._processor(images=[image], return_tensors="pt")
        return found["pixel_values"], found["image_grid_thw"]

    def place(self, token_ids: list[int], digests: list[str]) -> tuple[list[int], list[tuple[int, int]]]:
        """(ids with each placeholder repeated for its image, the repeated ones' ranges). Raises ImageError if the numbers differ."""
        found = token_ids.count(self.token_id)
        if found != len(digests):
            raise ImageError(f"{found} image placeholders for {len(digests)} images: did a text or a reply hold the token {self.token_id}?")
        full, spans, coming = [], [], iter(digests)
        for token in token_ids:
            times = self.count(next(coming)) if token == self.token_id else 1
            spans += [(len(full), len(full) + times)] if token == self.token_id else []
            full += [token] * times
        return full, spans


def image_reader(model: str | Path, run: str | Path) -> ImageReader | None:
    """For a model folder's images; None if the model takes none, or is not of the kind that is supported (Qwen-VL's)."""
    from transformers import AutoConfig, AutoImageProcessor

    config = AutoConfig.from_pretrained(model)
    if getattr(config, "image_token_id", None) is None or not hasattr(config, "vision_config"):
        return None
    try:
        processor = AutoImageProcessor.from_pretrained(model)
    except OSError:  # a folder without one serves and trains text
        return None
    usable = hasattr(processor, "merge_size") and hasattr(processor, "get_number_of_image_patches")
    return ImageReader(processor, config.image_token_id, MediaStore(run)) if usable else None
