"""Lesson 13: a packed sample, an optimizer's state, and a search."""

import torch

from checks import Exercise


def check_pack(pack):
    cases = {
        "one question with its answer": [[([5, 6, 7], False), ([8, 9], True)]],
        "a plain text after a conversation": [[([1], False), ([2, 3], True)], [([4, 5, 6], True)]],
        "a document of one token, and one without an answer": [[([7], True)], [([1, 2], False)], [([3, 4], True)]],
        "two turns": [[([1, 2], False), ([3], True), ([4, 5], False), ([6, 7], True)], [([8], False), ([9], True)]],
        "an empty part": [[([], False), ([1, 2, 3], True)]],
    }
    for what, documents in cases.items():
        ids, spoken, first = [], [], []  # token by token: the id, whether it is trained, whether it begins a document
        for parts in documents:
            begins = True
            for part, trained in parts:
                for token in part:
                    ids, spoken, first = [*ids, token], [*spoken, trained], [*first, begins]
                    begins = False
        labels = []
        for i in range(len(ids)):
            follows = i + 1 < len(ids) and not first[i + 1] and spoken[i + 1]
            labels.append(ids[i + 1] if follows else -100)
        got = pack([[(list(part), trained) for part, trained in parts] for parts in documents])
        assert isinstance(got, tuple), f"{got!r} is not a pair of lists"
        assert list(got[0]) == ids, f"{what} ({documents}): ids {got[0]}, not {ids}"
        assert list(got[1]) == labels, f"{what} ({documents}): labels {got[1]} are not what comes next and is trained"
    return "questions have no labels, and no label crosses the border of a document"


def across_documents(documents):
    flat = [(token, trained) for parts in documents for part, trained in parts for token in part]
    said = [token if trained else -100 for token, trained in flat]
    return [token for token, _ in flat], [*said[1:], -100]


def not_shifted(documents):
    flat = [(token, trained) for parts in documents for part, trained in parts for token in part]
    return [token for token, _ in flat], [token if trained else -100 for token, trained in flat]


def everything_is_trained(documents):
    ids, labels = [], []
    for parts in documents:
        own = [token for part, _ in parts for token in part]
        ids, labels = ids + own, labels + [*own[1:], -100][: len(own)]
    return ids, labels


def own_mask(documents):
    """Says of the position itself, and not of the next one, whether it is trained."""
    ids, labels = [], []
    for parts in documents:
        own = [(token, trained) for part, trained in parts for token in part]
        ids += [token for token, _ in own]
        following = [*[token for token, _ in own][1:], -100]
        labels += [after if trained else -100 for after, (_, trained) in zip(following, own)]
    return ids, labels


def check_moments(moments_bytes):
    torch.manual_seed(0)
    tied = torch.nn.Sequential(torch.nn.Embedding(11, 6), torch.nn.Linear(6, 11, bias=False))
    tied[1].weight = tied[0].weight
    adapter = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
    adapter[0].requires_grad_(False)
    half = torch.nn.Linear(3, 9).bfloat16()
    for what, model in {"a tied head": tied, "a frozen layer": adapter, "weights in bf16": half}.items():
        trained = [p.detach().float().requires_grad_() for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained)
        for p in trained:
            p.grad = torch.ones_like(p)
        optimizer.step()
        want = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if t.dim())
        got = moments_bytes(model)
        assert got == want, f"{what}: {got:,} bytes, but AdamW's moments have {want:,}"
    return "two fp32 numbers for each trained parameter, whatever the dtype of the weights"


def all_parameters(model):
    return 8 * sum(p.numel() for p in model.parameters())


def twice_the_weights(model):
    return 2 * sum(p.nbytes for p in model.parameters() if p.requires_grad)


def tied_twice(model):
    return 8 * sum(p.numel() for m in model for p in m.parameters() if p.requires_grad)


def check_longest(longest_that_fits):
    for limit, granule in ((10_000, 256), (10_240, 256), (255, 256), (7, 1), (100_001, 1000)):
        want = max((n for n in range(0, limit + 1, granule)), default=0)
        got = longest_that_fits(lambda length, limit=limit: length <= limit, granule)
        assert got == want, f"with {limit:,} tokens of room and granule={granule}: {got:,}, not {want:,}"
    return "the planner's own search does the same by bisection"


def one_too_many(fits, granule):
    length = granule
    while fits(length):
        length += granule
    return length


def at_least_one(fits, granule):
    return max(granule, one_too_many(fits, granule) - granule)


def any_length(fits, granule):
    length = 0
    while fits(length + 1):
        length += 1
    return length


EXERCISES = {
    1: Exercise(
        check=check_pack,
        hints=(
            "Work document by document: the last position of each has no next token.",
            "Make one list for a document: its token where it is trained, and -100 where it is not. Then shift it.",
            "Shifting is dropping the first element and adding -100 at the end; then join the documents.",
        ),
        mistakes=(across_documents, not_shifted, everything_is_trained, own_mask),
    ),
    2: Exercise(
        check=check_moments,
        hints=(
            "`model.parameters()` lists a tied parameter once; `p.requires_grad` says whether it is trained.",
            "Two numbers of 4 bytes for each element.",
        ),
        mistakes=(all_parameters, twice_the_weights, tied_twice),
    ),
    3: Exercise(
        check=check_longest,
        hints=("Try one granule more as long as it fits.", "Begin at 0: perhaps nothing fits."),
        mistakes=(one_too_many, at_least_one, any_length),
    ),
}
