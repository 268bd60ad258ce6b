#!/usr/bin/env python3
"""Llama in plain PyTorch and float64: the referee of the C++ model.

`llama.py --write` makes every golden file in tests/oracle/llama/ anew; `llama.py --check` computes
them again and compares (exit 0: they agree, 1: they do not, 77: PyTorch is missing). Both take
nothing but NumPy and PyTorch.

A case file is in the safetensors format. Its metadata holds a Hugging Face config.json under
"config". Its tensors, T tokens in n documents:

    <Hugging Face name>        F32   weights, each value exactly a bfloat16
    tokens, targets            I32   [T]; a target of -1 is not part of the loss
    positions                  I32   [T], counted from the start of each document
    sequence_offsets           I32   [n + 1], where documents start, and T
    logits                     F32   [T, vocabulary]
    loss                       F64   [1], the mean over the targets that count
    grad.<Hugging Face name>   F32   the gradient of the loss; of a tied head: the sum of both uses

train10.safetensors holds ten steps of AdamW on one model: weights (before), final.<name> (after),
tokens and targets [10, T], one set of positions and sequence_offsets, losses [10] before each
step's update, gradient_norms [10] before clipping, and under "training" in the metadata the
hyperparameters. Gradients whose global norm exceeds max_grad_norm are multiplied by
max_grad_norm / norm. Weight decay applies to matrices, the embedding among them, and not to norms.
"""

import argparse
import json
import math
import pathlib
import struct
import sys

try:
    import numpy as np
    import torch
except ImportError as error:
    print(f"{error}: install python3-numpy and python3-torch (scripts/setup.sh)", file=sys.stderr)
    sys.exit(77)

GOLDEN = pathlib.Path(__file__).resolve().parent / "llama"
NUMPY_TYPES = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "I32": np.dtype("<i4")}

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # So short that 8 frequencies fall into all three bands: kept, blended and divided.
    "original_max_position_embeddings": 32,
}


# --- safetensors ---------------------------------------------------------------------------------


def write_safetensors(path, tensors, metadata):
    """Writes `tensors` (name to array of float64, float32 or int32), the widest type first so that
    each is aligned to its element."""
    header, blocks, offset = {"__metadata__": metadata}, [], 0
    names = {dtype: name for name, dtype in NUMPY_TYPES.items()}
    for name, array in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        block = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": names[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(block)],
        }
        blocks.append(block)
        offset += len(block)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blocks))


def read_safetensors(path):
    """The tensors and the metadata of a file."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    metadata = header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        flat = np.frombuffer(content[begin:end], dtype=NUMPY_TYPES[entry["dtype"]])
        tensors[name] = flat.reshape(entry["shape"])
    return tensors, metadata


# --- the model -----------------------------------------------------------------------------------


def make_config(hidden, layers, heads, kv_heads, intermediate, tied, head_dim=None, **other):
    """A Hugging Face config; head_dim appears in it only where it is not hidden / heads."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": 101,  # divisible by nothing
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
    }
    if head_dim is not None:
        config["head_dim"] = head_dim
    return {**config, **other}


def head_dim_of(config):
    return config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])


def random_weights(config, random):
    """Weights by name: float64 tensors whose values are bfloat16. Larger than in a fresh model, so
    that attention and logits are far from uniform."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    q_width = config["num_attention_heads"] * head_dim_of(config)
    kv_width = config["num_key_value_heads"] * head_dim_of(config)
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "self_attn.q_proj.weight"] = (q_width, hidden)
        shapes[prefix + "self_attn.k_proj.weight"] = (kv_width, hidden)
        shapes[prefix + "self_attn.v_proj.weight"] = (kv_width, hidden)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, q_width)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        shapes[prefix + "mlp.gate_proj.weight"] = (intermediate, hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (intermediate, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, intermediate)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)

    weights = {}
    for name, shape in shapes.items():
        values = random.standard_normal(shape)
        values = 1 + 0.2 * values if len(shape) == 1 else values * 1.2 / math.sqrt(shape[1])
        weights[name] = torch.from_numpy(values).to(torch.bfloat16).to(torch.float64)
    return weights


def rotary_frequencies(config):
    """[head_dim / 2] angles per position: Su et al. 2021, and Llama 3's scaling: wavelengths longer
    than original / low_freq_factor are stretched by `factor`, those shorter than original /
    high_freq_factor are kept, those between are blended linearly in original / wavelength."""
    head_dim = head_dim_of(config)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = config["rope_theta"] ** -exponents
    scaling = config["rope_scaling"]
    if scaling is None:
        return frequencies
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * keep + frequencies / scaling["factor"] * (1 - keep)


def rotate(x, cosine, sine):
    """Rotates pairs (i, i + head_dim / 2) of x [tokens, heads, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def rms_norm(x, weight, epsilon):
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + epsilon) * weight


def document_positions(offsets):
    return np.concatenate([np.arange(end - begin) for begin, end in zip(offsets, offsets[1:])])


def forward(config, weights, tokens, offsets):
    """Logits [T, vocabulary]. tokens is a tensor of T, offsets a list of where documents start."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, epsilon = head_dim_of(config), config["rms_norm_eps"]
    count = len(tokens)
    positions = torch.from_numpy(document_positions(offsets)).to(torch.float64)
    angles = (positions[:, None] * rotary_frequencies(config))[:, None, :]
    cosine, sine = angles.cos(), angles.sin()
    document = torch.bucketize(torch.arange(count), torch.tensor(offsets[1:]), right=True)
    visible = (document[:, None] == document[None, :]).tril()

    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):

        def weight(name, prefix=f"model.layers.{layer}."):
            return weights[f"{prefix}{name}.weight"]

        h = rms_norm(x, weight("input_layernorm"), epsilon)
        q = (h @ weight("self_attn.q_proj").T).view(count, heads, head_dim)
        k = (h @ weight("self_attn.k_proj").T).view(count, kv_heads, head_dim)
        v = (h @ weight("self_attn.v_proj").T).view(count, kv_heads, head_dim)
        k = rotate(k, cosine, sine).repeat_interleave(heads // kv_heads, dim=1)
        v = v.repeat_interleave(heads // kv_heads, dim=1)
        scores = torch.einsum("ihd,jhd->hij", rotate(q, cosine, sine), k) / math.sqrt(head_dim)
        attention = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
        mixed = torch.einsum("hij,jhd->ihd", attention, v).reshape(count, heads * head_dim)
        x = x + mixed @ weight("self_attn.o_proj").T

        h = rms_norm(x, weight("post_attention_layernorm"), epsilon)
        gate, up = h @ weight("mlp.gate_proj").T, h @ weight("mlp.up_proj").T
        x = x + (torch.nn.functional.silu(gate) * up) @ weight("mlp.down_proj").T

    x = rms_norm(x, weights["model.norm.weight"], epsilon)
    tied = config["tie_word_embeddings"]
    return x @ weights["model.embed_tokens.weight" if tied else "lm_head.weight"].T


def cross_entropy(logits, targets):
    return torch.nn.functional.cross_entropy(logits, targets, ignore_index=-1)


# --- the cases -----------------------------------------------------------------------------------

# name: config, lengths of the documents, indices of the targets left out
CASES = {
    "gqa_8_4": (make_config(32, 2, 8, 4, 24, tied=False, head_dim=8), [24], []),
    "gqa_8_1_tied": (make_config(32, 2, 8, 1, 24, tied=True, head_dim=8), [20], [19]),
    "odd_length": (make_config(24, 2, 3, 3, 40, tied=False, rope_theta=500000.0), [37], []),
    "packed_documents": (
        make_config(24, 2, 3, 1, 40, tied=False, rms_norm_eps=1e-3),
        [5, 1, 13, 8],
        [2, 4, 9, 10, 18, 26],
    ),
    "llama3_rope_tied": (
        make_config(32, 2, 2, 1, 24, tied=True, rope_scaling=LLAMA3_SCALING),
        [29],
        [],
    ),
}

TRAINING = {
    "steps": 10,
    "learning_rate": 1e-2,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.1,
    "max_grad_norm": 3.0,  # clips some of the ten steps, not all
}


def offsets_of(lengths):
    return [0, *np.cumsum(lengths).tolist()]


def random_tokens(random, count):
    """Tokens and the next ones as targets; the first token, the smallest and the largest id occur
    more than once, so that gradients of one embedding row add up."""
    tokens = random.integers(0, 101, count + 1)
    tokens[3], tokens[7:9], tokens[count - 3 : count - 1] = tokens[0], (0, 100), (0, 100)
    return tokens[:-1], tokens[1:].copy()  # targets are masked in place, tokens are not


def floats(tensors, prefix=""):
    return {prefix + n: t.detach().numpy().astype(np.float32) for n, t in tensors.items()}


def int32(values):
    return np.asarray(values, dtype=np.int32)


def make_case(seed, config, lengths, masked):
    """The tensors of one case."""
    random = np.random.Generator(np.random.PCG64(seed))
    weights = random_weights(config, random)
    offsets = offsets_of(lengths)
    tokens, targets = random_tokens(random, offsets[-1])
    targets[masked] = -1

    for weight in weights.values():
        weight.requires_grad_()
    logits = forward(config, weights, torch.from_numpy(tokens), offsets)
    loss = cross_entropy(logits, torch.from_numpy(targets))
    loss.backward()
    return {
        **floats(weights),
        "tokens": int32(tokens),
        "targets": int32(targets),
        "positions": int32(document_positions(offsets)),
        "sequence_offsets": int32(offsets),
        "logits": logits.detach().numpy().astype(np.float32),
        "loss": np.array([loss.item()]),
        **floats({name: weight.grad for name, weight in weights.items()}, "grad."),
    }


def make_training(seed):
    """The config and the tensors of the ten training steps."""
    config = make_config(16, 2, 2, 1, 24, tied=False)
    random = np.random.Generator(np.random.PCG64(seed))
    weights = random_weights(config, random)
    initial = floats(weights)
    offsets = offsets_of([11, 12])
    for weight in weights.values():
        weight.requires_grad_()
    matrices = [weight for weight in weights.values() if weight.dim() == 2]
    vectors = [weight for weight in weights.values() if weight.dim() != 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": TRAINING["weight_decay"]},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=TRAINING["learning_rate"],
        betas=(TRAINING["adam_beta1"], TRAINING["adam_beta2"]),
        eps=TRAINING["adam_epsilon"],
    )

    all_tokens, all_targets, losses, norms = [], [], [], []
    for _ in range(TRAINING["steps"]):
        tokens, targets = random_tokens(random, offsets[-1])
        targets[[offsets[1] - 1, 17]] = -1
        logits = forward(config, weights, torch.from_numpy(tokens), offsets)
        loss = cross_entropy(logits, torch.from_numpy(targets))
        optimizer.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(weight.grad.square().sum().item() for weight in weights.values()))
        if norm > TRAINING["max_grad_norm"]:
            for weight in weights.values():
                weight.grad *= TRAINING["max_grad_norm"] / norm
        optimizer.step()
        all_tokens.append(tokens)
        all_targets.append(targets)
        losses.append(loss.item())
        norms.append(norm)

    clipped = sum(norm > TRAINING["max_grad_norm"] for norm in norms)
    if not 0 < clipped < len(norms):
        raise SystemExit(f"max_grad_norm should clip some steps, not {clipped} of {len(norms)}")
    return config, {
        **initial,
        "tokens": int32(all_tokens),
        "targets": int32(all_targets),
        "positions": int32(document_positions(offsets)),
        "sequence_offsets": int32(offsets),
        "losses": np.array(losses),
        "gradient_norms": np.array(norms),
        **floats(weights, "final."),
    }


def golden_files():
    """Name, tensors and metadata of every file, computed anew."""
    for seed, (name, (config, lengths, masked)) in enumerate(CASES.items(), start=1):
        yield name, make_case(seed, config, lengths, masked), {"config": json.dumps(config)}
    config, tensors = make_training(seed=100)
    metadata = {"config": json.dumps(config), "training": json.dumps(TRAINING)}
    yield "train10", tensors, metadata


# --- checks --------------------------------------------------------------------------------------


def differences(name, tensors, metadata):
    """What a file on disk says otherwise than `tensors` and `metadata`, one line each. Results may
    differ by a few units in the last place of a float, since BLAS libraries sum in other orders."""
    path = GOLDEN / f"{name}.safetensors"
    if not path.exists():
        return [f"{name}: there is no {path.name}"]
    stored, stored_metadata = read_safetensors(path)
    lines = []
    if stored_metadata != metadata:
        lines.append(f"{name}: other metadata")
    if stored.keys() != tensors.keys():
        lines.append(f"{name}: other tensors: {sorted(stored.keys() ^ tensors.keys())}")
    for key in sorted(stored.keys() & tensors.keys()):
        old, new = stored[key], tensors[key]
        if old.dtype != new.dtype or old.shape != new.shape:
            lines.append(f"{name}: {key} has another type or shape")
        elif not np.allclose(old, new, rtol=1e-6, atol=1e-9):
            lines.append(f"{name}: {key} differs by up to {np.abs(old - new).max():g}")
    return lines


def packing_error():
    """The largest difference between logits of packed documents and of each document alone."""
    config, lengths, _ = CASES["packed_documents"]
    random = np.random.Generator(np.random.PCG64(7))
    weights, offsets = random_weights(config, random), offsets_of(lengths)
    tokens = torch.from_numpy(random_tokens(random, offsets[-1])[0])
    packed = forward(config, weights, tokens, offsets)
    bounds = zip(offsets, offsets[1:])
    alone = [forward(config, weights, tokens[b:e], [0, e - b]) for b, e in bounds]
    return (packed - torch.cat(alone)).abs().max().item()


def main():
    parser = argparse.ArgumentParser(description="Makes or checks the golden files of Llama.")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true", help="make every golden file anew")
    mode.add_argument("--check", action="store_true", help="compute them again and compare")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # one order of summation

    lines = []
    error = packing_error()
    if error > 1e-12:
        lines.append(f"packed documents differ from documents alone by {error:g}")
    if arguments.write:
        GOLDEN.mkdir(exist_ok=True)
    for name, tensors, metadata in golden_files():
        if arguments.write:
            path = GOLDEN / f"{name}.safetensors"
            write_safetensors(path, tensors, metadata)
            print(f"{path.name}: {path.stat().st_size} bytes")
        else:
            lines += differences(name, tensors, metadata)
    for line in lines:
        print(line, file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
