"""Compares a hundred steps of cpu_adam with torch.optim.AdamW in float64, a million parameters.

Run with a Python that has PyTorch: python3 tests/oracle/adam_steps.py ADAM_STEPS
ADAM_STEPS is the program of tests/cpu_adam/adam_steps.cc, which makes the same inputs.

A distance is given in ULP of fp32 at the largest magnitude that the parameter has had, its start
included. Each fp32 step rounds the parameter, by half a ULP at most; these roundings add up like a
random walk, for any optimizer whose parameters are fp32. So beside the distances stand those of the
best such optimizer: float64 in all but the parameter, which is rounded after every step. The program
under test may be LARGEST_MORE ULP farther off than that one, and RMS_RATIO times as far in the mean.

Exit: 0 within the bounds, 1 not, 77 without PyTorch.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

try:
    import numpy
    import torch
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

HYPER = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}
WEIGHT_DECAY = 0.1  # of the first half
LARGEST_MORE = 4
RMS_RATIO = 1.05


def hashed(x):
    """The finalizer of MurmurHash3, of an array of uint32."""
    x = x ^ (x >> numpy.uint32(16))
    x = x * numpy.uint32(0x85EBCA6B)
    x ^= x >> numpy.uint32(13)
    x *= numpy.uint32(0xC2B2AE35)
    return x ^ (x >> numpy.uint32(16))


def centred(hash_values, bits):
    return (hash_values >> numpy.uint32(32 - bits)).astype(numpy.int64) - (1 << (bits - 1))


class Inputs:
    def __init__(self, count):
        self.indices = numpy.arange(count, dtype=numpy.uint32)
        own = hashed(self.indices ^ numpy.uint32(0x40000000))
        self.mean = centred(own, 13)
        self.scale = numpy.exp2(-15.0 - (own & numpy.uint32(15)).astype(numpy.float64))
        self.initial = centred(hashed(self.indices), 24) * 2.0**-27

    def gradient(self, step):
        offset = numpy.uint32(step * len(self.indices) % 2**32)
        return (self.mean + centred(hashed(self.indices + offset), 16)) * self.scale


class Peer:
    """torch.optim.AdamW on parameters of one dtype, two groups."""

    def __init__(self, initial, dtype):
        half = len(initial) // 2
        start = torch.from_numpy(initial).to(dtype)
        self.parts = [start[:half].clone(), start[half:].clone()]
        groups = [
            {"params": [self.parts[0]], "weight_decay": WEIGHT_DECAY},
            {"params": [self.parts[1]], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, **HYPER)

    def step(self, gradient):
        half = len(self.parts[0])
        gradient = gradient.to(self.parts[0].dtype)
        self.parts[0].grad, self.parts[1].grad = gradient[:half], gradient[half:]
        self.optimizer.step()

    def parameters(self):
        return torch.cat(self.parts).double().numpy()


def main():
    parser = argparse.ArgumentParser(description="Compares cpu_adam with PyTorch's AdamW.")
    parser.add_argument("program", help="adam_steps")
    parser.add_argument("--count", type=int, default=1_000_000, help="parameters (1000000)")
    parser.add_argument("--steps", type=int, default=100, help="steps (100)")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "parameters"
        command = [arguments.program, str(arguments.count), str(arguments.steps), str(path)]
        subprocess.run(command, check=True)
        ours = numpy.fromfile(path, dtype="<f4").astype(numpy.float64)
    if len(ours) != arguments.count:
        raise SystemExit(f"{arguments.program} wrote {len(ours)} parameters")

    inputs = Inputs(arguments.count)
    exact = Peer(inputs.initial, torch.float64)
    rounded = Peer(inputs.initial, torch.float64)
    single = Peer(inputs.initial, torch.float32)
    largest = numpy.abs(inputs.initial)
    for step in range(1, arguments.steps + 1):
        gradient = torch.from_numpy(inputs.gradient(step))
        for peer in (exact, rounded, single):
            peer.step(gradient)
        for part in rounded.parts:
            part.copy_(part.float())
        numpy.maximum(largest, numpy.abs(exact.parameters()), out=largest)

    unit = numpy.spacing(largest.astype(numpy.float32)).astype(numpy.float64)
    target = exact.parameters().astype(numpy.float32).astype(numpy.float64)
    print(f"PyTorch {torch.__version__}, {arguments.count} parameters, {arguments.steps} steps")
    runs = {
        "cpu_adam": ours,
        "float64 with fp32 parameters": rounded.parameters(),
        "PyTorch in fp32": single.parameters(),
    }
    figures = []
    for name, values in runs.items():
        distance = numpy.abs(values - target) / unit
        at = int(distance.argmax())
        figures.append((float(distance[at]), float(numpy.sqrt(numpy.mean(distance**2)))))
        print(
            f"{name}: largest {distance[at]:.0f} ULP (parameter {at}, {target[at]:.6g}), "
            f"rms {figures[-1][1]:.3f}, {numpy.mean(distance > 4):.1%} beyond 4"
        )
    (our_largest, our_rms), (best_largest, best_rms), _ = figures
    if our_largest > best_largest + LARGEST_MORE or our_rms > best_rms * RMS_RATIO:
        print("too far from what fp32 parameters can do", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
