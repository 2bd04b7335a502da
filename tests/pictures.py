"""Small models that read images, samples with images and videos, and what plain transformers makes of them."""

import copy
import functools
import json
from pathlib import Path

import torch
import transformers
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from zoo import trainable

IMAGE, VIDEO = 90, 91
TABLE = yaml.safe_load(Path(__file__).with_name("pictures.yaml").read_text())
MODELS, TEXT = TABLE["MODELS"], TABLE["shared"]["text"]
VIDEOS = [name for name in MODELS if name.startswith("qwen")]
GRIDS = [(1, 2, 4), (1, 4, 4), (1, 2, 2), (1, 6, 2), (1, 4, 6), (1, 2, 6)]
"""Sizes of images in turn: frames, and patches of each side."""


def small_vlm(name, dtype=torch.float32):
    text, tower, own = copy.deepcopy(MODELS[name])  # a config changes what it is given
    kind = name.partition(" ")[0]
    made = transformers.CONFIG_MAPPING[kind](
        text_config=text, vision_config=tower, image_token_id=IMAGE, video_token_id=VIDEO, image_token_index=IMAGE,
        tie_word_embeddings=False, **own,
    )  # fmt: skip
    return trainable_vlm(made, dtype)


def trainable_vlm(config, dtype):
    """A model of such a config whose every gradient counts (`zoo.trainable`)."""
    model = trainable(config, dtype, auto=transformers.AutoModelForImageTextToText, attn_implementation="eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def small_gemma():
    """Tokens of an image attend to each other in both directions."""
    tower = {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
             "num_attention_heads": 2, "image_size": 8, "patch_size": 2}  # fmt: skip
    text = {**TEXT, "sliding_window": 16, "layer_types": ["full_attention"] * 3}
    config = transformers.Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=4)
    return transformers.AutoModelForImageTextToText.from_config(config)


def sample(parts, seed, picture, nested=False):
    """A sample of text and images: a number of tokens of text, or `image`, or `video`, in turn. `picture` makes the
    tokens and the fields of an image or a video. Fields that are nested have a dimension for the row."""
    g, ids, fields = torch.Generator().manual_seed(seed), [], {}
    for i, part in enumerate(parts):
        if isinstance(part, int):
            ids += torch.randint(3, 80, (part,), generator=g).tolist()
            continue
        tokens, made = picture(part, i + seed, g)
        ids += tokens
        for name, value in made.items():
            fields.setdefault(name, []).append(value)
    ids = torch.tensor([ids])
    one = {name: torch.cat(values) for name, values in fields.items()}
    one = {name: value[None] for name, value in one.items()} if nested else one
    return {"input_ids": ids, "labels": ids.masked_fill(ids >= IMAGE, -100), **one}


def document(name, parts, seed=0):
    """A sample for the small model of this name."""
    kind = name.partition(" ")[0]

    def picture(part, place, g):
        t, h, w = GRIDS[place % len(GRIDS)]
        if kind.startswith(("qwen", "glm")):
            if part == "image":
                tokens, pixels, grid = [IMAGE] * (h * w // 4), "pixel_values", "image_grid_thw"
            else:
                t, pixels, grid = 3, "pixel_values_videos", "video_grid_thw"
                time = [70] * kind.startswith("qwen3")  # is written before each frame
                tokens = t * (time + [VIDEO] * (h * w // 4))
            return tokens, {pixels: torch.randn(t * h * w, 24, generator=g), grid: torch.tensor([[t, h, w]])}
        if kind == "mistral3" or "pixtral" in name:
            side = 4 if kind == "mistral3" else 2
            pixels, size = torch.zeros(1, 3, 24, 24), (h * side, w * side)
            pixels[..., : size[0], : size[1]] = torch.randn(3, *size, generator=g)
            return [IMAGE] * (h * w), {"pixel_values": pixels, "image_sizes": torch.tensor([size])}
        return [IMAGE] * (16 if kind == "llava" else 4), {"pixel_values": torch.randn(1, 3, 8, 8, generator=g)}

    return sample(parts, seed, picture, nested=kind in ("idefics3", "smolvlm"))


def joined(documents, lengths=True):
    """Documents packed into one row."""
    names = {n: None for one in documents for n in one}
    nested = any(one["pixel_values"].ndim == 5 for one in documents if "pixel_values" in one)
    made = {}
    for name in names:
        along = 1 if name in ("input_ids", "labels") or (nested and name.startswith("pixel")) else 0
        made[name] = torch.cat([one[name] for one in documents if name in one], along)
    return {**made, "document_lengths": [[one["input_ids"].shape[1] for one in documents]]} if lengths else made


def rows_of(documents):
    """Documents as rows of a micro-batch, padded on the right, and with images of zeros where images lie by row."""

    def padded(tensors, fill=0):
        return pad_sequence(list(tensors), batch_first=True, padding_value=fill)

    ids = [one["input_ids"][0] for one in documents]
    made = joined(documents, lengths=False)
    made |= {"input_ids": padded(ids, 2), "attention_mask": padded(map(torch.ones_like, ids))}
    made["labels"] = padded((one["labels"][0] for one in documents), -100)
    if made["pixel_values"].ndim == 5:
        made["pixel_values"] = padded(one["pixel_values"][0] for one in documents if "pixel_values" in one)
    return made


def plain_vlm(model, documents):
    """Loss and gradients of the mean over all labels, of plain transformers, document by document."""
    model, total = copy.deepcopy(model), torch.zeros((), dtype=torch.float64)
    tokens = sum(int((one["labels"][:, 1:] != -100).sum()) for one in documents)
    for one in documents:
        ids = one["input_ids"]
        given = {n: t for n, t in one.items() if n != "labels"}
        if "image_grid_thw" in one or "video_grid_thw" in one:
            given["mm_token_type_ids"] = (ids == IMAGE).long() + 2 * (ids == VIDEO).long()
        logits = model(**given, use_cache=False).logits[:, :-1].flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        total = total + nn.functional.cross_entropy(logits, one["labels"][:, 1:].flatten(), reduction="sum") / tokens
    total.backward()
    return total.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


WORDS = [f"w{i}" for i in range(IMAGE - 6)]
CHAT = (
    "{% for m in messages %}{{ 'A: ' if m['role'] == 'assistant' else 'U: ' }}{% for part in m['content'] %}"
    "{{ ' w0 <|image_pad|> w1 ' if part['type'] == 'image' else part['text'] }}{% endfor %} . {% endfor %}"
)


class Processor(Qwen2VLProcessor):
    """Qwen2-VL's own without videos, which need torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = IMAGE, VIDEO
        transformers.ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


@functools.cache
def processor():
    """Makes batches for the small qwen2_vl: one token for each word, patches of 2 x 2 pixels."""
    names = ["<pad>", "<eos>", "<unk>", "A:", "U:", ".", *WORDS, "<|image_pad|>", "<|video_pad|>"]
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    text = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        additional_special_tokens=["<|image_pad|>", "<|video_pad|>"],
    )  # fmt: skip
    images = Qwen2VLImageProcessorPil(
        patch_size=2, temporal_patch_size=2, merge_size=2, size={"shortest_edge": 16, "longest_edge": 400}
    )
    return Processor(images, text, CHAT)


def conversations(count):
    """Samples as TRL has them: `images` and `messages`, with one to three images of several sizes each."""
    from PIL import Image

    g, made = torch.Generator().manual_seed(3), []

    def text(least, most):
        length = int(torch.randint(least, most, (1,), generator=g))
        return " ".join(WORDS[i] for i in torch.randint(0, len(WORDS), (length,), generator=g))

    for i in range(count):
        sides = torch.randint(1, 4, (1 + i % 3, 2), generator=g) * 4
        images = [torch.randint(0, 256, (h, w, 3), generator=g, dtype=torch.uint8) for h, w in sides.tolist()]
        messages = [{"role": "user", "content": text(1, 6)}, {"role": "assistant", "content": text(2, 12)}]
        made.append({"images": [Image.fromarray(one.numpy()) for one in images], "messages": messages})
    return made


def square_processor():
    """Makes batches for the small llava, and is loaded from a folder without torchvision: images of 8 x 8 pixels."""
    images = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    return LlavaProcessor(
        images, processor().tokenizer, patch_size=2, vision_feature_select_strategy="default", chat_template=CHAT,
        image_token="<|image_pad|>", num_additional_image_tokens=1,
    )  # fmt: skip


def as_files(rows, folder):
    """Rows in a folder: their images as files, and a file of JSON lines that names them."""
    (folder / "pictures").mkdir(parents=True)
    lines = []
    for i, row in enumerate(rows):
        names = [f"pictures/{i}-{j}.png" for j in range(len(row["images"]))]
        for name, image in zip(names, row["images"]):
            image.save(folder / name)
        lines.append(json.dumps({**row, "images": names}))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return str(folder)
