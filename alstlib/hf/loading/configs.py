"""Where the config of a model is found: built in, in a folder, in the hub's cache. Without torch and transformers.

Built in are small shapes with random weights and published ones (`public_models`), so that a plan needs no download.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from alstlib.base.config import check_path
from alstlib.base.options import Json, Record
from alstlib.hf.loading.public_models import PUBLIC, SHAPES


def check_model(name: str) -> None:
    """Refuse a model that the ranks could not load a config of: neither here, nor built in, nor had from the hub.

    Raises:
        ValueError: it names what is there instead.
    """
    path = Path(name).expanduser()
    if path.exists() or name in SHAPES:
        find_config(name)
        return
    check_path("model", name, local=name.count("/") > 1)
    if _in_cache(name) is not None:
        return
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(name, "config.json")
    except Exception as e:  # of a name, a network, a login: each has a kind of its own
        why = str(e).strip().partition("\n")[0]
        raise ValueError(
            f"model='{name}' is not a folder here and could not be downloaded from the hub (built-in shapes: "
            f"{', '.join(SHAPES)}); without a network, name a folder that holds the model: {why}"
        ) from e


def overridden(config: Record, fields: Record) -> Json:
    """A config with these fields in place of its own. The width of its heads follows the model's width and the number
    of heads, unless the config has heads of another width or the fields name one."""

    def even(of: Record) -> Any:
        return of["hidden_size"] // of["num_attention_heads"]

    made, width, sizes = {**config, **fields}, config.get("head_dim"), {"hidden_size", "num_attention_heads"}
    if sizes & set(fields) and width and sizes <= set(config) and width == even(config):
        made["head_dim"] = fields.get("head_dim", even(made))
    return made


def find_config(name: str, whole: bool = False) -> Json:
    """The config of a model, as its config.json has it: of one that reads images too, that of its text, or the
    `whole`."""
    if name in SHAPES:
        return {"model_type": "llama", **SHAPES[name]}
    path = Path(name).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise ValueError(f"model='{name}' is a folder without config.json; name a folder that save_pretrained wrote")
    if file.is_file():
        try:
            found = json.loads(file.read_text())
            return dict(found if whole else found.get("text_config", found))
        except (OSError, ValueError, AttributeError) as e:
            raise ValueError(f"model='{name}': {file} is not a readable config.json ({e})") from e
    if (cached := _in_cache(name)) is not None:
        return find_config(str(cached), whole)
    if (public := published(name)) is not None:
        return dict(PUBLIC[public])
    known = [*SHAPES, *PUBLIC]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise ValueError(
        f"model='{name}' is neither a folder with a config.json here, nor in the hub's cache, nor built in ({hint}"
        f"built in: {', '.join(known)})"
    )


def planned_config(name: str) -> Json:
    """The whole config of which a plan makes the model: that of a published shape, where the model has one."""
    public = published(name)
    return find_config(name, whole=True) if public is None else dict(PUBLIC[public])


def published(name: str) -> str | None:
    """The published shape that a hub name has: instruct models have that of their base. None where a config.json was
    downloaded in which a field of the shape has another value: what it describes is trained."""
    if Path(name).expanduser().exists():
        return None
    plain = {public.lower(): public for public in PUBLIC}
    stems = (name.lower().removesuffix(ending) for ending in ("", "-instruct", "-base", "-it", "-pt"))
    public = next((plain[stem] for stem in stems if stem in plain), None)
    if public is None or (cached := _in_cache(name)) is None:
        return public
    own = find_config(str(cached), whole=True)
    shape = {field: value for field, value in PUBLIC[public].items() if not field.endswith("_token_id")}
    return public if all(own.get(field, value) == value for field, value in shape.items()) else None


def code_of(name: str) -> str:
    """What the code that comes with a model is known by: the model's name, and a hash of the Python files beside its
    config."""
    path = Path(name).expanduser()
    beside = path if path.exists() else _in_cache(name)
    files = sorted((path if path.is_dir() else beside.parent).rglob("*.py")) if beside else ()
    return f"{name} {hashlib.sha256(b''.join(file.read_bytes() for file in files)).hexdigest()}"


def _in_cache(name: str) -> Path | None:
    """The newest config.json of a hub name that was downloaded before."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    found = (hub / f"models--{name.replace('/', '--')}").glob("snapshots/*/config.json")
    return max(found, key=os.path.getmtime, default=None)
