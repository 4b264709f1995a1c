#!/usr/bin/env python3
"""Writes the golden numbers of tests/model from the reference implementation (torch + transformers, fp32).

  scripts/make_golden.py [--model SmolLM2.gguf] [--gemma gemma-3-270m.gguf] [-o tests/golden/model]

Tiny models are filled with the generator of tests/support/tiny_models.h, so no weights are stored: both sides make the same
ones. 1-D tensors (norms, biases) get 0.3 * normal() of stream (seed 2, fnv1a64(name)) added, so that a dropped or misplaced
one shows. Of every captured tensor a fixed sample of entries is kept, with its absolute maximum.
"""
import argparse
import json
import math
import os

import numpy as np
import torch

MASK = (1 << 64) - 1


class Rng:
    """libcalib/base/rng.h."""

    def __init__(self, state):
        self.state = state & MASK

    @staticmethod
    def for_item(seed, a, b=0):
        r = Rng(seed)
        inner = Rng(r.next() ^ ((a * 0xD1342543DE82EF95) & MASK))
        r.state = inner.next() ^ ((b * 0xAF251AF3B0F025B5) & MASK)
        r.next()
        return r

    def next(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    def uniform(self):
        return (self.next() >> 11) * 2.0**-53

    def below(self, n):
        return int(self.uniform() * n)

    def normal(self):
        u, v = 1.0 - self.uniform(), self.uniform()
        return math.sqrt(-2.0 * math.log(u)) * math.cos(2.0 * math.pi * v)


def fnv1a64(text):
    h = 14695981039346656037
    for byte in text.encode():
        h = ((h ^ byte) * 1099511628211) & MASK
    return h


def fill(name, shape, norm_base):
    if len(shape) == 1:
        rng = Rng.for_item(2, fnv1a64(name))
        base = 0.0 if name.endswith(".bias") else norm_base
        return torch.tensor([base + 0.3 * rng.normal() for _ in range(shape[0])], dtype=torch.float32)
    rng = Rng.for_item(1, fnv1a64(name))
    unit = name == "model.embed_tokens.weight" and norm_base != 0.0  # as tests/support/tiny_models.cc
    scale = 1.0 if unit else 1.0 / math.sqrt(shape[1])
    values = [rng.normal() * scale for _ in range(shape[0] * shape[1])]
    return torch.tensor(values, dtype=torch.float64).to(torch.float32).reshape(shape)


def sample(tensor, n):
    """n entries at positions i * 7919 mod size, and the absolute maximum."""
    flat = tensor.detach().to(torch.float32).contiguous().reshape(-1).numpy()
    return {"size": int(flat.size), "absmax": float(np.abs(flat).max()),
            "values": [float(flat[(i * 7919) % flat.size]) for i in range(n)]}


def capture(model, ids, n_sample, n_logits):
    """Runs one sequence; keys and values [T, H, D], as kvcalib captures them."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pre = {}
    hooks = []
    for i, layer in enumerate(model.model.layers):
        source = getattr(layer.self_attn, "k_norm", None) or layer.self_attn.k_proj
        heads_first = config.model_type == "gemma3_text"  # its k_norm sees [1, H, T, D]
        hooks.append(source.register_forward_hook(lambda m, a, out, i=i, turn=heads_first: pre.__setitem__(
            i, (out.transpose(1, 2) if turn else out).reshape(len(ids), -1, head_dim))))
    with torch.no_grad():
        out = model(input_ids=torch.tensor([ids]), use_cache=True)
    for hook in hooks:
        hook.remove()
    logits = out.logits[0]
    layers = []
    for i in range(config.num_hidden_layers):
        cache = out.past_key_values.layers[i]
        entry = {"k_pre": sample(pre[i], n_sample)}
        if cache.keys.shape[2] == len(ids):  # a sliding-window cache keeps the newest tokens only
            entry["k_post"] = sample(cache.keys[0].transpose(0, 1), n_sample)
            entry["v"] = sample(cache.values[0].transpose(0, 1), n_sample)
        else:
            entry["k_post_last"] = sample(cache.keys[0].transpose(0, 1)[-4:], n_sample)
            entry["v_last"] = sample(cache.values[0].transpose(0, 1)[-4:], n_sample)
        layers.append(entry)
    nll = torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(ids[1:])).item()
    return {"ids": ids, "layers": layers, "logits": sample(logits, n_logits), "nll": nll}


def tiny(model_type, **changes):
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM, SmolLM3Config, SmolLM3ForCausalLM

    classes = {"llama": (LlamaConfig, LlamaForCausalLM), "mistral": (MistralConfig, MistralForCausalLM),
               "qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM),
               "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM), "smollm3": (SmolLM3Config, SmolLM3ForCausalLM)}
    config_class, model_class = classes[model_type]
    settings = dict(vocab_size=260, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
                    num_key_value_heads=2, rms_norm_eps=1e-6, max_position_embeddings=4096, tie_word_embeddings=False,
                    rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, attn_implementation="eager")
    settings.update(changes)
    model = model_class(config_class(**settings)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(fill(name, list(parameter.shape), 0.0 if model_type == "gemma3" else 1.0))
    return model


def tiny_goldens():
    llama = dict(num_attention_heads=8, num_key_value_heads=4)
    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    llama3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 64}
    models = {
        "llama": tiny("llama", **llama),
        "llama_rope_linear": tiny("llama", **llama, rope_parameters=linear),
        "llama_rope_llama3": tiny("llama", **llama, rope_parameters=llama3),
        "llama_bias": tiny("llama", **llama, attention_bias=True, mlp_bias=True),
        "mistral_sliding": tiny("mistral", **llama, sliding_window=8, head_dim=8),
        "qwen2": tiny("qwen2", use_sliding_window=False),
        "qwen3": tiny("qwen3", num_hidden_layers=3, head_dim=32),
        "smollm3": tiny("smollm3", **llama, pad_token_id=0),  # the fourth layer has no RoPE
    }
    types = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
    gemma3 = dict(types, head_dim=16, query_pre_attn_scalar=16, tie_word_embeddings=True)
    local = {"rope_type": "default", "rope_theta": 10000.0}
    models["gemma3"] = tiny("gemma3", **gemma3, rope_parameters={
        "sliding_attention": local, "full_attention": {"rope_type": "default", "rope_theta": 1e6}})
    models["gemma3_rope_linear"] = tiny("gemma3", **{**gemma3, "query_pre_attn_scalar": 40}, rope_parameters={
        "sliding_attention": local, "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}})
    rng = Rng(7)
    ids = [rng.below(260) for _ in range(80)]
    return {name: capture(model, ids, 48, 96) for name, model in models.items()}


def real_golden(path, ids_file):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(os.path.dirname(path), gguf_file=os.path.basename(path),
                                                 dtype=torch.float32, attn_implementation="eager").eval()
    # Ids, never text: the reference ignores tokenizer.ggml.pre of GGUF files.
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, "..", "tests", "golden", "model", ids_file)) as f:
        ids = json.load(f)
    golden = capture(model, ids, 6, 48)
    golden["file"] = os.path.basename(path)
    return golden


def write(path, value):
    text = json.dumps(value, separators=(",", ":"))
    text = text.replace('},"', '},\n"').replace("]},{", "]},\n{")
    with open(path, "w") as f:
        f.write(text + "\n")


def rounded(value):
    if isinstance(value, float):
        return float(f"{value:.8g}")
    if isinstance(value, list):
        return [rounded(v) for v in value]
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return value


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="SmolLM2-135M-Instruct.Q4_1.gguf; without it only the tiny goldens are written")
    parser.add_argument("--gemma", help="gemma-3-270m-q4_k_m.gguf")
    parser.add_argument("-o", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "golden", "model"))
    args = parser.parse_args()
    os.makedirs(args.o, exist_ok=True)
    for name, golden in tiny_goldens().items():
        write(os.path.join(args.o, name + ".json"), rounded(golden))
    if args.model:
        write(os.path.join(args.o, "smollm2.json"), rounded(real_golden(os.path.abspath(args.model), "smollm2_ids.json")))
    if args.gemma:
        write(os.path.join(args.o, "gemma3_270m.json"), rounded(real_golden(os.path.abspath(args.gemma), "gemma3_270m_ids.json")))


if __name__ == "__main__":
    main()
