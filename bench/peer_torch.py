#!/usr/bin/env python3
"""Trains the benchmark model in plain PyTorch on the CPU: what to measure the host device against.

The model is a Llama: hidden 1024, 8 layers, 16 heads, intermediate 2816, vocabulary 32000,
sequences of 512, untied head, random weights and tokens. A step is micro_batch x accumulate
sequences, forward and backward, exact clipping to norm 1, and AdamW. Rows: peer/torch/fp32 and
peer/torch/bf16 (fp32 weights, bf16 autocast). With more than one --micro-batch, the row holds the
fastest of them.

Prints one JSON object; `spread` is (largest - smallest) / median over the timed steps. What it has
to say beside that goes to stderr. Exit: 0 done, 1 PyTorch is missing or cannot be measured fairly.
"""

import argparse
import ctypes
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import time

HIDDEN, LAYERS, HEADS, INTERMEDIATE, VOCABULARY, SEQUENCE = 1024, 8, 16, 2816, 32000, 512
HEAD_DIM = HIDDEN // HEADS
ROPE_THETA, EPSILON, MAX_GRAD_NORM = 10000.0, 1e-5, 1.0


def say(text):
    print(text, file=sys.stderr, flush=True)


def parse_arguments():
    parser = argparse.ArgumentParser(description="Trains the benchmark model in PyTorch.")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each row (5)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before those (2)")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads (all cores)"
    )
    parser.add_argument(
        "--micro-batch", type=int, nargs="+", default=[4], metavar="N", help="sequences at once (4)"
    )
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step (1)")
    precisions = ["fp32", "bf16"]
    parser.add_argument("--precision", nargs="+", choices=precisions, default=precisions)
    arguments = parser.parse_args()
    for name in ("steps", "threads", "accumulate"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if min(arguments.micro_batch) < 1 or arguments.warmup < 0:
        parser.error("--micro-batch must be at least 1, --warmup at least 0")
    return arguments


def import_torch(threads):
    """PyTorch with all of its thread pools set to `threads`, which they read while loading."""
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = str(threads)
    # Without these glibc maps and unmaps every large tensor, and each step faults all its pages in
    # anew.
    m_trim_threshold, m_mmap_max = -1, -4
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)
    try:
        import torch
    except ImportError as error:
        say(
            f"peer_torch: {error}: PyTorch is missing for {sys.executable}. "
            "Install python3-torch (scripts/setup.sh) and run this under /usr/bin/python3."
        )
        sys.exit(1)
    torch.set_num_threads(threads)
    return torch


def loaded_blas(torch):
    """The file of the BLAS that fp32 matrix products use, or None where PyTorch has its own."""
    torch.ones(8, 8) @ torch.ones(8, 8)
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    paths = sorted({line.split()[-1] for line in lines})
    # Debian links PyTorch to libblas.so.3, whose alternatives are told apart by their folders.
    for library in ("libblas.so", "libopenblas", "libmkl", "libblis"):
        for path in paths:
            if pathlib.PurePath(path).name.startswith(library):
                return path
    return None


def check_blas(torch):
    """Ends the program where the BLAS is the reference implementation."""
    blas = loaded_blas(torch)
    if blas is None:
        say("peer_torch: no BLAS library is loaded; PyTorch brings its own")
    elif any(name in blas for name in ("openblas", "mkl", "blis")):
        say(f"peer_torch: BLAS is {blas}")
    else:
        say(
            f"peer_torch: BLAS is {blas}, the reference implementation, about 150 times slower "
            "than OpenBLAS: nothing measured with it would be fair. Install libopenblas0-pthread "
            "(scripts/setup.sh), or choose it with update-alternatives."
        )
        sys.exit(1)
    return blas


def make_model(torch):
    """A torch.nn.Module from tokens and targets [batch, SEQUENCE] to the mean loss."""
    nn, functional = torch.nn, torch.nn.functional
    frequencies = ROPE_THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.arange(SEQUENCE)[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=1)[:, None, :]
    cosine, sine = angles.cos(), angles.sin()
    causal = torch.full((SEQUENCE, SEQUENCE), -math.inf).triu(1)

    class RmsNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(HIDDEN))

        def forward(self, x):
            return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + EPSILON) * self.weight

    def rotate(x):
        first, second = x.chunk(2, dim=-1)
        return x * cosine.to(x.dtype) + torch.cat((-second, first), dim=-1) * sine.to(x.dtype)

    def attention(q, k, v):
        """Causal attention of [batch, SEQUENCE, HEADS, HEAD_DIM]. Release 1.13's own function runs
        the same products on the CPU and builds its mask in every call."""
        q, k, v = (
            x.transpose(1, 2).reshape(-1, SEQUENCE, HEAD_DIM) for x in (rotate(q), rotate(k), v)
        )
        scores = torch.baddbmm(
            causal.to(q.dtype), q, k.transpose(1, 2), alpha=1 / math.sqrt(HEAD_DIM)
        )
        out = torch.bmm(scores.softmax(dim=-1), v).view(-1, HEADS, SEQUENCE, HEAD_DIM)
        return out.transpose(1, 2).reshape(-1, SEQUENCE, HIDDEN)

    def linear(inputs, outputs):
        return nn.Linear(inputs, outputs, bias=False)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = RmsNorm(), RmsNorm()
            self.qkv, self.out = linear(HIDDEN, 3 * HIDDEN), linear(HIDDEN, HIDDEN)
            self.gate_up = linear(HIDDEN, 2 * INTERMEDIATE)
            self.down = linear(INTERMEDIATE, HIDDEN)

        def forward(self, x):
            qkv = self.qkv(self.norm1(x)).view(-1, SEQUENCE, 3, HEADS, HEAD_DIM)
            x = x + self.out(attention(*qkv.unbind(dim=2)))
            gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
            return x + self.down(functional.silu(gate) * up)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm, self.head = RmsNorm(), linear(HIDDEN, VOCABULARY)

        def forward(self, tokens, targets):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            logits = self.head(self.norm(x)).view(-1, VOCABULARY)
            return functional.cross_entropy(logits.float(), targets.view(-1))

    model = Model()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    return model


def make_optimizer(torch, model, foreach):
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() == 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() != 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, foreach=foreach)


def clip_gradients(torch, parameters):
    """As clip_grad_norm_, but without the pass over all gradients where none is needed."""
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in parameters])).item()
    if norm > MAX_GRAD_NORM:
        for parameter in parameters:
            parameter.grad.mul_(MAX_GRAD_NORM / norm)
    return norm


def run_gradients(torch, model, micro_batch, accumulate, bf16):
    """Leaves the gradient of one step in the model; returns its loss."""
    total = 0.0
    for _ in range(accumulate):
        tokens = torch.randint(VOCABULARY, (micro_batch, SEQUENCE + 1))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = model(tokens[:, :-1], tokens[:, 1:].contiguous()) / accumulate
        loss.backward()
        total += loss.item()
    return total


def faster_optimizer(torch, model):
    """Of the two forms of AdamW, the one whose second step takes less time on this machine."""
    seconds = {}
    for foreach in (False, True):
        optimizer = make_optimizer(torch, model, foreach)
        for _ in range(2):  # the first allocates the moments
            begin = time.perf_counter()
            optimizer.step()
            seconds[foreach] = time.perf_counter() - begin
    say(f"peer_torch: AdamW {seconds[False]:.2f} s, with foreach {seconds[True]:.2f} s")
    return make_optimizer(torch, model, seconds[True] < seconds[False])


def measure(torch, precision, micro_batch, arguments):
    """Tokens per second of each timed step."""
    torch.manual_seed(1)
    model = make_model(torch)
    parameters = list(model.parameters())
    shape = (micro_batch, arguments.accumulate, precision == "bf16")
    run_gradients(torch, model, *shape)
    optimizer = faster_optimizer(torch, model)
    optimizer.zero_grad(set_to_none=True)

    rates = []
    tokens = micro_batch * arguments.accumulate * SEQUENCE
    for step in range(-arguments.warmup, arguments.steps):
        begin = time.perf_counter()
        loss = run_gradients(torch, model, *shape)
        middle = time.perf_counter()
        norm = clip_gradients(torch, parameters)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        end = time.perf_counter()
        if not math.isfinite(loss):
            raise SystemExit(f"peer_torch: {precision}: the loss of step {step} is {loss}")
        say(
            f"peer_torch: {precision} micro-batch {micro_batch} "
            f"{'step ' + str(step + 1) if step >= 0 else 'warm-up'}: "
            f"loss {loss:.3f}, norm {norm:.2f}, "
            f"gradients {middle - begin:.2f} s, update {end - middle:.2f} s"
        )
        if step >= 0:
            rates.append(tokens / (end - begin))
    return rates


def make_row(torch, precision, arguments):
    best, best_rates = None, [0.0]
    for micro_batch in arguments.micro_batch:
        rates = measure(torch, precision, micro_batch, arguments)
        if statistics.median(rates) > statistics.median(best_rates):
            best, best_rates = micro_batch, rates
    median = statistics.median(best_rates)
    return {
        "key": f"peer/torch/{precision}",
        "median": round(median, 2),
        "unit": "tokens/s",
        "spread": round((max(best_rates) - min(best_rates)) / median, 4),
        "of_ceiling": None,
        "wrong": None,
        "micro_batch": best,
    }


def machine(torch, blas, threads):
    """As in the other benchmarks' reports, with what PyTorch computes with."""

    def first_value_of(path, key):
        try:
            lines = pathlib.Path(path).read_text().splitlines()
        except OSError:
            lines = []
        values = [line.split(":", 1)[1].strip() for line in lines if line.startswith(key)]
        return values[0] if values else "unknown"

    return {
        "cpu": first_value_of("/proc/cpuinfo", "model name"),
        "threads": threads,
        "memory": first_value_of("/proc/meminfo", "MemTotal"),
        "torch": torch.__version__,
        "blas": blas,
    }


def commit():
    folder = pathlib.Path(__file__).resolve().parent
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def main():
    arguments = parse_arguments()
    torch = import_torch(arguments.threads)
    blas = check_blas(torch)
    report = {
        "schema": 1,
        "machine": machine(torch, blas, arguments.threads),
        "commit": commit(),
        "rows": [make_row(torch, precision, arguments) for precision in arguments.precision],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
