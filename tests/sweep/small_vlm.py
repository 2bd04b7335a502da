"""A small model of every type that transformers' AutoModelForImageTextToText knows: of the sizes that the tests of
images have (`pictures.MODELS`) where a type is among them, else the type's own config, shrunk as `small` does. What a
type needs besides is in `ALSO`."""

from pathlib import Path

import pictures
import small
import torch
import yaml
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from alstlib.planner.measure.small import named

TYPES = sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
SIZES = {
    **small.SIZES, **named(pictures.IMAGE, "image_token_id image_token_index im_patch_id"),
    **named(pictures.VIDEO, "video_token_id video_token_index"), **named(92, "vision_start_token_id audio_token_id"),
    **named(2, "patch_size spatial_merge_size temporal_patch_size"),
    **named(32, "out_hidden_size projection_dim max_image_size base_channels embed_dim output_channels "
                "neck_hidden_channels"),
    **named(48, "alignment_intermediate_size projector_hidden_size"),
    "vision_end_token_id": 93, "image_size": 8, "num_position_embeddings": 16, "drop_path_rate": 0.0,
}  # fmt: skip
ALSO = {
    **yaml.safe_load(Path(__file__).with_name("also_images.yaml").read_text()),
    "cohere_compass": {"text_config": small.ALSO["cohere_compass_text"]}, "qwen4_exp": small.ALSO["qwen4_exp"],
}  # fmt: skip
"""What a type needs besides: further fields, or those of a config inside its own."""


def small_model(kind, dtype=torch.float32):
    if kind in pictures.MODELS:
        return pictures.small_vlm(kind, dtype)
    return pictures.trainable_vlm(small.small_config(kind, ALSO, SIZES), dtype)
