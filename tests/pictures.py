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


def small_vlm(name, dtype=torch.float32, **more):
    text, tower, own = copy.deepcopy(MODELS[name])  # a config changes what it is given
    kind = name.partition(" ")[0]
    made = transformers.CONFIG_MAPPING[kind](
        text_config=text, vision_config=tower, image_token_id=IMAGE, video_token_id=VIDEO, image_token_index=IMAGE,
        tie_word_embeddings=False, **own, **more,
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


def document(name, parts, seed=0):
    """A sample of text and images: a number of tokens of text, or `image`, or `video`, in turn."""
    g, kind = torch.Generator().manual_seed(seed), name.partition(" ")[0]
    patched = kind.startswith(("qwen", "glm"))
    ids, images, sizes, videos, grids = [], [], [], [], []
    for i, part in enumerate(parts):
        if isinstance(part, int):
            ids += torch.randint(3, 80, (part,), generator=g).tolist()
            continue
        t, h, w = GRIDS[(i + seed) % len(GRIDS)]
        if patched:
            t = 3 if part == "video" else t
            (videos if part == "video" else images).append(torch.randn(t * h * w, 24, generator=g))
            (grids if part == "video" else sizes).append([t, h, w])
            token, count = (VIDEO if part == "video" else IMAGE), h * w // 4
            if part == "video" and kind.startswith("qwen3"):  # a time is written before each frame
                ids += [token if n else 70 for _ in range(t) for n in range(count + 1)]
            else:
                ids += [token] * (t * count)
        elif kind == "mistral3" or "pixtral" in name:
            side = 4 if kind == "mistral3" else 2
            images.append(torch.zeros(3, 24, 24))
            images[-1][:, : h * side, : w * side] = torch.randn(3, h * side, w * side, generator=g)
            sizes.append([h * side, w * side])
            ids += [IMAGE] * (h * w)
        else:
            images.append(torch.randn(3, 8, 8, generator=g))
            ids += [IMAGE] * (16 if kind == "llava" else 4)
    made = {"input_ids": torch.tensor([ids]), "labels": torch.tensor([ids])}
    made["labels"] = made["labels"].masked_fill(made["input_ids"] >= IMAGE, -100)
    if images:
        made["pixel_values"] = torch.cat(images) if patched else torch.stack(images)
        if kind in ("idefics3", "smolvlm"):
            made["pixel_values"] = made["pixel_values"][None]
        if sizes:
            made["image_grid_thw" if patched else "image_sizes"] = torch.tensor(sizes)
    if videos:
        made |= {"pixel_values_videos": torch.cat(videos), "video_grid_thw": torch.tensor(grids)}
    return made


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
    length = max(one["input_ids"].shape[1] for one in documents)
    made = joined(documents, lengths=False)
    for name, fill in (("input_ids", 2), ("labels", -100)):
        rows = [nn.functional.pad(one[name], (0, length - one[name].shape[1]), value=fill) for one in documents]
        made[name] = torch.cat(rows)
    real = torch.tensor([one["input_ids"].shape[1] for one in documents])
    made["attention_mask"] = (torch.arange(length) < real[:, None]).long()
    if made["pixel_values"].ndim == 5:
        images = [one["pixel_values"] for one in documents if "pixel_values" in one]
        most = max(t.shape[1] for t in images)
        made["pixel_values"] = torch.cat([nn.functional.pad(t, [0] * 7 + [most - t.shape[1]]) for t in images])
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


def conversations(count, seed=3):
    """Samples as TRL has them: `images` and `messages`, with one to three images of several sizes each."""
    from PIL import Image

    g, made = torch.Generator().manual_seed(seed), []

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
