"""A small random model as others publish theirs, and a tokenizer beside it"""

import base64

import torch

from moe import ModelConfig
from small import SIZES


def build_foreign_model(context):
    """A random model of sizes that a published one in DeepSeek-V3's format could have"""
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab": 512, "layers": 2, "experts": 4, "context": context}
    return ModelConfig(**sizes).build_model()


def write_byte_tokenizer(folder):
    """A published tokenizer that knows the 256 bytes and no pair of them"""
    lines = (base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256))
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
