"""Corpora, tokenizers and samples: what is read, what is labelled, and that samples are exactly as long as asked."""

import copy
import pickle
from unittest import mock

import datasets
import numpy as np
import pytest
import torch
import yaml
from cases import check_refused
from datasets import Dataset

from alstlib.data.shard import shard_batch
from alstlib.runs.corpus.formats import canonical_columns
from alstlib.runs.corpus.reading import EOS, _library_files, get_tokenizer, load_corpus
from alstlib.runs.corpus.samples import collate, make_samples, tokenize_row

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORGETS = (  # what was said before the last message is shown without its text, as reasoning is by some models
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ (m.content if loop.last else '...') + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHAT = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is four."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "That makes six."},
]


@pytest.fixture(scope="module", autouse=True)
def caches(tmp_path_factory):
    """The caches of `datasets` and of the tokenizer, away from the user's own."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(scope="module")
def stdlib():
    return load_corpus("stdlib")


@pytest.fixture(scope="module")
def tokenizer(caches):
    return get_tokenizer("auto", vocab_size=1024)


def texts(*lengths):
    """Tokenized documents of these lengths; the first counts from 100, the second from 200, ..."""
    ids = [list(range(100 * i, 100 * i + n)) for i, n in enumerate(lengths, 1)]
    return Dataset.from_dict({"input_ids": ids})


def with_template(tokenizer, template):
    """A tokenizer of its own."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


# ---- corpora


def test_stdlib(stdlib):
    assert sum(len(text) > 100_000 for text in stdlib["text"]) > 2  # several long documents
    paths = [path.as_posix() for path in _library_files()]
    assert paths == sorted(paths)
    assert not any("site-packages" in path or "/test/" in path for path in paths)


def test_local_text(tmp_path, caplog):
    (tmp_path / "b.md").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "empty.py").write_text(" \n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (copies := tmp_path / ".ipynb_checkpoints").mkdir()
    (copies / "a-checkpoint.txt").write_text("first")
    corpus = load_corpus(str(tmp_path))
    assert corpus["text"] == ["first", "second"]
    assert "leaving 1 others" in caplog.text


def test_local_jsonl_and_parquet(tmp_path):
    rows = Dataset.from_list([{"id": 1, "body": "one"}, {"id": 2, "body": "two"}])
    (folder := tmp_path / "data [1]*").mkdir()
    rows.to_json(folder / "x[2].jsonl")
    rows.to_json(tmp_path / "y.json", lines=False)
    rows.to_parquet(tmp_path / "z.parquet")
    for name in (folder.name, "y.json", "z.parquet"):
        assert list(load_corpus(str(tmp_path / name))) == [{"text": "one"}, {"text": "two"}]


def test_columns():
    many = Dataset.from_dict({"title": ["t"], "body": ["b"], "n": [1]})
    check_refused(r"\['title', 'body', 'n'\].* columns of text: \['title', 'body'\]", canonical_columns, many)
    assert canonical_columns(many.remove_columns("title"))["text"] == ["b"]
    for columns, kept in (
        ({"text": ["rendered"], "conversations": [CHAT], "rendered": ["x"]}, ["conversations", "text"]),
        ({"input_ids": [[1], None], "text": [None, "x"]}, ["input_ids", "text"]),
    ):
        mixed = Dataset.from_dict(columns)
        assert canonical_columns(mixed).column_names == kept
    check_refused("has its own tokenizer: name it", get_tokenizer, "auto", corpus=mixed)
    for wrong in ([{"text": "x"}], mixed.to_iterable_dataset()):
        check_refused(f"the corpus is a {type(wrong).__name__}; give a Dataset", canonical_columns, wrong)


BAD = yaml.safe_load(r"""
files:
- [train.jsonl, '{broken', 'train\.jsonl'', line 1, is no JSON object such as .*: ']
- [binary.txt, "\xff\xfe\x00", not UTF-8 text]
- [none.txt, '', holds no text]
- [no.parquet, not parquet, cannot be read]
- [empty.jsonl, '', 'empty\.jsonl'' is empty: it must have a document in each line']
- [list.jsonl, "{\"text\": \"a\"}\n\n[\"b\"]", 'list\.jsonl'', line 3, is no JSON object']
- [latin.jsonl, "{\"text\": \"caf\xe9\"}", 'latin\.jsonl'' is not UTF-8 text \(.*\); convert it, for .*: iconv']
- [data.pkl, '', 'no file that can be read; known endings: \.parquet, \.jsonl, \.json, \.txt']
links:
- [gone.jsonl, nowhere.jsonl, 'it is a symbolic link to nowhere\.jsonl, which does not exist']
- [loop.jsonl, loop.jsonl, 'it is a symbolic link to loop\.jsonl, which .* leads back to']
""")


def test_bad_corpora(tmp_path):
    for name, content, message in BAD["files"]:
        (tmp_path / name).write_bytes(content.encode("latin-1"))
        check_refused(message, load_corpus, str(tmp_path / name))
    for name, target, message in BAD["links"]:
        (tmp_path / name).symlink_to(target)
        check_refused(f"{name}' does not exist; {message}", load_corpus, str(tmp_path / name))
    for name, message in (
        (f"{tmp_path}/trian.jsonl", r"does not exist; did you mean '.*train\.jsonl'"),
        (f"{tmp_path}/nowhere/x.txt", "its folder .* does not exist either"),
        ("someone/nothing", r"data='someone/nothing' cannot be read"),
    ):
        check_refused(message, load_corpus, name)


def test_hub_names_are_passed_on():
    with mock.patch.object(datasets, "load_dataset", return_value=Dataset.from_dict({"text": ["x"]})) as load:
        load_corpus("someone/corpus:small")
    load.assert_called_once_with("someone/corpus", "small", split="train")


# ---- tokenizers


def test_trained_tokenizer(tokenizer):
    assert tokenizer.is_fast
    assert len(tokenizer) == 1024
    assert tokenizer.eos_token_id is not None
    text = "def f(x):\n    return 'äöü ∀' + str(x)  # naïve\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def _train_in_process(rank=0, world=1):
    return get_tokenizer("stdlib-bpe", vocab_size=300).backend_tokenizer.to_str()


def test_each_rank_trains_the_same_tokenizer(ranks2):
    """In the process that ranks are forked from, sets have another order than here."""
    assert ranks2(_train_in_process) == [_train_in_process()] * 2


def test_bad_tokenizers(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')

    check_refused("vocab_size=256 must be at least 257", get_tokenizer, "auto", vocab_size=256)
    check_refused("cannot be loaded", get_tokenizer, str(tmp_path / "nothing"))
    check_refused(r"has no tokenizer\.json; save a tokenizer there", get_tokenizer, str(folder))
    (folder / "tokenizer.json").write_text("{broken")
    check_refused(r"cannot be loaded: (?!the folder has no)", get_tokenizer, str(folder))


# ---- samples


@pytest.mark.parametrize("seq_len, packed", [(100, False), (3000, True), (20_000, False)])
def test_samples_of_the_stdlib(stdlib, tokenizer, seq_len, packed):
    samples = make_samples(stdlib, tokenizer, seq_len, packed=packed, limit=3)
    for sample in (samples[2], samples[0], samples[-2]):
        assert sample["input_ids"].shape == sample["labels"].shape == (seq_len,)
        assert not packed or sum(sample["document_lengths"]) == seq_len
    assert samples.tokens < 10 * seq_len + 500_000  # of one pass, and only what was needed


def test_samples_are_seeded_and_reach_worker_processes(stdlib, tokenizer):
    first, other = (make_samples(stdlib, tokenizer, 64, seed=seed, limit=4) for seed in (0, 1))
    again = pickle.loads(pickle.dumps(first))
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[3]["input_ids"], other[3]["input_ids"])


def test_one_text_keeps_every_token_once(tokenizer):
    corpus = texts(7, 30, 3, 12)
    samples = make_samples(corpus, tokenizer, 13)
    assert set(samples[0]) == {"input_ids", "labels"}
    seen = torch.cat([s["input_ids"] for s in samples])
    assert sorted(seen.tolist()) == sorted(t for row in corpus["input_ids"] for t in row)
    alone = [s for s in samples if (s["input_ids"].diff() == 1).all()]
    assert len(alone) >= 2  # the long document fills two samples by itself


def test_packing_keeps_documents_whole(tokenizer):
    corpus = texts(5, 9, 3, 7, 4, 4)
    samples = make_samples(corpus, tokenizer, 16, packed=True)
    every = torch.cat([s["input_ids"] for s in samples])
    assert sorted(every.tolist()) == sorted(t for row in corpus["input_ids"] for t in row)
    for sample in samples:
        pieces = sample["input_ids"].split(sample["document_lengths"])
        cut = [p for p in pieces if p.tolist() not in corpus["input_ids"]]
        assert len(cut) <= 2  # the rest of one, and the beginning of another
        assert all((p.diff() == 1).all() for p in cut)


def test_packing_leaves_no_document_waiting_and_splits_long_ones(tokenizer):
    corpus = texts(3, 9, 9, 9, 9, 9, 9)
    order = [len(corpus[i]["input_ids"]) for i in np.random.default_rng([0, 0]).permutation(7)]
    samples = make_samples(corpus, tokenizer, 9, packed=True)
    assert 3 in samples[order.index(3)]["document_lengths"]  # though longer ones fill a sample better
    long = make_samples(texts(40), tokenizer, 16, packed=True)
    assert [s["input_ids"].tolist() for s in long] == [list(range(first, first + 16)) for first in (100, 116)]


def test_too_few_tokens(tokenizer, caplog):
    for corpus, seq_len, message in (
        (texts(5, 7), 50, "the corpus has 12 tokens, but one sample needs seq_len=50"),
        (Dataset.from_dict({"text": [""]}), 8, "none of 1 rows has a token with a loss"), (texts(5), 0, "seq_len=0"),
    ):  # fmt: skip
        check_refused(message, make_samples, corpus, tokenizer, seq_len)
    for packed in (False, True):
        assert len(make_samples(texts(20, 10), tokenizer, 20, packed=packed)) == 1  # a pass is enough
        assert not caplog.records
        samples = make_samples(texts(5, 7), tokenizer, 50, limit=3, packed=packed)
        assert [len(s["input_ids"]) for s in samples] == [50] * 3
        (record,) = caplog.records  # once
        assert "12 tokens" in record.message
        caplog.clear()


def test_pretokenized_labels(tokenizer):
    corpus = Dataset.from_dict({"input_ids": [[1, 2, 3, 4]], "labels": [[-100, -100, 3, 4]]})
    (sample,) = make_samples(corpus, tokenizer, 4)
    assert sample["labels"].tolist() == [-100, -100, 3, 4]
    wrong = Dataset.from_dict({"input_ids": [[1, 2, 3, 4]], "labels": [[3, 4]]})
    check_refused("2 values for 4", make_samples, wrong, tokenizer, 4)


# ---- chats


def first_document(row, tokenizer, template=None):
    """Text and labelled text of the only row's document."""
    rows, tokenizer = Dataset.from_list([row]), with_template(tokenizer, template)
    document = tokenize_row(canonical_columns(rows)[0], tokenizer)
    assert make_samples(rows, tokenizer, len(document.ids)).notes() == []
    return tokenizer.decode(document.ids), tokenizer.decode(document.ids[document.labels != -100])


SAID = "It is four.<|im_end|>\n"


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_only_the_assistant_is_labelled(tokenizer, template):
    whole, said = first_document({"messages": CHAT}, tokenizer, template)
    assert whole == with_template(tokenizer, template).apply_chat_template(CHAT, tokenize=False)
    assert said == f"{SAID}That makes six.<|im_end|>\n"


@pytest.mark.parametrize("column", [{"images": [["a.png"], []]}, {"image": ["a.png", None]}], ids=list)
def test_images_are_not_lost_silently(tokenizer, column):
    """A row without any is read as before."""
    chats = canonical_columns(Dataset.from_dict({"messages": [CHAT, CHAT], **column}))
    tokenizer = with_template(tokenizer, CHATML)
    check_refused("the row has images, which", tokenize_row, chats[0], tokenizer)
    assert len(tokenize_row(chats[1], tokenizer).ids)


def test_a_tokenizer_is_trained_on_chats_and_texts():
    """Row by row: messages where there are some, text otherwise."""
    corpus = Dataset.from_list([{"text": "plain words", "messages": None}, {"text": "rendered", "messages": CHAT[:2]}])
    trained = get_tokenizer("auto", corpus=corpus, vocab_size=300)
    assert len(trained("It is four.").input_ids) < 11  # its merges come from the chats too


def test_templates_that_cannot_be_followed_are_refused(tokenizer):
    for template, message in (
        (FORGETS, r"renders message 1 differently .* \{% generation %\}"),
        (None, "no chat temp"),
    ):
        check_refused(message, first_document, {"messages": CHAT}, tokenizer, template)


# ---- formats of the field


FORMATS = yaml.safe_load(r"""
sharegpt: [{conversations: [{from: human, value: 'What is 2 + 2?'}, {from: gpt, value: It is four.}]},
  "user\nWhat is 2 + 2?"]
system: [{conversations: [{from: human, value: 'Sum?'}, {from: gpt, value: It is four.}], system: Count.},
  "system\nCount.<|im_end|>\n<|im_start|>user\nSum?"]
alpaca: [{instruction: Add., input: 2 + 2, output: It is four.}, "user\nAdd.\n2 + 2"]
instruction: [{instruction: Add 2 + 2., output: It is four., id: 3}, "user\nAdd 2 + 2."]
prompt of messages: [{prompt: [{role: user, content: 'Sum?'},
  {role: assistant, content: Six.}, {role: user, content: 'And?'}],
  completion: [{role: assistant, content: It is four.}]},
  "user\nSum?<|im_end|>\n<|im_start|>assistant\nSix.<|im_end|>\n<|im_start|>user\nAnd?"]
""")


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("row, asked", FORMATS.values(), ids=FORMATS)
def test_chats_of_other_formats(tokenizer, template, row, asked):
    whole, said = first_document(row, tokenizer, template)
    assert whole == f"<|im_start|>{asked}<|im_end|>\n<|im_start|>assistant\n{SAID}"
    assert said == SAID  # of a prompt's own answers none


@pytest.mark.parametrize("template", [None, CHATML])
def test_a_completion_after_a_prompt(tokenizer, template):
    row = {"prompt": "The sky is", "completion": " blue."}
    assert first_document(row, tokenizer, template) == (f"The sky is blue.{EOS}", f" blue.{EOS}")


def test_instructions_without_a_chat_template_are_alpacas_text(tokenizer):
    whole, said = first_document({"instruction": "Add.", "input": "2 + 2", "output": "Four."}, tokenizer)
    assert whole == (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n2 + 2\n\n"
        f"### Response:\nFour.{EOS}"
    )
    assert said == f"Four.{EOS}"
    assert "Input" not in first_document({"instruction": "Add.", "input": "", "output": "Four."}, tokenizer)[0]


# ---- what a result says of its data


@pytest.mark.parametrize("packed, limit", [(False, None), (True, 2), (False, 50)])
def test_a_corpus_without_a_loss_is_refused(tokenizer, packed, limit):
    asked = Dataset.from_dict({"messages": [CHAT[:1]] * 6})
    check_refused(
        r"none of 6 rows has a token with a loss: chats need a message of the assist",
        make_samples,
        asked,
        with_template(tokenizer, CHATML),
        20,
        packed=packed,
        limit=limit,
    )


def test_notes_on_data(tokenizer, stdlib):
    assert make_samples(stdlib, tokenizer, 100, limit=2).notes() == []
    rows = Dataset.from_dict({"text": ["one two three", None, "", "four five six"]})
    samples = make_samples(rows, tokenizer, 8, limit=3)
    samples[2]
    size = len(tokenizer("one two three").input_ids) + len(tokenizer("four five six").input_ids) + 2
    assert samples.notes() == [
        "2 of 4 rows train nothing, without a token with a loss; the first: row 2, read as none of the known formats, "
        "row 3, read as text",
        f"the corpus of {size} tokens was read {samples.passes} times",
    ]  # fmt: skip
    bare = with_template(tokenizer, None)
    bare.eos_token = None
    assert [note.partition(",")[0] for note in make_samples(rows, bare, 4, limit=1).notes()] == [
        "1 of 2 rows train nothing", "the tokenizer has no end-of-text token",
    ]  # fmt: skip


# ---- batches


def test_collate():
    short = {"input_ids": [1, 2, 3], "labels": [1, 2, -100], "document_lengths": [1, 2]}
    long = {"input_ids": torch.arange(5), "labels": torch.arange(5), "document_lengths": [5]}
    batch = collate([short, long])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 0, 0], [0, 1, 2, 3, 4]]
    assert batch["labels"].tolist() == [[1, 2, -100, -100, -100], [0, 1, 2, 3, 4]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    shard = shard_batch(batch, 2, 0)
    assert shard["cu_seqlens"].tolist() == [0, 1, 3, 6, 11, 12]
    assert shard["sample_tokens"].tolist() == [3, 5]
    assert set(collate([{"input_ids": [1, 2], "labels": [1, 2]}] * 2)) == {"input_ids", "labels"}
