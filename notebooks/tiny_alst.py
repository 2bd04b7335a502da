"""Arctic Long Sequence Training in one file. Run it: `torchrun --standalone --nproc-per-node 2 tiny_alst.py`"""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

TOKENS, PROMPT, TILE, STEPS = 512, 128, 64, 40
SIZES = {"vocab_size": 256, "hidden_size": 64, "head_dim": 16, "intermediate_size": 192, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 1}


# 1. Labels: shift first, then cut
def slice_of(tokens, rank, ranks):
    """The part of a sample that a rank holds: its tokens, their labels and their positions. [TOKENS / ranks] each."""
    labels = torch.cat([torch.full((PROMPT,), -100), tokens[PROMPT + 1 :], torch.tensor([-100])])  # none of the prompt
    n = len(tokens) // ranks
    own = slice(rank * n, (rank + 1) * n)
    return tokens[own], labels[own], torch.arange(len(tokens))[own]


# 2. Ulysses: all-to-all around attention
def to_heads(x):
    """A slice of the tokens, all heads -> all tokens, a part of the heads. [H, S / P, D] -> [H / P, S, D]"""
    sent = x.unflatten(0, (dist.get_world_size(), -1)).contiguous()  # [P, H / P, S / P, D]: part r goes to rank r
    dist.all_to_all_single(received := torch.empty_like(sent), sent)
    return received.transpose(0, 1).flatten(1, 2)


def to_slice(x):
    """The way back. [H / P, S, D] -> [H, S / P, D]"""
    sent = x.unflatten(1, (dist.get_world_size(), -1)).transpose(0, 1).contiguous()
    dist.all_to_all_single(received := torch.empty_like(sent), sent)
    return received.flatten(0, 1)


class Exchange(torch.autograd.Function):  # its gradient takes the way back
    @staticmethod
    def forward(ctx, x, there, back):
        ctx.there, ctx.back = there, back
        return there(x)

    @staticmethod
    def backward(ctx, g):
        return ctx.back(g), None, None


class Copies(torch.autograd.Function):  # key/value heads [K, ...], copied so that each rank gets one
    @staticmethod
    def forward(ctx, x, copies):
        ctx.copies = copies
        return x.repeat_interleave(copies, 0)

    @staticmethod
    def backward(ctx, g):
        return g.unflatten(0, (-1, ctx.copies)).sum(1), None


def ulysses(module, q, k, v, mask, scaling, **kwargs):
    """Attention as transformers calls it. q: [1, H, S / P, D]; k and v: [1, K, S / P, D]. Returns [1, S / P, H, D]."""
    copies = max(1, dist.get_world_size() // k.shape[1])
    q = Exchange.apply(q[0], to_heads, to_slice)
    k, v = (Exchange.apply(Copies.apply(x[0], copies), to_heads, to_slice) for x in (k, v))
    out = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=scaling, enable_gqa=True)
    return Exchange.apply(out[0], to_slice, to_heads).transpose(0, 1)[None], None


# 3. Loss in tiles: never all logits at once
class TiledLoss(torch.autograd.Function):
    """Sum of the cross-entropies of hidden [S / P, E]. Both gradients are made in forward, a tile at a time."""

    @staticmethod
    def forward(ctx, hidden, weight, labels):
        total, grad_hidden, grad_weight = hidden.new_zeros(()), torch.empty_like(hidden), torch.zeros_like(weight)
        for lo in range(0, len(hidden), TILE):
            rows, y = hidden[lo : lo + TILE], labels[lo : lo + TILE]
            logits, valid = linear(rows, weight), y != -100
            total += cross_entropy(logits, y, reduction="sum")
            g = logits.softmax(-1) * valid[:, None]
            g[valid, y[valid]] -= 1
            grad_hidden[lo : lo + TILE] = g @ weight
            grad_weight += g.T @ rows
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx, g):
        return *(g * grad for grad in ctx.saved_tensors), None


# 4. Checkpoints on the host: of a layer only its input is kept, and not on the device
class OnTheHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, layer, kwargs):
        ctx.layer, ctx.kwargs, ctx.kept, ctx.device = layer, kwargs, hidden.to("cpu"), hidden.device
        return layer(hidden, **kwargs)

    @staticmethod
    def backward(ctx, g):
        hidden = ctx.kept.to(ctx.device).detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(hidden, **ctx.kwargs).backward(g)
        return hidden.grad, None, None


# 5. A step: the loss and the gradients are sums over the ranks
def step(model, tokens):
    ids, labels, positions = slice_of(tokens, dist.get_rank(), dist.get_world_size())
    hidden = model.model(ids[None], position_ids=positions[None], use_cache=False).last_hidden_state[0]
    dist.all_reduce(count := (labels != -100).sum())
    loss = TiledLoss.apply(hidden, model.lm_head.weight, labels) / count
    loss.backward()
    for tensor in (loss.detach(), *(p.grad for p in model.parameters())):
        dist.all_reduce(tensor)
    return loss.item()


def main():
    """Train on every rank. Returns the losses, and how far the first step is from transformers in one process."""
    AttentionInterface.register("ulysses", ulysses)
    torch.manual_seed(0)
    plain, model = (LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, attn_implementation=a)) for a in ("sdpa", "ulysses"))
    model.load_state_dict(plain.state_dict())
    for layer in model.model.layers:
        layer.forward = lambda hidden, layer=layer.forward, **kwargs: OnTheHost.apply(hidden, layer, kwargs)
    text, losses = torch.tensor([*Path(torch.nn.functional.__file__).read_bytes()[:8192]]), []  # PyTorch's own source
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for tokens in text.unfold(0, TOKENS, 97)[:STEPS]:
        losses.append(step(model, tokens))
        if len(losses) == 1:
            labels = torch.cat([torch.full((PROMPT + 1,), -100), tokens[PROMPT + 1 :]])  # transformers shifts by itself
            (alone := plain(tokens[None], labels=labels[None]).loss).backward()
            pairs = zip(model.parameters(), plain.named_parameters())
            off = {name: float((p.grad - q.grad).norm() / q.grad.norm()) for p, (name, q) in pairs}
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "plain loss": alone.item(), "gradients off by": off}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = main()
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()
