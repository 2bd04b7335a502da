"""A small model of every type that transformers' AutoModelForImageTextToText knows: of the sizes that the tests of
images have (`pictures.MODELS`) where a type is among them, else the type's own config, shrunk as `small` does. What a
type needs besides is in `ALSO`."""

from pathlib import Path

import pictures
import small
import torch
import transformers
import yaml
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from alstlib.planner.measure.small import first_of_each, kinds_in_lists, named, shrunk

TYPES = sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
SIZES = {
    **small.SIZES, **named(pictures.IMAGE, "image_token_id image_token_index im_patch_id"),
    **named(pictures.VIDEO, "video_token_id video_token_index"), **named(92, "vision_start_token_id audio_token_id"),
    **named(93, "vision_end_token_id"), **named(8, "image_size"), **named(2, "patch_size spatial_merge_size"),
    **named(2, "temporal_patch_size"), **named(32, "out_hidden_size projection_dim"),
    **named(16, "num_position_embeddings"), **named(0.0, "drop_path_rate"),
    **named(48, "alignment_intermediate_size projector_hidden_size"),
    **named(32, "max_image_size base_channels embed_dim output_channels neck_hidden_channels"),
}  # fmt: skip
ALSO = {
    **yaml.safe_load(Path(__file__).with_name("also_images.yaml").read_text()),
    "cohere_compass": {"text_config": small.ALSO["cohere_compass_text"]}, "qwen4_exp": small.ALSO["qwen4_exp"],
}  # fmt: skip
"""What a type needs besides: further fields, or those of a config inside its own."""


def small_config(kind):
    default = transformers.CONFIG_MAPPING[kind]()
    layers = first_of_each(kinds_in_lists(default.get_text_config()))
    return shrunk(default, layers, ALSO.get(kind), sizes=SIZES, unset=True)


def small_model(kind, dtype=torch.float32):
    if kind in pictures.MODELS:
        return pictures.small_vlm(kind, dtype)
    return pictures.trainable_vlm(small_config(kind), dtype)
