"""Writes a tiny random Llama with a tokenizer of bytes, and a LoRA adapter for it.

Runs in the environment of the engine: ``make_model.py FOLDER ADAPTER [HIDDEN_SIZE [LAYERS]]``.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_MAX_TOKENS = 16_384
_HEAD_SIZE = 32
_RANK = 8
_CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def _write_tokenizer(folder: Path) -> int:
    """Write the tokenizer; return the number of its tokens."""
    tokens = ["<s>", "</s>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: at for at, token in enumerate(tokens)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = _CHAT
    fast.save_pretrained(folder)
    return len(tokens)


def _write_model(folder: Path, tokens: int, hidden_size: int, layers: int) -> None:
    heads = max(1, hidden_size // _HEAD_SIZE)
    config = LlamaConfig(
        vocab_size=tokens,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=_MAX_TOKENS,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def _write_adapter(folder: Path, hidden_size: int, layers: int) -> None:
    targets = ["q_proj", "v_proj"]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": 2 * _RANK,
        "target_modules": targets,
        "bias": "none",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = {}
    for layer in range(layers):
        for target in targets:
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            weights[f"{name}.lora_A.weight"] = torch.randn(_RANK, hidden_size).to(torch.bfloat16)
            weights[f"{name}.lora_B.weight"] = torch.randn(hidden_size, _RANK).to(torch.bfloat16)
    save_file(weights, folder / "adapter_model.safetensors")


def _main(model: str, adapter: str, hidden_size: str = "64", layers: str = "2") -> None:
    torch.manual_seed(0)
    tokens = _write_tokenizer(Path(model))
    _write_model(Path(model), tokens, int(hidden_size), int(layers))
    _write_adapter(Path(adapter), int(hidden_size), int(layers))


_main(*sys.argv[1:])
