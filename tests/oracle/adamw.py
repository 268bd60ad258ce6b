"""Writes adamw.json: ten steps of torch.optim.AdamW in float64, the referee of the AdamW test.

Run with a Python that has PyTorch: python3 tests/oracle/adamw.py
Inputs are fp32 parameters and bf16 gradients from a fixed seed; the results are rounded to fp32
once, at the end. Two groups: parameters with weight decay, then parameters without. The difference
of PyTorch's own fp32 run from the float64 run is printed for comparison.
"""

import json
import pathlib

import numpy
import torch

SEED = 20240607
COUNT = 256
STEPS = 10
HYPER = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}


def make_inputs():
    generator = torch.Generator().manual_seed(SEED)
    parameters = 0.02 * torch.randn(COUNT, generator=generator, dtype=torch.float64)
    # Gradients of very different sizes, with a drift, so that both moments settle to something.
    scales = 10.0 ** torch.empty(COUNT, dtype=torch.float64).uniform_(-6, 0, generator=generator)
    drift = torch.randn(COUNT, generator=generator, dtype=torch.float64)
    noise = torch.randn(STEPS, COUNT, generator=generator, dtype=torch.float64)
    gradients = scales * (drift + noise)
    gradients[:, 0] = 0  # a parameter that is never touched
    return parameters.float(), gradients.to(torch.bfloat16)


def train(parameters, gradients, dtype):
    half = COUNT // 2
    groups = [parameters[:half].to(dtype, copy=True), parameters[half:].to(dtype, copy=True)]
    optimizer = torch.optim.AdamW(
        [
            {"params": [groups[0]], "weight_decay": HYPER["weight_decay"]},
            {"params": [groups[1]], "weight_decay": 0.0},
        ],
        lr=HYPER["learning_rate"],
        betas=(HYPER["beta1"], HYPER["beta2"]),
        eps=HYPER["epsilon"],
    )
    for gradient in gradients.to(dtype):
        groups[0].grad, groups[1].grad = gradient[:half].clone(), gradient[half:].clone()
        optimizer.step()
    states = [optimizer.state[group] for group in groups]
    return {
        "parameters": torch.cat(groups),
        "moment1": torch.cat([state["exp_avg"] for state in states]),
        "moment2": torch.cat([state["exp_avg_sq"] for state in states]),
    }


def as_list(tensor):
    """Shortest decimals that give the fp32 values back."""
    return [float(str(value)) for value in tensor.float().numpy()]


def main():
    parameters, gradients = make_inputs()
    exact = train(parameters, gradients, torch.float64)
    single = train(parameters, gradients, torch.float32)
    largest = torch.maximum(exact["parameters"].abs(), parameters.double().abs()).float().numpy()
    error = (single["parameters"].double() - exact["parameters"]).abs().numpy()
    print(f"PyTorch {torch.__version__} fp32: {(error / numpy.spacing(largest)).max():.2f} ULP")

    golden = {
        "source": "tests/oracle/adamw.py, torch.optim.AdamW in float64",
        **HYPER,
        "steps": STEPS,
        "decayed": COUNT // 2,
        "initial": as_list(parameters),
        "gradients": [as_list(row) for row in gradients],
        "expected": {name: as_list(tensor) for name, tensor in exact.items()},
    }
    path = pathlib.Path(__file__).with_name("adamw.json")
    path.write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
