"""Rows with images, read by the model's processor: token ids, labels, and what the vision tower is given.

A row has `images` (or one `image`) beside a chat in any of the formats of `formats`, as TRL has it. Where no message
says where they stand, the images come before the first message of the user.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alstlib.base.config import nearest_path
from alstlib.base.options import Json, Record
from alstlib.base.units import IGNORE
from alstlib.runs.corpus.formats import IMAGES, read_row
from alstlib.runs.corpus.samples import Document, Passages, inside, said_in_chat


def have_images(rows: Any) -> bool:
    """Whether any row of a corpus has an image."""
    columns = [name for name in IMAGES if name in rows.column_names]
    return bool(columns) and any(any(row.values()) for row in rows.select_columns(columns))


def get_processor(name: str, trust: bool = False, field: str = "model") -> Any:
    """The processor of a model that reads images, by the name or folder that a `field` of the run has.

    Raises:
        ValueError: the model has none, or it cannot be loaded.
    """
    from transformers import AutoProcessor

    try:
        made: Any = AutoProcessor.from_pretrained(name, trust_remote_code=trust)
    except Exception as error:
        raise ValueError(f"the data have images, but {field}='{name}' has no processor to load: {error}") from error
    if not hasattr(made, "image_processor"):
        raise ValueError(f"the data have images, but {field}='{name}' has no processor of images: take one that has")
    return made


class ImageRows:
    """Makes batches of rows with canonical columns, as the `data_collator` of a Trainer.

    A batch has int64 input_ids, labels and attention_mask [B, S], padded on the right, and the fields that the
    processor makes of images. Labels are on what the assistant says; a placeholder of a feature has none.

    Args:
        processor: that of the model, with a chat template.

    Raises:
        ValueError: a row is no chat, an image is not there or cannot be read, or the processor does not say which of
            its tokens stand for images.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(self, rows: Sequence[Record]) -> dict[str, torch.Tensor]:
        images = [open_images(row) for row in rows]
        chats = [self._chat(row, len(own)) for row, own in zip(rows, images)]
        made = self.processor(
            text=[text for text, _ in chats], images=images if any(images) else None, padding=True,
            padding_side="right", add_special_tokens=False, return_offsets_mapping=True,
            return_text_replacement_offsets=True,
        )  # fmt: skip
        replaced = made.pop("text_replacement_offsets", None) or [[] for _ in rows]
        if "offset_mapping" not in made or sum(map(len, replaced)) != sum(map(len, images)):
            raise ValueError(
                f"{type(self.processor).__name__} does not say which tokens stand for images, so that those of the "
                "assistant cannot be told apart: take another model, or transformers 5.18 or newer"
            )
        offsets = made.pop("offset_mapping")
        said = [_said(spans, *each) for (_, spans), *each in zip(chats, replaced, offsets)]
        made.convert_to_tensors("pt")
        labels = made["input_ids"].masked_fill(~torch.tensor(np.stack(said)), IGNORE)
        return {**made, "labels": labels}

    def document(self, row: Record) -> Document:
        """The tokens and labels of one row; none where it has no words."""
        example = read_row(row, chats=True)
        if not example.messages and not example.text:
            return Document(np.zeros(0, np.int32), np.zeros(0, np.int32))
        made = self([row])
        return Document(*(made[name][0].numpy().astype(np.int32) for name in ("input_ids", "labels")))

    def _chat(self, row: Record, images: int) -> tuple[str, Passages]:
        """The text of a row's chat, with one placeholder for each image, and the spans that the assistant says."""
        example = read_row(row, chats=True)
        if not example.messages:
            raise ValueError("a row of data with images must be a chat, such as images and messages")
        messages = _in_parts(example.messages, images)
        marked = sum(part.get("type") == "image" for message in messages for part in message["content"])
        if marked != images:
            raise ValueError(f"its messages have {marked} places for images, but it has {images} images")
        return said_in_chat(messages, self.processor, example.first)


def _in_parts(messages: Iterable[Record], images: int) -> list[Json]:
    """Messages whose contents are lists of parts, as processors take them. Where no message has a place for an image,
    all images come first in the first message of the user that is a text."""
    messages = list(messages)
    parts = [part for message in messages for part in message.get("content") or [] if isinstance(part, Mapping)]
    images = 0 if any(part.get("type") == "image" for part in parts) else images
    made: list[Json] = []
    for message in messages:
        content = message.get("content") or []
        if isinstance(content, str):
            content, text = [], [{"type": "text", "text": content}]
            if message["role"] == "user" and images:
                content, images = [{"type": "image"}] * images, 0
            content = [*content, *text]
        else:  # a reader of tables fills up the fields that other parts have
            content = [{name: value for name, value in part.items() if value is not None} for part in content]
        made.append({**message, "content": content})
    return made


def _said(spans: Passages, replaced: Sequence[Record], offsets: Passages) -> np.ndarray:
    """Which tokens begin in one of these spans of the text as it was before placeholders were replaced."""
    ends = [one["span"][1] for one in replaced]
    longer = [0, *(one["new_span"][1] - one["span"][1] for one in replaced)]
    moved = [[at + longer[bisect_right(ends, at)] for at in span] for span in spans]
    left, right = np.reshape(offsets, (-1, 2)).T
    return (left < right) & inside(moved, left) & ~inside([one["new_span"] for one in replaced], left)


def open_images(row: Record) -> list[Any]:
    """The images of a row, in RGB: files by their names, bytes, or images already.

    Raises:
        ValueError: an image is not there, or cannot be read.
    """
    given = [row[name] for name in IMAGES if row.get(name)]
    return [_opened(one) for each in given for one in (each if isinstance(each, list) else [each])]


def _opened(given: Any) -> Any:
    from PIL import Image, ImageOps

    if isinstance(given, Mapping):  # as `datasets` keeps them
        given = given.get("bytes") or given.get("path")
    path = Path(given).expanduser() if isinstance(given, str) else None
    if path is not None and not path.is_file():
        raise ValueError(f"its image '{path}' does not exist; {nearest_path(path)}")
    try:
        file = io.BytesIO(given) if isinstance(given, bytes) else path
        image = given if isinstance(given, Image.Image) else Image.open(file or given)
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # each reader of a format raises its own kinds
        raise ValueError(f"its image '{path or type(given).__name__}' cannot be read: {error}") from error
