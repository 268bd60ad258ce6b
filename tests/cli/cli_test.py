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
ROOT = pathlib.Path(__file__).resolve().parents[2]

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
        for command in (["train"], ["generate"], ["export"], ["bench"], ["plan"], []):
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


class Devices(Case):
    """What the command line says of devices where there is no CUDA."""

    def why_not(self):
        """What train says is missing for CUDA; skips the test where nothing is."""
        result = self.train(device="cuda", max_steps=1)
        if result.returncode == 0:
            self.skipTest("there is a CUDA device")
        self.assert_refused(result, "device: cuda is not possible: ")
        return result.stderr.strip().partition("not possible: ")[2]

    def test_cuda_where_there_is_none_says_what_is_missing(self):
        missing = self.why_not()
        self.assertRegex(missing, "driver|device|this build has no CUDA")
        self.assertIn("; ", missing)  # and what to do about it

    def test_auto_says_in_one_line_why_it_is_the_host(self):
        missing = self.why_not()
        result = self.train(max_steps=1)
        self.assertEqual(result.returncode, 0, result.stderr)
        lines = [line for line in result.stderr.splitlines() if missing in line]
        self.assertEqual(len(lines), 1, result.stderr)
        self.assertIn("CPU cores", result.stderr)

    def test_host_says_nothing_of_cuda(self):
        result = self.train(device="host", max_steps=1)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertNotIn("CUDA", result.stderr)

    def test_every_command_that_computes(self):
        missing = self.why_not()
        self.assertEqual(self.train(device="host", max_steps=1).returncode, 0)
        generate = ("generate", self.out, "--prompt", "lo ", "--max-tokens", 2)
        commands = {"generate": generate, "bench": ("bench", "matmul")}
        for name, command in commands.items():
            with self.subTest(command=name):
                refused = strata(*command, "--device", "cuda")
                self.assertEqual(refused.returncode, 2, refused.stderr)
                self.assertEqual(refused.stdout, "")
                self.assertIn(missing, refused.stderr)
                unknown = strata(*command, "--device", "abacus")
                self.assertEqual(unknown.returncode, 2, unknown.stderr)
                self.assertIn("abacus", unknown.stderr)
        auto = strata(*generate, "--temperature", 0, "--json")
        host = strata(*generate, "--temperature", 0, "--json", "--device", "host")
        self.assertEqual(auto.stdout, host.stdout)
        self.assertEqual(len([line for line in auto.stderr.splitlines() if missing in line]), 1)
        self.assertEqual(host.stderr, "")

    def test_starting_does_not_load_the_toolkit(self):
        """Its libraries would take 150 MB of memory also where nothing computes on a GPU."""
        result = subprocess.run(["ldd", BINARY], capture_output=True, text=True)
        if result.returncode != 0:
            self.skipTest("ldd does not know this binary")
        for library in ("libcuda.so", "libcublas", "libcudart"):
            self.assertNotIn(library, result.stdout)


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
            if re.match(r"step \d", line):
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        process.stderr.close()
        self.assertEqual(process.wait(), 130, rest)
        self.assertIn("--resume auto", rest)
        self.assertEqual(len(list(self.out.glob("checkpoint-*"))), 1)


class DrivesCase(Case):
    """Runs with their state on drives."""

    def setUp(self):
        super().setUp()
        self.drive = self.dir / "drive"
        self.keys = {"offload": "nvme", "nvme": self.drive}

    def command(self, **more):
        keys = {
            "model": self.config,
            "datasets": self.text,
            "output_dir": self.out,
            "sequence_len": 24,
            "micro_batch_size": 2,
            "logging_steps": 1,
            "threads": 2,
            **more,
        }
        return [BINARY, "train", *(str(item) for key in keys for item in (f"--{key}", keys[key]))]

    @staticmethod
    def lines(run):
        """The whole lines of a run's metrics."""
        file = run / "metrics.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def steps(self, run):
        return [line for line in self.lines(run) if "loss" in line]

    def last_step(self, run):
        return max((line["step"] for line in self.lines(run)), default=0)

    def check_kills(self, kills, max_steps):
        """A run killed so often, at moments in and between steps, while it is set up and while it
        saves, against one that never was and keeps its state elsewhere. Moments are fractions of
        what a step and the rest of a run were seen to take here, early where the run has got on
        too far for the kills that are left. It may still end before one, and then they are over."""
        keys = {
            "max_steps": max_steps,
            "gradient_accumulation_steps": 2,
            "save_steps": 3,
            "eval_steps": 4,
            "max_grad_norm": 0.9,
        }
        whole = self.dir / "whole"
        command = self.command(**keys, offload="none", output_dir=whole)
        begun = time.monotonic()
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        whole_s = time.monotonic() - begun
        # On drives both take longer, so kills come early rather than late.
        step_s = sum(line["seconds"] for line in self.steps(whole)) / max_steps
        setup_s = max(whole_s - max_steps * step_s, 0)
        most = max_steps // (2 * kills)  # steps between kills
        drives = f"{self.drive},{self.dir / 'other'}"
        command = self.command(**keys, offload="nvme", nvme=drives, resume="auto")
        moments = random.Random(9)
        resumed_from = []
        for _ in range(kills):
            begin = self.last_step(self.out)
            goal = begin + moments.choice(range(most))
            process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            # Most once it has got on by some steps, the others however far it is.
            is_ahead = begin / max_steps > len(resumed_from) / kills
            if not is_ahead and moments.random() < 0.75:
                while process.poll() is None and self.last_step(self.out) < goal:
                    time.sleep(0.002)
                time.sleep(moments.uniform(0, step_s))
            else:
                time.sleep(moments.uniform(0, setup_s + (0 if is_ahead else step_s)))
            process.kill()
            status = process.wait()
            complaint = process.stderr.read()
            process.stderr.close()
            if status == 0:
                break
            self.assertEqual(status, -signal.SIGKILL, complaint)
            resumed_from.append(self.last_step(self.out))
        self.assertGreaterEqual(len(resumed_from), (kills + 1) // 2, "it ended before it was killed")
        last = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(last.returncode, 0, last.stderr)
        self.assertGreater(max(resumed_from), 0)
        print(f"killed after steps {resumed_from}", file=sys.stderr)
        name = f"checkpoint-{max_steps:06}/state.safetensors"
        self.assertEqual((self.out / name).read_bytes(), (whole / name).read_bytes())
        exact = ("step", "loss", "grad_norm", "clipped", "lr", "tokens", "eval_loss")
        seen = [
            [{key: line[key] for key in exact if key in line} for line in self.lines(run)]
            for run in (whole, self.out)
        ]
        self.assertEqual(seen[0], seen[1])
        saved = [sorted(p.name for p in run.glob("checkpoint-*")) for run in (whole, self.out)]
        self.assertEqual(saved[0], saved[1])
        check = strata("store", "check", self.drive, self.dir / "other")
        self.assertEqual(check.returncode, 0, check.stderr)


class Drives(DrivesCase):
    """State on drives: what is refused, and what kills do to a run."""

    def test_what_does_not_go_together(self):
        drive = self.drive
        for change, words in (
            ({"nvme": ""}, ["nvme"]),
            ({"nvme": self.text}, [self.text, "no directory"]),
            ({"nvme": "/proc/strata"}, ["/proc/strata"]),
            ({"nvme": f"{drive},{drive}/"}, [drive, "twice"]),
            ({"nvme": f"{drive},"}, ["comma"]),
            ({"nvme": f"{drive}:5parsecs"}, ["nvme", "5parsecs"]),
            ({"offload": "disk"}, ["offload", "disk"]),
            ({"commit": "sometimes"}, ["commit", "sometimes"]),
            ({"save_strategy": "epoch"}, ["save_strategy", "epoch"]),
            ({"profile": "h900"}, ["h900", "h100"]),
            ({"profile": self.text}, [self.text, "profile"]),
            ({"trace": self.dir / "nowhere" / "trace.json"}, ["trace", "nowhere"]),
            ({"trace": self.dir}, ["trace", "directory"]),
            ({"nvme_write_bandwidth": 0}, ["nvme_write_bandwidth"]),
            ({"resume": self.dir / "nothing"}, ["nothing", "checkpoint"]),
        ):
            with self.subTest(change=change):
                self.assert_refused(self.train(**(self.keys | change)), *words)
                self.assertFalse(self.out.exists())
                self.assertFalse(drive.exists())

    def test_what_does_not_fit(self):
        for change, words in (
            ({"nvme": f"{self.drive}:20KiB"}, ["NVMe", "20.0 KiB"]),
            ({"device_memory": "20KiB"}, ["device memory"]),
            ({"host_memory": "20KiB"}, ["host memory"]),
        ):
            with self.subTest(change=change):
                self.assert_refused(self.train(**(self.keys | change)), *words, code=3)
                self.assertFalse(self.out.exists())
                self.assertFalse(self.drive.exists())

    def test_a_store_is_not_written_over_nor_shared(self):
        self.assertEqual(self.train(**self.keys, max_steps=2).returncode, 0)
        first, self.out = self.out, self.dir / "second"
        self.assert_refused(self.train(**self.keys), self.drive, "--resume auto")
        self.assertFalse(self.out.exists())
        self.out = first
        command = self.command(max_steps=100000, resume="auto", **self.keys)
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        for line in process.stderr:
            if re.match(r"step \d", line):
                break
        self.out = self.dir / "second"
        self.assert_refused(self.train(**self.keys, resume="auto"), "in use", process.pid)
        self.assertFalse(self.out.exists())
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        process.stderr.close()
        self.assertEqual(process.wait(), 130, rest)

    def test_an_interrupted_run_without_checkpoints_is_kept(self):
        command = self.command(max_steps=100000, save_strategy="no", **self.keys)
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        for line in process.stderr:
            if re.match(r"step \d", line):
                break
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        process.stderr.close()
        self.assertEqual(process.wait(), 130, rest)
        self.assertIn("kept on the drives", rest)
        self.assertIn("--resume auto", rest)
        self.assertEqual(list(self.out.glob("checkpoint-*")), [])
        step = self.steps(self.out)[-1]["step"]
        result = self.train("--json", **self.keys, resume="auto", max_steps=step + 1)
        self.assertEqual(result.returncode, 0, result.stderr)
        outcome = json.loads(result.stdout)
        self.assertEqual(outcome["step"], step + 1)
        self.assertTrue(outcome["committed"])
        self.assertEqual([line["step"] for line in self.steps(self.out)], list(range(1, step + 2)))

    def test_killed_three_times(self):
        self.check_kills(3, 24)


class DrivesOften(DrivesCase):
    """The same with twenty kills, for when there is time."""

    def test_killed_twenty_times(self):
        self.check_kills(20, 120)


class Memory(Case):
    """The process's peak of memory against the plan: no more, and no less, or the plan is for
    memory that is not used. Arenas are large beside the program, of 250 to 430 MiB together."""

    def check(self, *words, **more):
        config = CONFIG | {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6}
        self.config.write_text(json.dumps(config))
        result = self.train(
            "--json",
            sequence_len=64,
            micro_batch_size=4,
            gradient_accumulation_steps=8,
            max_steps=2,
            val_set_size=0.1,
            **more,
        )
        self.assertEqual(result.returncode, 0, result.stderr)
        for word in words:
            self.assertIn(word, result.stderr)
        outcome = json.loads(result.stdout)
        planned, peak = outcome["planned_bytes"], outcome["peak_resident_bytes"]
        print(f"planned {planned / 2**20:.1f} MiB, peak {peak / 2**20:.1f} MiB", file=sys.stderr)
        self.assertGreater(planned, 200 * 2**20)
        self.assertLess(abs(peak - planned), 0.02 * planned + 64 * 2**20)

    def test_on_the_device(self):
        self.check(offload="none")

    def test_in_host_memory(self):
        self.check(offload="host")

    def test_in_host_memory_with_the_boundaries(self):
        self.check("boundaries between units: host", offload="host", device_memory="36MiB")

    def test_on_nvme_committed_every_step(self):
        self.check("speculated", offload="nvme", nvme=self.dir / "drive")

    def test_on_nvme_committed_when_saved(self):
        self.check(
            "optimizer nvme",
            offload="nvme",
            nvme=self.dir / "drive",
            commit="save",
            optimizer_state="int8",
        )


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


class Plan(Case):
    """`strata plan`: no device, no data, nothing written."""

    def plan(self, *more, **replaced):
        keys = {
            "profile": "rtx4090-ddr5",
            "model": "tinyllama-1.1b",
            "sequence-len": 512,
            "micro-batch-size": 4,
            **replaced,
        }
        flags = [item for key, value in keys.items() for item in (f"--{key}", value)]
        return strata("plan", *flags, *more)

    def json(self, *more, **replaced):
        result = self.plan("--json", "--no-advice", *more, **replaced)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stderr, "")
        return json.loads(result.stdout)

    def test_a_table_for_people(self):
        result = self.plan()
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stderr, "")
        for word in (
            "tinyllama-1.1b: 1.10 B parameters",
            "not measured",
            "home of",
            "gradient accumulators",
            "tokens/s, bound by",
            "MFU",
            "TB per 1,000 steps",
            "instead of",
        ):
            self.assertIn(word, result.stdout)

    def test_json(self):
        plan = self.json()
        self.assertEqual(plan["schema"], 1)
        keys = "schema model profile shape placement tiers predicted advice"
        self.assertEqual(list(plan), keys.split())
        self.assertEqual(plan["model"]["parameters"], 1100048384)
        self.assertEqual(len(plan["placement"]["units"]), 24)
        for tier in plan["tiers"].values():
            self.assertLessEqual(tier["planned_bytes"], tier["allowed_bytes"])
            self.assertEqual(tier["planned_bytes"], sum(tier["purposes"].values()))
        predicted = plan["predicted"]
        self.assertAlmostEqual(predicted["tokens_per_s"] * predicted["step_s"], 2048, delta=1e-3)
        self.assertGreater(predicted["flops_per_s"], 0)
        self.assertLess(predicted["mfu"], 1)
        self.assertIn(predicted["bounding_lane"], predicted["lanes"])
        self.assertLess(sum(lane["path_s"] for lane in predicted["lanes"].values()), predicted["step_s"] * 1.001)
        self.assertEqual(plan, self.json())

    def test_advice_is_in_json_unless_unwanted(self):
        advice = json.loads(self.plan("--json").stdout)["advice"]
        self.assertEqual(len(advice), 4)
        self.assertEqual(set(advice[0]), {"change", "tokens_per_s", "gain"})
        self.assertEqual(self.json()["advice"], [])

    def test_budgets_are_kept_and_change_the_plan(self):
        wide = self.json()["placement"]
        narrow = self.json(**{"device-memory": "2GiB", "host-memory": "4GiB"})
        self.assertNotEqual(wide, narrow["placement"])
        self.assertLessEqual(narrow["tiers"]["device"]["planned_bytes"], 2 * 2**30)
        self.assertLessEqual(narrow["tiers"]["host"]["planned_bytes"], 4 * 2**30)
        self.assertGreater(narrow["tiers"]["nvme"]["planned_bytes"], 0)
        without = self.json(**{"device-memory": "2GiB", "nvme-bytes": 0})
        self.assertEqual(without["tiers"]["nvme"]["planned_bytes"], 0)

    def test_durable(self):
        plan = self.json("--durable")
        self.assertTrue(plan["placement"]["durable"])
        for unit in plan["placement"]["units"]:
            self.assertEqual((unit["optimizer"], unit["update"]), ("nvme", "speculated"))
        self.assertGreater(plan["predicted"]["replay_s"], 0)
        self.assertGreater(plan["predicted"]["written_bytes_per_step"], 12 * 1.1e9)

    def test_flags_overrule_the_configuration(self):
        file = self.dir / "train.yaml"
        file.write_text(
            f"model: {self.config}\nprofile: h100\nsequence_len: 32\nmicro_batch_size: 3\n"
            "gradient_accumulation_steps: 5\noptimizer_state: int8\noffload: host\n"
        )
        result = strata("plan", file, "--json", "--no-advice", "--micro_batch_size", 2)
        self.assertEqual(result.returncode, 0, result.stderr)
        plan = json.loads(result.stdout)
        self.assertEqual(plan["shape"], {"micro_batches": 5, "micro_batch_size": 2, "sequence_len": 32})
        self.assertEqual(plan["profile"]["name"], "h100")
        self.assertEqual(plan["placement"]["moments"], "int8")
        self.assertEqual({unit["optimizer"] for unit in plan["placement"]["units"]}, {"host"})

    def test_a_model_that_differs_says_so(self):
        result = self.plan("--no-advice", model="qwen3-14b")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("note     norms of its queries and keys are left out", result.stdout)

    def test_refused(self):
        broken = self.dir / "profile.json"
        broken.write_text('{"version": 1}')
        for keys, *words in (
            ({"profile": "rtx4090"}, "rtx4090", "rtx4090-server"),
            ({"profile": broken}, broken, "name"),
            ({"model": "llama2-13B"}, "llama2-13B", "llama2-13b"),
            ({"model": self.dir / "none"}, "none"),
            ({"sequence-len": 1 << 15}, "sequence_len", 2048),
            ({"sequence-len": 0}, "sequence_len"),
            ({"host-memory": "lots"}, "host_memory", "lots"),
            ({"nvme-bytes": "-1"}, "-1"),
            ({"optimizer-state": "fp4"}, "optimizer_state", "fp4"),
            ({"offload": "nvme", "nvme-bytes": 0}, "NVMe", "drives"),
        ):
            with self.subTest(**{key.replace("-", "_"): str(value) for key, value in keys.items()}):
                self.assert_refused(self.plan(**keys), *words)
        self.assert_refused(strata("plan", "--model", "llama2-7b"), "profile")
        self.assert_refused(strata("plan", "--profile", "h100"), "model")
        self.assert_refused(strata("plan", self.dir / "none.yaml"), "none.yaml")

    def ranked(self, *more, **replaced):
        """A model of the test's size on two nodes, which takes no time to plan."""
        return self.json(*more, **{"model": self.config, "profile": "h100", "sequence-len": 32, "ranks": 16, **replaced})

    def test_ranks(self):
        alone = self.ranked(ranks=1)
        self.assertNotIn("ranks", alone)
        for sharding, shard_ranks in (
            ("no_shard", 1), ("shard_optimizer", 16), ("shard_grad_op", 16), ("full_shard", 16), ("hybrid_shard", 8)
        ):
            with self.subTest(sharding=sharding):
                plan = self.ranked(sharding=sharding)
                ranks = plan["ranks"]
                self.assertEqual((ranks["ranks"], ranks["sharding"]), (16, sharding))
                self.assertEqual((ranks["shard_ranks"], ranks["replicas"]), (shard_ranks, 16 // shard_ranks))
                self.assertEqual(ranks["ranks_per_node"], 8)
                self.assertEqual(ranks["collective_bytes"], sum(ranks["sent_bytes"].values()))
                self.assertEqual(plan["predicted"]["lanes"]["collective"]["moved_bytes"], ranks["collective_bytes"])
                self.assertAlmostEqual(ranks["tokens_per_s"], 16 * plan["predicted"]["tokens_per_s"], delta=1)
                parameters = plan["model"]["parameters"]
                self.assertGreaterEqual(ranks["state_bytes"]["moment1"] * shard_ranks, 4 * parameters)
        self.assertEqual(self.ranked(**{"ranks-per-node": 4, "sharding": "hybrid_shard"})["ranks"]["shard_ranks"], 4)
        self.assertEqual(self.ranked(**{"shard-group-size": 2, "sharding": "hybrid_shard"})["ranks"]["replicas"], 8)
        # Ranks on a node that has one in the profile share its network: 2 * 7/8 of the gradients
        # over it instead of 2 * 1/2.
        slow = {"profile": "rtx4090-server", "sharding": "no_shard", "sequence-len": 64, "nvme-bytes": 0, "offload": "host"}
        one = self.json(ranks=2, **slow)["ranks"]
        four = self.json(ranks=8, **slow, **{"ranks-per-node": 4})["ranks"]
        self.assertAlmostEqual(four["collective_s"] / one["collective_s"], 7 / 4, delta=0.05)
        full, rounded = (self.ranked(**{"reduce-dtype": dtype})["ranks"] for dtype in ("fp32", "bf16"))
        self.assertEqual(rounded["sent_bytes"]["reduce_gradient"] * 2, full["sent_bytes"]["reduce_gradient"])

    def test_scaling(self):
        plan = self.ranked("--scaling", "32", **{"global-batch-size": 16})
        self.assertEqual([row["ranks"] for row in plan["scaling"]], [1, 2, 4, 8, 16, 32])
        self.assertEqual(plan["scaling"][0]["efficiency"], 1)
        self.assertFalse(plan["scaling"][5]["fits"])
        self.assertIn("fewer sequences", plan["scaling"][5]["why_not"])
        self.assertEqual(plan["scaling"][4]["tokens_per_rank"], 32)
        self.assertEqual(len(self.ranked("--scaling")["scaling"]), 11)

    def test_a_table_of_ranks(self):
        result = strata("plan", "--profile", "h100", "--model", self.config, "--sequence-len", 32, "--ranks", 16, "--scaling", 4)
        self.assertEqual(result.returncode, 0, result.stderr)
        for word in (
            "tokens/s a rank", "at rest: weight", "whatever the micro-batches", "of what one rank alone does",
            "least that is enough", "fastest", "more tokens: with", "scaling of full_shard",
        ):
            self.assertIn(word, result.stdout)

    def test_classic(self):
        flags = ("plan", "--model", "llama2-7b", "--layout", "classic", "--ranks", 32, "--gradient-accumulation-steps", 4)
        result = strata(*flags, "--json")
        self.assertEqual(result.returncode, 0, result.stderr)
        plan = json.loads(result.stdout)
        count = plan["model"]["parameters"]
        stages = {row["stage"]: row for row in plan["classic"]}
        self.assertEqual(stages["plain"]["total_bytes"], 20 * count)
        self.assertEqual(stages["zero-3"]["sent_bytes"], 4 * 3 * 2 * count * 31 / 32)
        own = {row["sharding"]: row for row in plan["own"]}
        self.assertEqual(list(own), ["no_shard", "shard_optimizer", "shard_grad_op", "full_shard"])
        self.assertLess(own["full_shard"]["sent_bytes"], stages["zero-3"]["sent_bytes"] / 2)
        self.assertIn("zero-3", strata(*flags).stdout)

    def test_ranks_refused(self):
        for keys, *words in (
            ({"ranks": 0}, "--ranks is 0"),
            ({"ranks-per-node": -1}, "--ranks-per-node"),
            ({"sharding": "zero3"}, "sharding", "full_shard"),
            ({"sharding": "hybrid_shard", "shard-group-size": 3, "ranks": 16}, "16 ranks", "groups of 3"),
            ({"ranks": 16, "global-batch-size": 24}, "24 sequences", "16 ranks"),
            ({"layout": "modern"}, "--layout", "classic"),
        ):
            with self.subTest(**{key.replace("-", "_"): str(value) for key, value in keys.items()}):
                self.assert_refused(self.plan(**keys), *words)
        profile = json.loads((ROOT / "src/pipeline/profiles/h100.json").read_text())
        for key in ("ranks_per_node", "network_bytes_per_s"):
            del profile["figures"][key]
        file = self.dir / "old.json"
        file.write_text(json.dumps(profile))
        self.assertEqual(self.plan("--no-advice", model=self.config, profile=file, **{"sequence-len": 32}).returncode, 0)
        small = {"model": self.config, "sequence-len": 32, "profile": file, "ranks": 16}
        self.assert_refused(self.plan(**small), "ranks_per_node")
        self.assert_refused(self.plan(**small, **{"ranks-per-node": 8}), "network_bytes_per_s")

    def test_a_unit_larger_than_a_device(self):
        refused = self.plan(profile="h100", ranks=16, **{"device-memory": "64MiB"})
        self.assert_refused(refused, "does not fit", "tensor parallelism", code=3)

    def test_what_does_not_fit_says_what_would(self):
        small = {"device-memory": "1GiB", "host-memory": "2GiB", "nvme-bytes": 0}
        refused = self.plan(**small)
        self.assert_refused(refused, "does not fit", "host memory", code=3)
        enough = dict(re.findall(r"\((\d+) bytes\) of (host memory|NVMe)", refused.stderr.split("would fit")[1]))
        enough = {what: count for count, what in enough.items()}
        more = self.json(**{**small, "host-memory": enough["host memory"]})
        self.assertLessEqual(more["tiers"]["host"]["planned_bytes"], int(enough["host memory"]))


if __name__ == "__main__":
    BINARY = os.path.abspath(sys.argv.pop(1))
    unittest.main(verbosity=2)
