#!/usr/bin/env python3
"""Runs the strata binary as a user would: cli_test.py BINARY [unittest arguments]."""

import json
import os
import pathlib
import random
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

BINARY = ""

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


def strata(*arguments, timeout=120):
    return subprocess.run(
        [BINARY, *map(str, arguments)], capture_output=True, text=True, timeout=timeout
    )


class Case(unittest.TestCase):
    """A directory with a model's config and a text, and a run of twelve steps on them."""

    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory(prefix="strata-cli-")
        self.addCleanup(self.temporary.cleanup)
        self.dir = pathlib.Path(self.temporary.name)
        self.config = self.dir / "config.json"
        self.config.write_text(json.dumps(CONFIG))
        self.text = self.dir / "text.txt"
        words = random.Random(1)
        self.text.write_text("".join(words.choice(["lo ", "and ", "behold "]) for _ in range(900)))
        self.out = self.dir / "run"

    def train(self, *more, **replaced):
        keys = {
            "model": self.config,
            "datasets": self.text,
            "output_dir": self.out,
            "sequence_len": 24,
            "micro_batch_size": 2,
            "max_steps": 12,
            "threads": 2,
            **replaced,
        }
        flags = [item for key, value in keys.items() for item in (f"--{key}", value)]
        return strata("train", *flags, *more)

    def assert_refused(self, result, *words, code=2):
        """One sentence on stderr with all the words, the exit code, and nothing written."""
        self.assertEqual(result.returncode, code, result.stderr)
        lines = [line for line in result.stderr.splitlines() if line]
        self.assertEqual(len(lines), 1, result.stderr)
        self.assertTrue(lines[0].startswith("strata: "), lines[0])
        for word in words:
            self.assertIn(str(word), lines[0])
        self.assertEqual(result.stdout, "")
        self.assertFalse(self.out.exists() and any(self.out.iterdir()), "something was written")


class Usage(Case):
    def test_help_has_examples_everywhere(self):
        for command in (["train"], ["generate"], ["export"], ["bench"], []):
            result = strata(*command, "--help")
            self.assertEqual(result.returncode, 0)
            self.assertIn("Examples:", result.stdout)

    def test_every_key_is_a_flag(self):
        text = strata("train", "--help").stdout
        for key in "model datasets sequence_len max_grad_norm resume offload weight_slots".split():
            self.assertIn(f"--{key}", text)

    def test_no_command_and_unknown_command(self):
        self.assertEqual(strata().returncode, 2)
        self.assertEqual(strata("trane").returncode, 2)
        self.assertEqual(strata("train", "--no_such_key", 3).returncode, 2)

    def test_unknown_yaml_key_names_the_nearest(self):
        file = self.dir / "train.yaml"
        file.write_text("model: x\nlerning_rate: 1\n")
        self.assert_refused(strata("train", file), file, "lerning_rate", "learning_rate")

    def test_bad_yaml(self):
        file = self.dir / "train.yaml"
        for text in ("a: [1", "- 1\n", "seed: 1\nseed: 2\n", "sequence_len: many\n"):
            file.write_text(text)
            self.assert_refused(strata("train", file), file)
        self.assert_refused(strata("train", self.dir / "none.yaml"), "none.yaml")

    def test_required_keys(self):
        self.assert_refused(strata("train", "--datasets", self.text), "model")

    def test_absurd_values(self):
        for key, value in {
            "sequence_len": -1,
            "micro_batch_size": 0,
            "learning_rate": "nan",
            "max_steps": -5,
            "weight_slots": 0,
            "val_set_size": 1.5,
            "adam_beta1": 1.0,
            "device_memory": "lots",
            "compute_dtype": "fp8",
            "lr_scheduler": "zigzag",
        }.items():
            with self.subTest(key=key):
                self.assert_refused(self.train(**{key: value}), key)


class BadModel(Case):
    def write_weights(self, change=lambda header: None, data=None, length=None):
        """A directory with a model whose safetensors header was tampered with."""
        directory = self.dir / "model"
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(CONFIG))
        d, f, kv, v = 32, 64, 16, 256
        shapes = {"model.embed_tokens.weight": [v, d], "model.norm.weight": [d]}
        shapes["lm_head.weight"] = [v, d]
        for i in range(2):
            p = f"model.layers.{i}."
            shapes |= {
                p + "input_layernorm.weight": [d],
                p + "post_attention_layernorm.weight": [d],
                p + "self_attn.q_proj.weight": [d, d],
                p + "self_attn.k_proj.weight": [kv, d],
                p + "self_attn.v_proj.weight": [kv, d],
                p + "self_attn.o_proj.weight": [d, d],
                p + "mlp.gate_proj.weight": [f, d],
                p + "mlp.up_proj.weight": [f, d],
                p + "mlp.down_proj.weight": [d, f],
            }
        header, offset = {}, 0
        for name, shape in shapes.items():
            size = 4
            for extent in shape:
                size *= extent
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
            offset += size
        change(header)
        text = json.dumps(header).encode()
        body = bytes(offset) if data is None else data
        file = directory / "model.safetensors"
        file.write_bytes(struct.pack("<Q", length or len(text)) + text + body)
        return directory

    def test_a_good_one_is_taken(self):
        result = self.train(model=self.write_weights(), max_steps=1)
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_missing_files(self):
        self.assert_refused(self.train(model=self.dir / "nowhere"), "nowhere")

    def test_broken_config(self):
        for change, word in (
            ({"hidden_size": -4}, "hidden_size"),
            ({"hidden_size": "big"}, "hidden_size"),
            ({"num_key_value_heads": 3}, "num_key_value_heads"),
            ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "GPT2"),
            ({"hidden_act": "gelu"}, "hidden_act"),
        ):
            self.config.write_text(json.dumps(CONFIG | change))
            self.assert_refused(self.train(), self.config, word)
        self.config.write_text("{")
        self.assert_refused(self.train(), self.config)

    def test_lying_headers(self):
        name = "model.layers.1.mlp.up_proj.weight"

        def moved(header):
            header[name]["data_offsets"] = [10**9, 10**9 + 8192]

        def overlapping(header):
            header[name]["data_offsets"] = header["model.layers.1.mlp.gate_proj.weight"]["data_offsets"]

        def unknown_type(header):
            header[name]["dtype"] = "F7"

        def other_shape(header):
            header[name]["shape"] = [32, 64]

        def missing(header):
            header["other"] = header.pop(name)

        for change, word in (
            (moved, name),
            (overlapping, name),
            (unknown_type, "F7"),
            (other_shape, "64"),
            (missing, name),
        ):
            with self.subTest(change=change.__name__):
                directory = self.write_weights(change)
                self.assert_refused(self.train(model=directory), directory, word)

    def test_truncated(self):
        directory = self.write_weights(data=b"short")
        self.assert_refused(self.train(model=directory), "model.safetensors")
        directory = self.write_weights(length=10**12)
        self.assert_refused(self.train(model=directory), "model.safetensors")
        (directory / "model.safetensors").write_bytes(b"abc")
        self.assert_refused(self.train(model=directory), "model.safetensors")


class BadData(Case):
    def test_missing_empty_short(self):
        self.assert_refused(self.train(datasets=self.dir / "none.txt"), "none.txt")
        self.text.write_text("")
        self.assert_refused(self.train(), self.text, "empty")
        self.text.write_text("short")
        self.assert_refused(self.train(), self.text, "5", "25")

    def test_token_files(self):
        file = self.dir / "tokens.u16.bin"
        file.write_bytes(b"123")
        self.assert_refused(self.train(datasets=file), file)

    def test_a_token_outside_the_vocabulary_is_named(self):
        file = self.dir / "tokens.u16.bin"
        file.write_bytes(struct.pack("<200H", *range(200, 400)))
        result = self.train(datasets=file)
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn(str(file), result.stderr)
        self.assertIn("256", result.stderr)


class BadOutput(Case):
    def test_too_little_device_memory_says_how_much_is_needed(self):
        result = self.train(device_memory="20KiB", offload="host")
        self.assert_refused(result, "device memory", code=3)
        needed = int(re.search(r"\((\d+) bytes\)", result.stderr).group(1))
        exact = self.train(device_memory=needed, offload="host", max_steps=1)
        self.assertEqual(exact.returncode, 0, exact.stderr)

    def test_one_byte_less_is_refused(self):
        result = self.train(device_memory="20KiB", offload="host")
        needed = int(re.search(r"\((\d+) bytes\)", result.stderr).group(1))
        self.assert_refused(self.train(device_memory=needed - 1, offload="host"), code=3)

    def test_unwritable(self):
        self.assert_refused(self.train(output_dir="/proc/strata"), "/proc/strata")
        self.assert_refused(self.train(output_dir=self.text), self.text)

    def test_full_disk(self):
        directory = self.dir / "small"
        directory.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "none", directory], capture_output=True
        )
        if mounted.returncode != 0:
            self.skipTest("mounting a small file system needs privileges")
        try:
            self.out = directory / "run"
            self.assert_refused(self.train(), self.out, "free")
        finally:
            subprocess.run(["umount", directory], check=True)

    def test_a_second_run_does_not_write_over_the_first(self):
        self.assertEqual(self.train(max_steps=1).returncode, 0)
        before = sorted(path.name for path in self.out.iterdir())
        result = self.train(max_steps=1)
        self.assertEqual(result.returncode, 2)
        self.assertIn("--resume auto", result.stderr)
        self.assertEqual(before, sorted(path.name for path in self.out.iterdir()))


class Resume(Case):
    def state(self, directory):
        return (directory / "checkpoint-002000" / "state.safetensors").read_bytes()

    def test_killed_at_any_moment_the_bits_are_the_same(self):
        whole = self.dir / "whole"
        result = self.train(output_dir=whole, max_steps=2000, save_steps=100)
        self.assertEqual(result.returncode, 0, result.stderr)
        flags = "--max_steps 2000 --save_steps 100 --sequence_len 24 --micro_batch_size 2 --threads 2"
        moments = random.Random(5)
        command = [BINARY, "train", *flags.split(), "--model", self.config, "--datasets", self.text]
        command += ["--output_dir", self.out, "--resume", "auto"]
        kills = 0
        while kills < 200:
            process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            time.sleep(moments.uniform(0.02, 0.4))
            if process.poll() is not None:
                break
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
        self.assertGreater(kills, 0)
        if process.returncode != 0:
            self.assertEqual(subprocess.run(command, stderr=subprocess.DEVNULL).returncode, 0)
        self.assertEqual(self.state(self.out), self.state(whole))
        lines = [
            [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            for run in (whole, self.out)
        ]
        timeless = [
            [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")} for line in run]
            for run in lines
        ]
        self.assertEqual(timeless[0], timeless[1])
        print(f"killed {kills} times", file=sys.stderr)

    def test_an_interrupt_saves_and_says_how_to_go_on(self):
        command = [BINARY, "train", "--model", self.config, "--datasets", self.text, "--sequence_len", "24"]
        command += ["--output_dir", self.out, "--max_steps", "100000", "--logging_steps", "1"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        for line in process.stderr:
            if line.startswith("step"):
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        process.stderr.close()
        self.assertEqual(process.wait(), 130, rest)
        self.assertIn("--resume auto", rest)
        self.assertEqual(len(list(self.out.glob("checkpoint-*"))), 1)


class Products(Case):
    def test_train_generate_export(self):
        result = self.train("--json", learning_rate=0.01)
        self.assertEqual(result.returncode, 0, result.stderr)
        outcome = json.loads(result.stdout)
        self.assertEqual(outcome["schema"], 1)
        self.assertEqual(outcome["step"], 12)
        self.assertLess(outcome["eval_loss"], 5.6)

        flags = ("--prompt", "lo ", "--max-tokens", 20, "--json", "--seed", 7)
        first = json.loads(strata("generate", self.out, *flags).stdout)
        again = json.loads(strata("generate", self.out, *flags).stdout)
        self.assertEqual(first, again)
        self.assertEqual(len(first["ids"]), 20)

        exported = self.dir / "exported"
        result = strata("export", self.out, exported)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual((exported / "config.json").read_text(), self.config.read_text())
        greedy = ("--prompt", "and ", "--max-tokens", 30, "--temperature", 0)
        self.assertEqual(
            strata("generate", exported, *greedy).stdout, strata("generate", self.out, *greedy).stdout
        )
        self.assertEqual(strata("export", self.out, exported).returncode, 2)

    def test_generate_refuses(self):
        self.assertEqual(strata("generate", self.dir / "nothing").returncode, 2)
        self.assertEqual(strata("generate", self.dir).returncode, 2)  # a config without weights

    def test_memory_is_as_planned(self):
        result = self.train("--json", offload="host", sequence_len=64, micro_batch_size=32, max_steps=3)
        outcome = json.loads(result.stdout)
        excess = outcome["peak_resident_bytes"] - outcome["planned_bytes"]
        self.assertLess(excess, 0.02 * outcome["planned_bytes"] + 64 * 2**20)


if __name__ == "__main__":
    BINARY = os.path.abspath(sys.argv.pop(1))
    unittest.main(verbosity=2)
