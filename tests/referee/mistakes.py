"""Five mistakes in copies of our stack, which the referee must find in the right module."""

from exactness.stacks.ours import Stack as Ours


class _WrongModel(Ours):
    """A stack that changes the model."""

    def prepare(self, model, ranks, case):
        self.change(model, ranks)
        super().prepare(model, ranks, case)


class Scaling(_WrongModel):
    """A layer's attention has another scale."""

    def change(self, model, ranks):
        model.model.layers[1].self_attn.scaling *= 1.01


class Epsilon(_WrongModel):
    """A norm has another epsilon."""

    def change(self, model, ranks):
        model.model.layers[1].post_attention_layernorm.variance_epsilon = 1e-2


class Positions(_WrongModel):
    """The second rank's positions begin one too late."""

    def change(self, model, ranks):
        import torch.distributed as dist

        def later(module, args, kwargs):
            return args, {**kwargs, "position_ids": kwargs["position_ids"] + dist.get_rank()}

        model.model.rotary_emb.register_forward_pre_hook(later, with_kwargs=True)


class Backward(Ours):
    """The gradient of what an attention gives is halved, which no output shows."""

    def prepare(self, model, ranks, case):
        super().prepare(model, ranks, case)

        def halved(module, grads, outputs):
            return (grads[0] / 2,)

        model.model.layers[0].self_attn.o_proj.register_full_backward_hook(halved)


class Reduction(Ours):
    """The gradients of a projection and of the norm before it, a later parameter, are not summed over the ranks."""

    def step(self, batches):
        import torch.distributed as dist

        mean = super().step(batches)
        layer = self.model.model.layers[0]
        if dist.get_rank() == 0:
            for module in (layer.self_attn.k_proj, layer.input_layernorm):
                module.weight.grad *= 0.5
        return mean


KINDS = {
    "scaling": (Scaling, "the input of model.layers.1.self_attn.o_proj"),
    "epsilon": (Epsilon, "the output of model.layers.1.post_attention_layernorm"),
    "positions": (Positions, "the output of model.rotary_emb"),
    "backward": (Backward, "the gradient of the input of model.layers.0.self_attn.o_proj"),
    "reduction": (Reduction, "the gradient of model.layers.0.self_attn.k_proj.weight"),
}
"""Each with what must be named."""


def load(name):
    return KINDS[name][0]()
