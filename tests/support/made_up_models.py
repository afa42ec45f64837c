"""Llama with something between attention and o_proj, as careless architectures have it."""

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(64))

    def forward(self, x):
        return x * self.weight.sigmoid()


def through_float32(x):
    """Rounds, but mixes no channels: sound, at the wider tolerance."""
    return torch.zeros(x.shape).copy_(x).double()


def norm_of_heads(x):
    """A norm without weights over each head commutes with every rotation."""
    heads = x.unflatten(-1, (-1, 32))
    return (heads / heads.norm(dim=-1, keepdim=True)).flatten(-2)


class MadeUpConfig(LlamaConfig):
    model_type = "made-up"
    between: str = "nothing"


class MadeUpAttention(LlamaAttention):
    """Llama's attention with something between attention and o_proj."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.between = {
            "gate": Gate,
            "activation": nn.SiLU,
            "function": lambda: torch.tanh,
            "clamp": lambda: lambda x: x.clamp(-30, 30),
            "float32": lambda: through_float32,
            "norm": lambda: norm_of_heads,
        }[config.between]()

    def forward(self, *args, **kwargs):
        def act(_, inputs):
            return self.between(*inputs)

        with self.o_proj.register_forward_pre_hook(act):
            return super().forward(*args, **kwargs)


class MadeUpForCausalLM(LlamaForCausalLM):
    config_class = MadeUpConfig

    def __init__(self, config):
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = MadeUpAttention(config, index)


AutoModelForCausalLM.register(MadeUpConfig, MadeUpForCausalLM, exist_ok=True)


def made_up(between):
    return MadeUpConfig(
        between=between,
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=2,
        intermediate_size=64,
    )
