"""Rows with images: batches are those of TRL's collator, and labels are on what the assistant says."""

import pytest
import torch
from cases import check_refused
from pictures import IMAGE, WORDS, as_files, conversations, processor, square_processor

from alstlib.runs.corpus.image_rows import ImageRows, get_processor, have_images, open_images
from alstlib.runs.corpus.reading import load_corpus
from alstlib.runs.corpus.samples import Account

PROCESSORS = {"qwen2_vl": processor, "llava": square_processor}


def turns(row):
    """The same images, the last of them in a second turn, in parts as TRL has them."""
    more = [{"type": "image"}] * (len(row["images"]) - 1)
    asked, said = (message["content"] for message in row["messages"])
    parts = [
        [*more, {"type": "text", "text": asked}], [{"type": "text", "text": said}],
        [{"type": "text", "text": "w7"}, {"type": "image"}, {"type": "text", "text": "w8 w9"}],
        [{"type": "text", "text": "w5 w6"}],
    ]  # fmt: skip
    roles = ["user", "assistant"] * 2
    return {**row, "messages": [{"role": r, "content": c} for r, c in zip(roles, parts)]}


def said(made, i):
    """The words of a row that have labels, without those of the template."""
    text = processor().tokenizer.decode(made["labels"][i][made["labels"][i] >= 0])
    return [word for word in text.split() if word in WORDS]


@pytest.mark.parametrize("name", PROCESSORS)
def test_batches_are_those_of_trl(name):
    """Tokens and images; labels are those of the assistant's words, before and behind images of several sizes."""
    collator = pytest.importorskip("trl.trainer.sft_trainer").DataCollatorForVisionLanguageModeling
    rows = conversations(3)
    rows = [rows[0], turns(rows[1]), turns(rows[2])]
    made, want = ImageRows(PROCESSORS[name]())(rows), collator(PROCESSORS[name]())(rows)
    assert set(made) == set(want)
    for key in set(made) - {"labels"}:
        assert torch.equal(made[key], want[key]), key
    assert said(made, 0) == rows[0]["messages"][1]["content"].split()
    for i in (1, 2):
        assert said(made, i) == [*rows[i]["messages"][1]["content"][0]["text"].split(), "w5", "w6"]
    assert not made["labels"].eq(IMAGE).any()


def test_a_completion_alone_has_labels():
    row = turns(conversations(3)[2])
    prompt, completion = row["messages"][:3], row["messages"][3:]
    made = ImageRows(processor())([{"images": row["images"], "prompt": prompt, "completion": completion}])
    assert said(made, 0) == ["w5", "w6"]


def test_a_folder_of_images_and_json_lines(tmp_path, monkeypatch, caplog):
    """Names are relative to the file, wherever it is read from; images and rows without any may be mixed."""
    rows = conversations(4)
    rows[3]["images"] = []
    monkeypatch.chdir(tmp_path)
    as_files(rows, tmp_path / "data")
    corpus = load_corpus("data")
    assert not caplog.records  # the images are no files that were left out
    assert have_images(corpus)
    assert not have_images(corpus.select([3]))
    monkeypatch.chdir("/")
    made, want = ImageRows(processor())([*corpus]), ImageRows(processor())(rows)
    for key, value in want.items():
        assert torch.equal(made[key], value), key
    assert len(Account(ImageRows(processor()).document)(corpus[3], 3).ids) == 16  # 4 less than with its image


def test_what_cannot_be_read_is_refused(tmp_path):
    row = conversations(1)[0]
    (tmp_path / "a.png").write_text("no image")
    read = ImageRows(processor())
    check_refused(r"a.pnk' does not exist; did you mean '.*/a.png'", read, [{**row, "images": [f"{tmp_path}/a.pnk"]}])
    check_refused("a.png' cannot be read: cannot identify", open_images, {"image": str(tmp_path / "a.png")})
    check_refused("must be a chat", read, [{"images": row["images"], "text": "w1"}])
    check_refused("have 1 places for images, but it has 2", read, [{**turns(row), "images": row["images"] * 2}])
    mute = type("Mute", (type(processor()),), {"__call__": lambda self, **how: {}})
    mute = mute(processor().image_processor, processor().tokenizer, processor().chat_template)
    check_refused("Mute does not say which tokens stand for images", ImageRows(mute), [row])
    processor().tokenizer.save_pretrained(tmp_path / "text")
    check_refused("has no processor of images", get_processor, str(tmp_path / "text"))
    check_refused("has no processor to load", get_processor, str(tmp_path))
