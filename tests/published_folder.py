"""A small random model as others publish theirs, and a tokenizer beside it"""

import base64
import json

import torch

from moe import ModelConfig
from small import SIZES

# How Qwen2 cuts a text before it is encoded.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_foreign_model(context):
    """A random model of sizes that a published one in DeepSeek-V3's format could have"""
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab": 512, "layers": 2, "experts": 4, "context": context}
    return ModelConfig(**sizes).build_model()


def write_byte_tokenizer(folder):
    """A published tokenizer that knows the 256 bytes and no pair of them, with Kimi's marks of
    turns"""
    lines = (base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256))
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    marks = "[BOS] [EOS] <|im_end|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|>"
    added = {256 + i: {"content": name} for i, name in enumerate(marks.split())}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
