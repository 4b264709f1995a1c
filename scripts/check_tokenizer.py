#!/usr/bin/env python3
"""Compares this project's token ids with those of the `tokenizers` package on one text.

    check_tokenizer.py SOURCE... --text FILE [--bytes N] [--fuzz N] [--program build/tests/encode_text] [--llama-tokenize PROGRAM]

SOURCE is a folder with tokenizer.json or a GGUF file with a byte-level BPE vocabulary (gpt2); for the latter the reference is
built from the file's own tokens and merges and the pre-tokenizer that its `tokenizer.ggml.pre` names. For a GGUF file with a
SentencePiece vocabulary (llama) the reference is llama.cpp's llama-tokenize. --fuzz adds N seeded random Unicode texts.
Needs the Python packages tokenizers and gguf. Exit status 1 if any id differs.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def byte_level(use_regex):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


PRE_TOKENIZERS = {
    "gpt-2": lambda: byte_level(True),
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level(True)]),
    "llama-bpe": lambda: pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), byte_level(False)]),
    "qwen2": lambda: pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "isolated"), byte_level(False)]),
}


class LlamaTokenize:
    """llama-tokenize behind the two methods of `tokenizers` that are used here."""

    def __init__(self, program, path, tokens):
        self.program, self.path, self.tokens = program, path, tokens

    def encode(self, text, add_special_tokens):
        with tempfile.NamedTemporaryFile() as file:
            file.write(text.encode())
            file.flush()
            done = subprocess.run([self.program, "-m", self.path, "-f", file.name, "--ids", "--no-bos", "--no-parse-special", "--no-escape",
                                   "--log-disable"], capture_output=True, check=True)
        self.ids = json.loads(done.stdout)
        return self

    def id_to_token(self, token_id):
        return self.tokens[token_id]


def reference_of_gguf(path, llama_tokenize):
    from gguf import GGUFReader

    reader = GGUFReader(path)

    def field(name):
        return reader.fields[name].contents() if name in reader.fields else None

    if field("tokenizer.ggml.model") == "llama" and llama_tokenize:
        return LlamaTokenize(llama_tokenize, path, field("tokenizer.ggml.tokens"))
    if field("tokenizer.ggml.model") != "gpt2":
        sys.exit(f"{path}: only byte-level BPE (gpt2) has a reference without --llama-tokenize")
    pre = field("tokenizer.ggml.pre") or "gpt-2"
    vocab = {text: i for i, text in enumerate(field("tokenizer.ggml.tokens"))}
    merges = [tuple(m.split(" ", 1)) for m in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    return tokenizer


def reference(source, llama_tokenize):
    if source.endswith(".gguf"):
        return reference_of_gguf(source, llama_tokenize)
    tokenizer = Tokenizer.from_file(str(Path(source) / "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # special strings in raw text are literal
    return tokenizer


def random_text(rng, n):
    """Characters of many scripts and classes; spaces, line ends, digits and apostrophes often, as pre-tokenizers cut there."""
    ranges = [(0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x52F), (0x590, 0x6FF), (0x900, 0x97F), (0xE00, 0xE7F),
              (0x1100, 0x11FF), (0x2000, 0x206F), (0x2100, 0x218F), (0x3040, 0x30FF), (0x4E00, 0x4FFF), (0xAC00, 0xACFF),
              (0xF900, 0xF9FF), (0xFF00, 0xFFEF), (0x1F300, 0x1F64F), (0x1D400, 0x1D4FF)]
    common = [" ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "'ve", "don't", "12345", "1", "a", "Hello", " world", "...", "\u00a0", "\u180e", "\u0085",
              "\u2028", "e\u0301", "\u212b", "\u017f", "'\u017f", "\x00", "\x1f"]
    out = []
    for _ in range(n):
        if rng.random() < 0.5:
            out.append(rng.choice(common))
        else:
            low, high = rng.choice(ranges)
            out.append(chr(rng.randint(low, high)))
    return "".join(out)


def run(program, source, text):
    started = time.time()
    done = subprocess.run([program, source], input=text.encode(), capture_output=True)
    if done.returncode != 0:
        sys.exit(f"{source}: {done.stderr.decode().strip()}")
    return [int(x) for x in done.stdout.split()], time.time() - started


def compare(ours, theirs, reference_tokenizer, label):
    if ours == theirs:
        return True
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    print(f"{label}: DIFFERENT, {len(ours)} against {len(theirs)} ids, first at {at}:")
    print(f"  ours      {ours[at - 3:at + 8]}")
    print(f"  reference {theirs[at - 3:at + 8]}  {[reference_tokenizer.id_to_token(i) for i in theirs[at - 3:at + 8]]}")
    return False


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="+")
    parser.add_argument("--text", required=True)
    parser.add_argument("--bytes", type=int, default=1_000_000)
    parser.add_argument("--fuzz", type=int, default=0)
    parser.add_argument("--program", default=str(Path(__file__).resolve().parent.parent / "build/tests/encode_text"))
    parser.add_argument("--llama-tokenize", help="llama.cpp's program, for GGUF files with a SentencePiece vocabulary")
    args = parser.parse_args()
    text = Path(args.text).read_bytes()[: args.bytes].decode("utf-8", errors="ignore")
    same = True
    for source in args.source:
        tokenizer = reference(source, args.llama_tokenize)
        ours, seconds = run(args.program, source, text)
        theirs = tokenizer.encode(text, add_special_tokens=False).ids
        good = compare(ours, theirs, tokenizer, source)
        rng = random.Random(7)
        for i in range(args.fuzz):
            sample = random_text(rng, rng.randint(1, 400))
            ids, _ = run(args.program, source, sample)
            good &= compare(ids, tokenizer.encode(sample, add_special_tokens=False).ids, tokenizer, f"{source} random text {i} {sample[:40]!r}")
        same &= good
        if good:
            print(f"{source}: {len(ours)} ids of {len(text.encode())} bytes equal ({seconds:.2f} s), {args.fuzz} random texts equal")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
