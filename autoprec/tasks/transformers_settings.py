"""Small settings for the architectures of transformers: four layers of width 128, as a first trial needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["BYTE_TOKENS", "MASK_TOKEN", "OF_TYPE", "SMALL", "TOKEN_SETTINGS"]

BYTE_TOKENS = 264
"""Tokens of a byte-level model: 256 bytes and the special ones, up to a multiple of 8, as FP16 products want it."""
MASK_TOKEN = 256
TOKEN_SETTINGS: Mapping[str, Any] = {
    "vocab_size": BYTE_TOKENS,
    "pad_token_id": 0,  # the byte 0 is in no text; RoBERTa and its kin count positions from the padding's number
    "bos_token_id": 257,
    "eos_token_id": 258,
    "sep_token_id": 258,
    "cls_token_id": 257,
    "decoder_start_token_id": 257,
}

_WIDTH, _INNER, _LAYERS, _HEADS = 128, 512, 4, 4
SMALL: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "dim", "emb_dim", "word_embed_dim"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size"), _INNER),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size"), _INNER),
    **dict.fromkeys(("shared_expert_intermediate_size",), _INNER),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), _LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), _HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), _HEADS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "block_size"), 514),
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": _WIDTH // _HEADS,
    "d_kv": _WIDTH // _HEADS,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    "depths": 2,
}
"""Settings by the names that configurations have for them; one that a configuration lacks is left out, and a number for
a list is what none of its entries exceeds."""

OF_TYPE: Mapping[str, Mapping[str, Any]] = {
    "bitnet": {"num_key_value_heads": 4},
    "distilbert": {"hidden_dim": _INNER},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 64},
    "gptj": {"rotary_dim": 16},
    "codegen": {"rotary_dim": 16},
    "mobilebert": {"intra_bottleneck_size": 64, "true_hidden_size": 64},
    "rembert": {"input_embedding_size": 64, "output_embedding_size": 64},
    "albert": {"embedding_size": 64},
    "squeezebert": {"embedding_size": _WIDTH},
    "convbert": {"embedding_size": _WIDTH},
    "esm": {"mask_token_id": MASK_TOKEN},
}
"""What an architecture needs beside `SMALL`, by its name."""
