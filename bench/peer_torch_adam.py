#!/usr/bin/env python3
"""Times PyTorch's AdamW on the CPU: what to measure `strata bench adam` against.

torch.optim.AdamW over fp32 parameters, gradients and moments in a few large tensors, with weight
decay, by as many threads. Its single-tensor and its foreach form take turns; the row adam/torch
holds the faster of them by the median, in parameters per second (Gparam/s).

Prints one JSON object; `spread` is (largest - smallest) / median over the timed steps. What it has
to say beside that goes to stderr. Exit: 0 done, 1 PyTorch is missing.
"""

import argparse
import json
import os
import statistics
import sys
import time

from peer_torch import commit, import_torch, machine, say

TENSORS = 16


def parse_arguments():
    parser = argparse.ArgumentParser(description="Times PyTorch's AdamW.")
    parser.add_argument("--parameters", type=int, default=64 << 20, help="fp32 parameters (64 Mi)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each form (5)")
    parser.add_argument("--warmup", type=int, default=1, help="steps before those (1)")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads (all cores)"
    )
    arguments = parser.parse_args()
    if arguments.parameters < TENSORS:
        parser.error(f"--parameters must be at least {TENSORS}")
    if min(arguments.steps, arguments.threads) < 1 or arguments.warmup < 0:
        parser.error("--steps and --threads must be at least 1, --warmup at least 0")
    return arguments


def make_optimizers(torch, count):
    """Both forms over the same tensors; each has moments of its own."""
    generator = torch.Generator().manual_seed(1)
    tensors = []
    for _ in range(TENSORS):
        tensor = torch.empty(count // TENSORS).normal_(std=0.02, generator=generator)
        tensor.grad = torch.empty_like(tensor).normal_(std=1e-3, generator=generator)
        tensors.append(tensor)
    settings = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    return {
        form: torch.optim.AdamW(tensors, foreach=form == "foreach", **settings)
        for form in ("single", "foreach")
    }


def measure(torch, arguments):
    """Parameters per second of each timed step, by form."""
    optimizers = make_optimizers(torch, arguments.parameters)
    count = arguments.parameters // TENSORS * TENSORS
    rates = {form: [] for form in optimizers}
    # The step that allocates the moments is nobody's.
    for step in range(-arguments.warmup - 1, arguments.steps):
        for form, optimizer in optimizers.items():
            begin = time.perf_counter()
            optimizer.step()
            seconds = time.perf_counter() - begin
            if step >= 0:
                rates[form].append(count / seconds)
    return rates


def main():
    arguments = parse_arguments()
    torch = import_torch(arguments.threads)
    rates = measure(torch, arguments)
    medians = {form: statistics.median(values) for form, values in rates.items()}
    for form, median in medians.items():
        say(f"peer_torch_adam: {form}: {median / 1e6:.1f} Mparam/s")
    form = max(medians, key=medians.get)
    row = {
        "key": "adam/torch",
        "median": round(medians[form] / 1e9, 5),
        "unit": "Gparam/s",
        "spread": round((max(rates[form]) - min(rates[form])) / medians[form], 4),
        "of_ceiling": None,
        "wrong": None,
        "form": form,
        "parameters": arguments.parameters,
    }
    report = {
        "schema": 1,
        "machine": machine(torch, None, arguments.threads),
        "commit": commit(),
        "rows": [row],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    sys.exit(main())
