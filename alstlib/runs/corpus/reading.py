"""Corpora and tokenizers: a corpus is any text that `datasets` can read, or the source of Python's standard library.

Nothing here runs code that comes with the data, and nothing is unpickled.
"""

from __future__ import annotations

import functools
import glob
import json
import logging
import random
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from alstlib.base.config import check_path
from alstlib.base.options import Json
from alstlib.runs.corpus.formats import IMAGES, canonical_columns, plain_text

logger = logging.getLogger(__name__)

EOS = "<|endoftext|>"
KINDS = {"parquet": (".parquet",), "jsonl": (".jsonl",), "json": (".json",), "text": (".txt", ".md", ".py")}
"""Endings of the files that each reader reads."""
_KNOWN = [suffix for suffixes in KINDS.values() for suffix in suffixes]
_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")  # rows name them
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_TRAIN_CHARACTERS = 2_000_000  # of text, on which a tokenizer is trained in about a second


def load_corpus(name: str) -> Any:
    """A corpus as a `datasets.Dataset` with canonical columns.

    Args:
        name: "stdlib" (source files of the running Python's standard library without its tests, sorted, one document a
            file); a local file or folder of .txt, .md, .py (one document a file), .jsonl, .json or .parquet; a hub
            name, optionally "name:config", of which the split "train" is read. A local path wins if it exists.

    Returns: columns `text`, `input_ids`, `messages`, ...: those of the formats that `formats` knows.

    Raises:
        ValueError: a path or dataset that does not exist, cannot be read, is empty or has no usable column.
    """
    import datasets

    path = Path(name).expanduser()
    kind, files = local_files(path) if path.exists() else ("text", _library_files()) if name == "stdlib" else ("", [])
    if kind in ("text", "jsonl"):
        return _texts(name, files) if kind == "text" else canonical_columns(_by_lines(files))
    if files:
        source, options = [kind], {"data_files": [glob.escape(str(file)) for file in files]}
    else:  # the name of a dataset on the hub, and perhaps of one of its configurations
        check_path("data", name, local=path.suffix in _KNOWN)
        source, options = name.split(":", 1), {}
    try:
        corpus = datasets.load_dataset(*source, split="train", **options)
    except Exception as error:  # every builder raises its own kinds
        cause = f"{error}" + (f" ({error.__cause__})" if error.__cause__ else "")
        raise ValueError(f"data='{name}' cannot be read: {cause}") from error
    return canonical_columns(corpus)


def local_files(path: Path) -> tuple[str, list[Path]]:
    """The reader for a file or folder, and the files: Parquet before JSON before text, others counted in a warning.
    Hidden ones are left: JupyterLab keeps copies of files (.ipynb_checkpoints), and git all versions."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p, path))
    for kind, suffixes in KINDS.items():
        if chosen := [p for p in files if p.suffix.lower() in suffixes]:
            files = [p for p in files if kind == "text" or p.suffix.lower() not in _PICTURES]
            if len(chosen) < len(files):
                logger.warning(f"{path}: reading {len(chosen)} {kind} files, leaving {len(files) - len(chosen)} others")
            return kind, chosen
    raise ValueError(f"data='{path}' has no file that can be read; known endings: {', '.join(_KNOWN)}")


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _library_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted((p.relative_to(root).as_posix(), p) for p in root.rglob("*.py"))
    return [p for relative, p in files if not _NOT_LIBRARY & set(relative.split("/")[:-1])]


def _lines(path: Path) -> Iterator[str]:
    """The lines of a text file. What is no UTF-8 is refused: a reader of `datasets` names no file, and may read other
    bytes."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data='{path}' is not UTF-8 text ({error}); convert it, for example with: iconv -f latin1 -t utf-8"
        ) from error


def _texts(name: str, files: Sequence[Path]) -> Any:
    """Each file with text as a document."""
    import datasets

    texts = list(filter(str.strip, ("".join(_lines(file)) for file in files)))
    if not texts:
        raise ValueError(f"data='{name}' holds no text: {len(files)} files, all empty")
    return datasets.Dataset.from_dict({"text": texts})


def _objects(files: Iterable[str]) -> Iterator[Json]:
    """The objects of .jsonl files, one in each line that is not blank."""
    for file in files:
        for number, line in enumerate(_lines(Path(file)), 1):
            if not line.strip():
                continue
            try:
                found = dict(json.loads(line).items())
                yield found | {name: _beside(file, found[name]) for name in IMAGES if name in found}
            except (ValueError, AttributeError, RecursionError) as error:
                raise ValueError(
                    f'data=\'{file}\', line {number}, is no JSON object such as {{"text": "..."}}: {error}'
                ) from error


def _beside(file: str, names: Any) -> Any:
    """Names of images, which are relative to the file that has them, from anywhere."""
    if isinstance(names, list):
        return [_beside(file, name) for name in names]
    if not isinstance(names, str) or not names or "://" in names:
        return names
    return str(Path(file).absolute().parent / Path(names).expanduser())


def _by_lines(files: Sequence[Path]) -> Any:
    """The rows of .jsonl files. Values of any type may be in a column, and lines may have other columns: the reader of
    `datasets` takes them from the first ten megabytes, and names no line."""
    import datasets

    given = list(map(str, files))
    columns: dict[str, bool] = {}  # and whether all values are texts
    for found in _objects(given):
        for name, value in found.items():
            columns[name] = columns.get(name, True) and isinstance(value, str | None)
    if not columns:
        raise ValueError(f"data='{files[0]}' is empty: it must have a document in each line")

    def rows(files: Sequence[str], stamps: Any) -> Iterator[dict[str, str | None]]:
        for row in _objects(files):
            plain = {name: row.get(name) for name in columns}
            yield {n: v if columns[n] or v is None else json.dumps(v) for n, v in plain.items()}

    features = {name: datasets.Value("string") if text else datasets.Json() for name, text in columns.items()}
    stamps = [file.stat().st_mtime_ns for file in files]  # of what is cached
    return datasets.Dataset.from_generator(
        rows, features=datasets.Features(features), gen_kwargs={"files": given, "stamps": stamps}
    )


def get_tokenizer(name: str = "auto", *, corpus: Any = None, vocab_size: int = 8192, trust: bool = False) -> Any:
    """A transformers tokenizer: one that is trained here for "auto" or "stdlib-bpe", else `AutoTokenizer` by name or
    path.

    The trained tokenizer is a byte-level BPE over two million characters of the corpus, with at most `vocab_size`
    tokens, the end-of-text token included. It is the same in every process. Without `corpus`, and for "stdlib-bpe", the
    corpus is Python's standard library. With `trust`, the code that comes with a named tokenizer may run.

    Raises:
        ValueError: an unknown tokenizer, or `vocab_size` below the 256 bytes and the end-of-text token.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if name not in ("auto", "stdlib-bpe"):
        try:
            return AutoTokenizer.from_pretrained(name, trust_remote_code=trust)
        except Exception as error:
            bare = "the folder has no tokenizer.json; save a tokenizer there, or name another"
            why = error if has_tokenizer(name) else bare
            raise ValueError(f"tokenizer='{name}' cannot be loaded: {why}") from error
    if vocab_size < 257:
        raise ValueError(f"vocab_size={vocab_size} must be at least 257: one token for each byte, and {EOS}")
    own = name == "auto" and corpus is not None
    trained = _train(corpus, vocab_size) if own else _trained_on_library(vocab_size)
    return PreTrainedTokenizerFast(
        tokenizer_object=trained, eos_token=EOS, pad_token=EOS, clean_up_tokenization_spaces=False
    )


@functools.cache
def _trained_on_library(vocab_size: int) -> Any:
    return _train(load_corpus("stdlib"), vocab_size)


def has_tokenizer(name: str) -> bool:
    """False for a folder without the files of a tokenizer."""
    return not Path(name).is_dir() or bool(list(Path(name).glob("*token*")))


def _train(corpus: Any, vocab_size: int) -> Any:
    """A tokenizer trained on the start of documents in a fixed shuffled order, two million characters in all."""
    from tokenizers import ByteLevelBPETokenizer

    corpus = canonical_columns(corpus)
    if "input_ids" in corpus.column_names:
        raise ValueError("a corpus of input_ids has its own tokenizer: name it instead of 'auto'")
    texts, left = [], _TRAIN_CHARACTERS
    for i in random.Random(0).sample(range(len(corpus)), len(corpus)):
        texts.append(plain_text(corpus[i])[:left])
        left -= len(texts[-1])
        if left <= 0:
            break
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size, min_frequency=0, show_progress=False, special_tokens=[EOS])
    return tokenizer._tokenizer
