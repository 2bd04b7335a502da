"""Corpora and tokenizers: a corpus is any text that `datasets` can read, or the source of Python's standard library.

Nothing here runs code that comes with the data, and nothing is unpickled.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import platform
import random
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from alstlib.config import nearest_path
from alstlib.data.account import by_number
from alstlib.data.formats import canonical_columns, plain_text

logger = logging.getLogger(__name__)

EOS = "<|endoftext|>"
_TEXT, _JSON, _PARQUET = (".txt", ".md", ".py"), (".jsonl", ".json"), (".parquet",)
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_TRAIN_CHARACTERS = 2_000_000  # of text, on which a tokenizer is trained in about a second


def load_corpus(
    name: str, *, split: str = "train", text_column: str | None = None, streaming: bool = False, trust: bool = False
) -> Any:
    """A corpus as a `datasets.Dataset` (`IterableDataset` when streaming) with canonical columns.

    Args:
        name: "stdlib" (source files of the running Python's standard library without its tests, sorted, one document a
            file); a local file or folder of .txt, .md, .py (one document a file), .jsonl, .json or .parquet; a hub
            name, optionally "name:config". A local path wins if it exists.
        split: as `datasets` takes it, slices such as "train[:1%]" included; text files have "train" only.
        text_column: where there are several columns of text.
        streaming: read a hub dataset as it is used, without downloading all of it.
        trust: has no effect but a warning: no dataset's code is ever run.

    Returns: columns `text`, `input_ids`, `messages`, ...: those of the formats that `formats` knows.

    Raises:
        ValueError: a path or dataset that does not exist, cannot be read, is empty or has no usable column.
    """
    import datasets

    if trust:
        logger.warning("trust=True has no effect on data: code that comes with a dataset is never run")
    path = Path(name).expanduser()
    if name == "stdlib" and not path.exists():
        return _from_files(_library_files(), split, "the standard library")
    if path.exists():
        kind, files = local_files(path)
        if kind == "text":
            return _from_files([(str(f), f) for f in files], split, str(path))
        if kind == "json":
            for file in files:
                _check_text(file)
        source: tuple[str, ...] = (kind,)
        options: dict[str, Any] = {"data_files": [glob.escape(str(f)) for f in files]}
    else:
        local = path.is_absolute() or path.is_symlink() or name.startswith((".", "~"))
        if local or path.suffix in (*_TEXT, *_JSON, *_PARQUET):
            raise ValueError(f"data='{name}' does not exist; {nearest_path(path)}")
        repository, _, config = name.partition(":")
        if "/" not in repository and repository in datasets.packaged_modules._PACKAGED_DATASETS_MODULES:
            raise ValueError(f"data='{name}' names a file format; give the path of the file or folder instead")
        source, options = (repository, config) if config else (repository,), {}
    try:
        corpus = datasets.load_dataset(*source, split=split, streaming=streaming, **options)
    except Exception as error:  # every builder raises its own kinds
        lines = _json_lines(path)
        if not lines or split != "train" or streaming or not hasattr(datasets, "Json"):
            cause = f"{error}" + (f" ({error.__cause__})" if error.__cause__ else "")
            hint = "" if path.exists() else "; no local path has this name, and the hub gave no dataset of this name"
            raise ValueError(f"data='{name}' (split '{split}') cannot be read: {cause}{hint}") from error
        corpus = _by_lines(lines)
    if not streaming and len(corpus) == 0:
        raise ValueError(f"data='{name}' (split '{split}') is empty")
    return canonical_columns(corpus, text_column)


def _json_lines(path: Path) -> list[Path]:
    """The .jsonl files of a corpus; none where it has others."""
    kind, files = local_files(path) if path.exists() else ("", [])
    return files if kind == "json" and all(file.suffix.lower() == ".jsonl" for file in files) else []


def _lines(files: Iterable[Path]) -> Iterator[tuple[Path, int, str]]:
    """Lines that are not blank, with their numbers, counted from 1."""
    for path in files:
        with open(path, encoding="utf-8-sig") as file:
            yield from ((path, number, line) for number, line in enumerate(file, 1) if line.strip())


def _by_lines(files: Sequence[Path]) -> Any:
    """The rows of .jsonl files that the reader of `datasets` fails on: it takes columns and their types from the first
    ten megabytes. Values of any type may be in a column."""
    import datasets

    names: dict[str, None] = {}
    for path, number, line in _lines(files):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"data='{path}', line {number}, is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(
                f"data='{path}', line {number}, is a {type(row).__name__}; it must be an object, such as "
                '{"text": "..."}'
            )
        names |= dict.fromkeys(row)

    def rows(files: Sequence[str], stamps: Any) -> Iterator[dict[str, str | None]]:
        for _, _, line in _lines(map(Path, files)):
            row = json.loads(line)
            yield {name: None if row.get(name) is None else json.dumps(row[name]) for name in names}

    given = {"files": list(map(str, files)), "stamps": [f.stat().st_mtime_ns for f in files]}  # of what is cached
    return datasets.Dataset.from_generator(
        rows, features=datasets.Features({name: datasets.Json() for name in names}), gen_kwargs=given
    )


def places(name: str, count: int, rows: Sequence[int]) -> str:
    """Where rows, counted from 0, of a corpus of `count` rows are: lines of .jsonl files, or else rows."""
    files = _json_lines(Path(name).expanduser())
    lines = [(path, number) for path, number, _ in _lines(files)]
    if len(lines) != count:  # other files, or a line has several objects
        return by_number(rows)
    found = [(f"{lines[row][0].name} " if len(files) > 1 else "", lines[row][1]) for row in rows]
    return f"line{'s' if len(rows) > 1 else ''} {', '.join(f'{file}{number}' for file, number in found)}"


def _check_text(path: Path) -> None:
    """Refuse a file without a line, and one that is no UTF-8: the reader names neither, and may read other bytes."""
    try:
        with open(path, encoding="utf-8") as file:
            empty = not any(part.strip() for part in iter(lambda: file.read(1 << 20), ""))
            while file.read(1 << 20):  # the rest must decode too
                pass
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data='{path}' is not UTF-8 text ({error}); convert it, for example with: iconv -f latin1 -t utf-8"
        ) from error
    except OSError as error:
        raise ValueError(f"data='{path}' cannot be read: {error}") from error
    if empty:
        raise ValueError(f"data='{path}' is empty: it must have a document in each line")


def _library_files() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted((p.relative_to(root).as_posix(), p) for p in root.rglob("*.py"))
    return [(relative, p) for relative, p in files if not _NOT_LIBRARY & set(relative.split("/")[:-1])]


def local_files(path: Path) -> tuple[str, list[Path]]:
    """The reader for a file or folder, and the files: Parquet before JSON before text, others named in a warning."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    for kind, suffixes in (("parquet", _PARQUET), ("json", _JSON), ("text", _TEXT)):
        if chosen := [p for p in files if p.suffix.lower() in suffixes]:
            if len(chosen) < len(files):
                logger.warning(f"{path}: reading {len(chosen)} {kind} files, leaving {len(files) - len(chosen)} others")
            return kind, chosen
    known = ", ".join((*_TEXT, *_JSON, *_PARQUET))
    raise ValueError(f"data='{path}' has no file that can be read; known endings: {known}")


def _from_files(files: Sequence[tuple[str, Path]], split: str, what: str) -> Any:
    import datasets

    if split != "train":
        raise ValueError(f"split='{split}': text files have one split only, 'train'")
    columns: dict[str, list[str]] = {"text": [], "path": []}
    for label, path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            if len(files) == 1:
                raise ValueError(f"{path} is not UTF-8 text: {error}") from error
            logger.info(f"{path} is not UTF-8 text and is left out")
            continue
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        if text.strip():
            columns["text"].append(text)
            columns["path"].append(label)
    if not columns["text"]:
        raise ValueError(f"{what} holds no text: {len(files)} files, all empty or unreadable")
    return datasets.Dataset.from_dict(columns)


def get_tokenizer(
    name: str = "auto", *, corpus: Any = None, vocab_size: int = 8192, cache_dir: str | os.PathLike[str] | None = None,
    trust: bool = False,
) -> Any:  # fmt: skip
    """A transformers tokenizer: one that is trained here for "auto" or "stdlib-bpe", else `AutoTokenizer` by name or
    path.

    The trained tokenizer is a byte-level BPE over two million characters of the corpus, with at most `vocab_size`
    tokens, the end-of-text token included. Without `corpus`, and for "stdlib-bpe", the corpus is Python's standard
    library. The tokenizer is kept in `cache_dir` (default: $XDG_CACHE_HOME/alst or ~/.cache/alst). Several ranks may
    call this function at the same time. With `trust`, the code that comes with a named tokenizer may run.

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
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(cache_dir) if cache_dir is not None else home / "alst"
    texts: list[str] | None = None
    if corpus is None or name == "stdlib-bpe":
        key = f"stdlib-{platform.python_implementation().lower()}{platform.python_version()}"
    else:
        texts = _training_texts(corpus)
        key = hashlib.sha256("\0".join(texts).encode("utf-8", "replace")).hexdigest()[:16]
    path = folder / f"bpe-v1-{key}-{vocab_size}.json"
    trained = _read_tokenizer(path)
    if trained is None:
        logger.info(f"training a tokenizer of {vocab_size} tokens, to be kept as {path}")
        trained = _train(texts if texts is not None else _training_texts(load_corpus("stdlib")), vocab_size)
        _write_tokenizer(trained, path)
    return PreTrainedTokenizerFast(
        tokenizer_object=trained, eos_token=EOS, pad_token=EOS, clean_up_tokenization_spaces=False
    )


def has_tokenizer(name: str) -> bool:
    """False for a folder without the files of a tokenizer."""
    return not Path(name).is_dir() or bool(list(Path(name).glob("*token*")))


def _training_texts(corpus: Any) -> list[str]:
    """The start of documents in a fixed shuffled order, two million characters in all."""
    corpus = canonical_columns(corpus)
    if "input_ids" in (corpus.column_names or ()):
        raise ValueError("a corpus of input_ids has its own tokenizer: name it instead of 'auto'")
    rows: Iterable[int] = range(len(corpus)) if hasattr(corpus, "__len__") else ()
    order = random.Random(0).sample(rows, len(rows)) if isinstance(rows, range) else []
    texts, left = [], _TRAIN_CHARACTERS
    for row in (corpus[i] for i in order) if isinstance(rows, range) else corpus:
        texts.append(plain_text(row)[:left])
        left -= len(texts[-1])
        if left <= 0:
            break
    return texts


def _train(texts: list[str], vocab_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _read_tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer

    if not path.is_file():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        logger.warning(f"{path} cannot be read ({error}); training the tokenizer again")
        return None


def _write_tokenizer(tokenizer: Any, path: Path) -> None:
    """Under a temporary name first: another rank sees a whole file or none."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            temporary = file.name
            file.write(tokenizer.to_str())
        os.replace(temporary, path)
    except OSError as error:
        logger.warning(f"the tokenizer cannot be kept in {path.parent} ({error}); it will be trained again next time")
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
