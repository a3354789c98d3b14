"""
Configurations of quantized checkpoints as other tools write them.
"""

import copy

Config = dict[str, object]

AUTO_GPTQ: Config = {  # quantize_config.json of auto-gptq 0.7, with what it adds itself
    "bits": 4,
    "group_size": 128,
    "damp_percent": 0.01,
    "desc_act": True,
    "static_groups": False,
    "sym": True,
    "true_sequential": True,
    "model_name_or_path": None,
    "model_file_base_name": "model",
    "is_marlin_format": False,
    "quant_method": "gptq",
    "checkpoint_format": "gptq",
    "awq_gemm_checkpoint": None,
}
OLD_AUTO_GPTQ: Config = {"bits": 8, "group_size": -1, "desc_act": False, "sym": False, "damp_percent": 0.1}
GPTQMODEL: Config = {
    "bits": 4,
    "dynamic": {"-:.*\\.mlp\\.gate.*": {}, "-:model\\.layers\\.3\\.mlp\\.up_proj$": {}, "+:.*": {}},
    "group_size": 32,
    "desc_act": False,
    "lm_head": False,
    "quant_method": "gptq",
    "checkpoint_format": "gptq_v2",
    "pack_dtype": "int32",
    "sym": True,
    "meta": {"quantizer": ["gptqmodel:7.7.0"], "act_group_aware": True},
}
TRANSFORMERS_GPTQ: Config = {
    "bits": 4,
    "group_size": 64,
    "desc_act": False,
    "sym": True,
    "quant_method": "gptq",
    "tokenizer": None,
    "dataset": "wikitext2",
    "modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["mlp.up_proj"]],
    "use_cuda_fp16": False,
    "exllama_config": {"version": 1},
}
TOKENS: Config = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
WEIGHTS: Config = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
GROUP: Config = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": TOKENS, "output_activations": None}
COMPRESSED: Config = {
    "config_groups": {"group_0": GROUP},
    "format": "int-quantized",
    "global_compression_ratio": None,
    "ignore": ["lm_head", "re:.*mlp\\.gate_proj", "model.layers.2.mlp.down_proj", "model.embed_tokens"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "sparsity_config": {},
    "transform_config": {},
    "version": "0.12.2",
}
BITSANDBYTES: Config = {  # as transformers saves it
    "_load_in_4bit": True,
    "_load_in_8bit": False,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False,
    "llm_int8_skip_modules": None,
    "llm_int8_threshold": 6.0,
    "load_in_4bit": True,
    "load_in_8bit": False,
    "quant_method": "bitsandbytes",
}


def changed(config: Config, path: str, value: object) -> Config:
    """The configuration with one value, at that dotted path, changed; `...` takes it out."""
    whole = copy.deepcopy(config)
    inner = whole
    *parents, last = path.split("/")
    for parent in parents:
        step = inner[parent]
        assert isinstance(step, dict)
        inner = step
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return whole
